"""Rejects optimizers that hold the memory of an fp32 parameter or of a state elsewhere too.

`compile` moves both: a view would keep the old memory. What `step()` writes there would not be seen in the parameter,
and what it reads there would stay as it was before training.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
