"""Tells what of a model is spread over processes: its shapes and names are then not those that a graph would have."""

from __future__ import annotations

import torch

from collage_neuron import torch_privates
from collage_neuron.states.sharding import is_sharded


def spread_part(model: torch.nn.Module) -> str | None:
    """What of a model FSDP, tensor parallelism or torch_xla's FSDP holds, or None.

    FSDP puts whole parameters into the model while its forward runs, so its modules are asked as well.
    """
    for name, module in model.named_modules():
        if torch_privates.is_managed_by_fsdp(module):
            return f"FSDP holds {name or 'the model'}"
    for name, p in model.named_parameters():
        if is_sharded(p) or torch_privates.is_flattened(p) or torch_privates.is_of_xla_fsdp(p):
            return f"model parameter {name!r} is spread over processes"
    return None


def advice(spread: str) -> str:
    """The sentence of an error."""
    return f"{spread}, and matmul='fp8' does not follow what gathers parameters yet: use DDP, or leave matmul='fp8' out"
