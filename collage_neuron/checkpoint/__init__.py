"""Checkpoints to and from plain fp32 training, and as tensors with names, for safetensors.

A checkpoint of a compiled run needs none of this: `model.state_dict()` and `optimizer.state_dict()` are all of it.
These functions are for entering from, and leaving to, a run without collage_neuron (docs/checkpoints.md).
"""

from collage_neuron.checkpoint.fp32 import get_fp32_state_dict, set_fp32_state_dict
from collage_neuron.checkpoint.tensors import from_tensors, to_tensors

__all__ = ["from_tensors", "get_fp32_state_dict", "set_fp32_state_dict", "to_tensors"]
