"""What a step has left in the copies: checked before anything of it is stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.reach import Reach
from collage_neuron.states.names import is_component
from collage_neuron.states.values import is_value
from collage_neuron.twins.copies import Copies
from collage_neuron.twins.watch import memory_of


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
    for problem in _shared(copies, left):
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
    for name in state:
        if not isinstance(name, str) or is_component(name, state):
            raise UnsupportedUpdate(
                f"step() has a state called {name!r}, which is no text, or what a further word is called; rename it"
            )
    for name, x in state.items():
        if is_value(x, p) and x.dtype == torch.bfloat16:
            raise UnsupportedUpdate(
                f"step() makes optimizer.state[p][{name!r}] in bf16 beside fp32 parameters, and a state of their shape "
                "is fp32 in the next step, whatever it is stored in; make it with torch.zeros_like(p)"
            )
    values = {k: v.detach() for k, v in state.items() if is_value(v, p)}
    return Left(q, state, {"param": q.detach(), **values})


def _shared(copies: Copies, left: Mapping[torch.Tensor, Left]) -> Iterator[str]:
    """Tensors that share memory with what is stored in words: a write to the one would not be seen in the other."""
    named = [
        ("a parameter" if name == "param" else f"optimizer.state[p][{name!r}]", value)
        for one in left.values()
        for name, value in one.values.items()
    ]
    grads = [("a gradient", one.copy.grad) for one in left.values() if one.copy.grad is not None]
    found: dict[int, str] = {}
    for where, x in [*named, *grads]:
        if x.numel() and found.setdefault(memory_of(x), where) is not where:
            yield _one_memory(found[memory_of(x)], where)
    known = {id(x) for one in left.values() for x in one.state.values() if is_value(x, one.copy)}
    known |= {id(x) for one in left.values() for x in (one.copy, one.copy.grad)}
    originals = copies.originals()
    for x, where in _reached(copies):
        memory = memory_of(x)
        if id(x) not in known and memory in found:
            yield _one_memory(found[memory], where)
        if memory in originals:
            yield _one_memory(originals[memory], where)


def _reached(copies: Copies) -> Iterator[tuple[torch.Tensor, str]]:
    """The tensors that the optimizer holds, besides the values that are stored in words."""
    states = {f"optimizer.state[p{i}]": s for i, s in enumerate(copies.optimizer.state.values()) if type(s) is dict}
    for x in Reach(copies.base, copies.optimizer, states).seen.values():
        if isinstance(x, torch.Tensor) and x.numel():
            yield x, "a tensor that the optimizer holds elsewhere"


def _one_memory(first: str, second: str) -> str:
    return (
        f"after step() {first} and {second} share memory, and a compiled optimizer keeps each in words of its own: "
        "what is written to the one would not be seen in the other; clone() it"
    )
