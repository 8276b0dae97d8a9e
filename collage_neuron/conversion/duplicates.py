"""Rejects optimizers that hold a tensor twice, since each parameter and each state needs its own words."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate


def check(optimizer: Optimizer) -> None:
    """Raises UnsupportedUpdate for a duplicate parameter, and for a state that is another state or a parameter."""
    for other, where in _again({}, _parameters(optimizer), id):
        raise UnsupportedUpdate(
            f"{other} and {where} are the same parameter, which a step would update twice; hand over each "
            "parameter once: list(dict.fromkeys(params)) drops those that are there again"
        )
    held = {_memory(tensor): where for where, tensor in _parameters(optimizer)}
    for other, where in _again(held, _states(optimizer), _memory):
        raise UnsupportedUpdate(
            f"{other} and {where} are one tensor, and a compiled optimizer keeps each in memory of its own: what "
            "is written to the one would not be seen in the other; keep it under one name, or clone() it"
        )


def _again(
    held: dict[Hashable, str], tensors: Iterable[tuple[str, torch.Tensor]], key: Callable[[torch.Tensor], Hashable]
) -> Iterator[tuple[str, str]]:
    """Where a tensor was, and where it is again."""
    for where, tensor in tensors:
        other = held.setdefault(key(tensor), where)
        if other != where:
            yield other, where


def _parameters(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            yield f"param_groups[{i}]['params'][{j}]", p


def _states(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for place, p in _parameters(optimizer):
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer.state[{place}][{name!r}]", value


def _memory(tensor: torch.Tensor) -> Hashable:
    """A key that is equal for tensors with the same memory; wrappers, and tensors on lazy devices, have no address."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type in ("xla", "meta"):
        return id(tensor)
    return (tensor.device, tensor.data_ptr()) if tensor.data_ptr() else id(tensor)
