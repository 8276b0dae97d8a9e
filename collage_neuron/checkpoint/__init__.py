"""Converts checkpoints to and from plain fp32 training, and to named tensors for safetensors.

To save and resume a compiled run, `model.state_dict()` and `optimizer.state_dict()` are enough. The functions here
convert to and from checkpoints of runs without collage_neuron (docs/checkpoints.md).
"""

from collage_neuron.checkpoint.fp32 import get_fp32_state_dict, save_pretrained_fp32, set_fp32_state_dict
from collage_neuron.checkpoint.named_tensors import from_tensors, to_tensors

__all__ = ["from_tensors", "get_fp32_state_dict", "save_pretrained_fp32", "set_fp32_state_dict", "to_tensors"]
