"""Memory that is shared with what is stored in words: a write to the one would not be seen in the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.reach import held_by
from collage_neuron.states.values import is_value
from collage_neuron.twins.watch import memory_of

if TYPE_CHECKING:
    from collage_neuron.twins.copies import Copies

ELSEWHERE = "a tensor that the optimizer holds elsewhere"


def check_before(copies: Copies) -> None:
    """Raises UnsupportedUpdate if the optimizer holds the memory of what is copied elsewhere: the copies are apart."""
    originals = copies.originals
    for problem in _held(copies, originals):
        raise UnsupportedUpdate(f"before step() {problem}")


def _held(copies: Copies, memories: Mapping[int, str]) -> Iterator[str]:
    params = {id(x) for pair in copies.params.items() for x in pair}
    for x in _elsewhere(copies):
        if id(x) not in params and memory_of(x) in memories:
            yield _one_memory(memories[memory_of(x)], ELSEWHERE)


def shared_after(copies: Copies, left: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> Iterator[str]:
    """Says what shares memory in what a step `left`: for each parameter the values, by name."""
    named = [
        ("a parameter" if name == "param" else f"optimizer.state[p][{name!r}]", value)
        for values in left.values()
        for name, value in values.items()
    ]
    grads = [("a gradient", q.grad) for q in copies.params.values() if q.grad is not None]
    found: dict[int, str] = {}
    for where, x in [*named, *grads]:
        if x.numel() and found.setdefault(memory_of(x), where) is not where:
            yield f"after step() {_one_memory(found[memory_of(x)], where)}"
    for problem in _held(copies, {**copies.originals, **found}):
        yield f"after step() {problem}"


def _elsewhere(copies: Copies) -> Iterator[torch.Tensor]:
    """The tensors that the optimizer holds, other than as parameters, gradients and states that are stored in words."""
    namespaces: dict[str, dict[str, Any]] = {}
    for i, q in enumerate(copies.params.values()):
        state = dict.get(copies.optimizer.state, q, {})
        namespaces[f"optimizer.state[p{i}]"] = {k: x for k, x in state.items() if not is_value(x, q)}
        namespaces[f"an attribute of p{i}"] = vars(q)
    for x in held_by(copies.base, copies.optimizer, namespaces):
        if isinstance(x, torch.Tensor) and x.numel():
            yield x


def _one_memory(first: str, second: str) -> str:
    return (
        f"{first} and {second} share memory, and a compiled optimizer keeps each in words of its own: what is written "
        "to the one would not be seen in the other; clone() it"
    )
