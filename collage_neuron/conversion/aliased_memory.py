"""Rejects optimizers that hold a tensor twice, or the memory of an fp32 parameter or of a state elsewhere too.

Each parameter and each state needs its own words. `compile` moves them: a view would keep the old memory. What `step()`
writes there would not be seen in the parameter, and what it reads there would stay as it was before training.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.optimizer.pending_models import models, models_of
from collage_neuron.states.bookkeeping import params_of
from collage_neuron.states.inner_optimizers import inner_of
from collage_neuron.states.state_keys import is_value
from collage_neuron.trace.reachable_code import reachable


def check_views(base: type[Optimizer], optimizer: Optimizer) -> None:
    """Raises UnsupportedUpdate for a tensor, or an array, over memory that a parameter or state has, or had before."""
    params = params_of(optimizer)
    of_params = {key for p in params if p.dtype == torch.float32 for key in _memory(p)}
    of_params |= {ref.cdata for model in models_of(optimizer) for ref in models[model].memories}
    states = {p: optimizer.state[p] for p in params if optimizer.state.get(p)}
    own = [x for p, state in states.items() for x in state.values() if is_value(x, p)]
    own = [x for x in own if of_params.isdisjoint(_memory(x))]
    moving = of_params.union(*map(_memory, own))
    known, stored = set(map(id, params)), set(map(id, own))
    left = [{k: x for k, x in state.items() if id(x) not in stored} for state in states.values()]
    left += [dict(vars(p)) for p in params]
    for x in _held(base, optimizer, left) if moving else ():
        if id(x) not in known and not isinstance(x, torch.nn.Parameter) and not moving.isdisjoint(_memory(x)):
            raise UnsupportedUpdate(
                f"{base.__name__} cannot be compiled: it holds a view of a float32 parameter or of a state (p.data, "
                "p.detach(), an array of it). Both have other memory then, in bfloat16, and the view keeps the old "
                "one: let step() take them from self.param_groups and self.state"
            )


def _held(base: type[Optimizer], optimizer: Optimizer, namespaces: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """What the optimizer holds, tensors and arrays among it, and what is in the namespaces of its parameters."""
    with suppress(UnsupportedUpdate):  # there is too much of it: what was found so far has been looked at
        own = (optimizer, *(each.optimizer for each in inner_of(optimizer)))
        names = [{k: v for k, v in vars(x).items() if k != "state"} for x in own]
        yield from reachable([base, *names, *namespaces])


def _memory(x: Any) -> list[int]:
    """The identity of the memory of a tensor, or of the tensor that an array is a view of; none of other objects."""
    while not isinstance(x, torch.Tensor) and type(x).__module__ == "numpy" and getattr(x, "base", None) is not None:
        x = x.base
    with suppress(RuntimeError, NotImplementedError):  # subclasses that wrap others
        if isinstance(x, torch.Tensor) and x.layout is torch.strided and x.numel():
            return [torch_privates.storage_id(x.untyped_storage())]
    return []


# --- twice in the optimizer -------------------------------------------------------------------------------------------


def check_distinct(optimizer: Optimizer) -> None:
    """Raises UnsupportedUpdate for a duplicate parameter, and for a state that is another state or a parameter."""
    known: dict[int, str] = {}
    for where, p in _parameters(optimizer):
        if (other := known.setdefault(id(p), where)) != where:
            raise UnsupportedUpdate(
                f"{other} and {where} are the same parameter, which a step would update twice; hand over each "
                "parameter once: list(dict.fromkeys(params)) drops those that are there again"
            )
    held = {_address(tensor): where for where, tensor in _parameters(optimizer)}
    for where, x in _states(optimizer):
        if (other := held.setdefault(_address(x), where)) != where:
            raise UnsupportedUpdate(
                f"{other} and {where} are one tensor, and a compiled optimizer keeps each in memory of its own: what "
                "is written to the one would not be seen in the other; keep it under one name, or clone() it"
            )


def _parameters(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for i, group in enumerate(optimizer.param_groups):
        for j, p in enumerate(group["params"]):
            yield f"param_groups[{i}]['params'][{j}]", p


def _states(optimizer: Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for place, p in _parameters(optimizer):
        for name, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                yield f"optimizer.state[{place}][{name!r}]", value


def _address(tensor: torch.Tensor) -> Hashable:
    """A key that is equal for tensors with the same memory; wrappers, and tensors on lazy devices, have no address."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device.type in ("xla", "meta"):
        return id(tensor)
    return (tensor.device, tensor.data_ptr()) if tensor.data_ptr() else id(tensor)
