"""What a step has left in the copies: checked before anything of it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.names import is_component
from collage_neuron.states.values import is_value
from collage_neuron.twins.copies import Copies
from collage_neuron.twins.sharing import shared_after


@dataclass(frozen=True)
class Left:
    """The results for one parameter."""

    copy: torch.nn.Parameter
    state: Mapping[str, Any]
    """All of its state, in the order of the optimizer's own code."""
    values: Mapping[str, torch.Tensor]
    """The fp32 values of `param` and of the states that are stored in formats."""


def left_by(copies: Copies) -> dict[torch.Tensor, Left]:
    """The results for each parameter, while what holds parameters still holds the copies.

    Raises:
        UnsupportedUpdate: they cannot be stored; nothing has been changed.
    """
    for problem in _of_groups(copies):
        raise UnsupportedUpdate(f"step() {problem}")
    left = {p: _left(copies, p, q) for p, q in copies.params.items()}
    values = {p: one.values for p, one in left.items()}
    for problem in shared_after(copies, values):
        raise UnsupportedUpdate(problem)
    return left


def _of_groups(copies: Copies) -> Iterator[str]:
    groups = copies.optimizer.param_groups
    if len(groups) != len(copies.groups):
        yield "adds or removes a parameter group"
        return
    for i, (group, before) in enumerate(zip(groups, copies.groups, strict=True)):
        if list(map(id, group["params"])) != list(map(id, before["params"])):
            yield f"changes the list param_groups[{i}]['params']"


def _left(copies: Copies, p: torch.Tensor, q: torch.nn.Parameter) -> Left:
    if q.shape != p.shape or q.dtype != torch.float32 or q.device != p.device:
        raise UnsupportedUpdate(
            f"step() makes a parameter of shape {list(p.shape)} one of {q.dtype}, shape {list(q.shape)}, on {q.device}"
        )
    state = dict.get(copies.optimizer.state, q, {})
    if type(state) is not dict:
        raise UnsupportedUpdate(
            f"step() keeps an object of type {type(state).__name__} as optimizer.state[p]; keep a dictionary"
        )
    for name, x in state.items():
        if name == "param" or is_component(name, state) or (is_value(x, p) and not isinstance(name, str)):
            raise UnsupportedUpdate(
                f"step() has a state called {name!r}, which is not text, or is what the parameter or a further word is "
                "called; rename it"
            )
    for name, x in state.items():
        if is_value(x, p) and x.dtype == torch.bfloat16:
            raise UnsupportedUpdate(
                f"step() makes optimizer.state[p][{name!r}] in bf16 beside fp32 parameters, and a state of their shape "
                "is fp32 in the next step, whatever it is stored in; make it with torch.zeros_like(p)"
            )
    values = {k: v.detach() for k, v in state.items() if is_value(v, p)}
    return Left(q, state, {"param": q.detach(), **values})
