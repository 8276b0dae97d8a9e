"""Memory that is shared with what is stored in words: a write to the one would not be seen in the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.reach import held_by
from collage_neuron.states.shared_memory import first_shared
from collage_neuron.states.values import is_value
from collage_neuron.twins.watch import memory_of

if TYPE_CHECKING:
    from collage_neuron.twins.copies import Copies

ELSEWHERE = "a tensor that the optimizer holds elsewhere"


def check_before(copies: Copies) -> None:
    """Raises UnsupportedUpdate if the optimizer holds the memory of what is copied elsewhere: the copies are apart."""
    for problem in (*_gradients(copies), *_held(copies, copies.originals)):
        raise UnsupportedUpdate(f"before step() {problem}")


def _gradients(copies: Copies) -> Iterator[str]:
    """Gradients that lie where a parameter, a word or another gradient does: each would be written for itself."""
    stored = [x for p in copies.params for x in (p, *copies.original.state.get(p, {}).values())]
    grads = [p.grad for p in copies.params if p.grad is not None]
    found = first_shared([*grads, *(x for x in stored if isinstance(x, torch.Tensor))])
    if found is not None and found[0] < len(grads):
        yield _one_memory("a gradient", "another gradient" if found[1] < len(grads) else "a parameter or a state")


def _held(copies: Copies, memories: Mapping[int, str]) -> Iterator[str]:
    params = {id(x) for pair in copies.params.items() for x in pair}
    for x in _elsewhere(copies):
        if isinstance(x, torch.Tensor):
            if x.numel() and id(x) not in params and memory_of(x) in memories:
                yield _one_memory(memories[memory_of(x)], ELSEWHERE)
        elif (span := _span(x)) is not None:
            yield from (_one_memory(memories[address], ELSEWHERE) for address in memories if address in span)


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


def _elsewhere(copies: Copies) -> Iterator[Any]:
    """What the optimizer holds, other than as parameters, gradients and states that are stored in words.

    An array of numpy or a memoryview that has the memory of a tensor stands for that.
    """
    namespaces: dict[str, dict[str, Any]] = {}
    for i, q in enumerate(copies.params.values()):
        state = dict.get(copies.optimizer.state, q, {})
        namespaces[f"optimizer.state[p{i}]"] = {k: x for k, x in state.items() if not is_value(x, q)}
        namespaces[f"an attribute of p{i}"] = vars(q)
    return map(_owner, held_by(copies.base, copies.optimizer, namespaces))


def _owner(x: Any) -> Any:
    """The owner of the memory of an array of numpy, or of a memoryview; any other object is returned."""
    while (owner := _OWNERS.get(type(x).__name__)) and (inner := getattr(x, owner, None)) is not None:
        x = inner
    return x


_OWNERS = {"ndarray": "base", "memmap": "base", "memoryview": "obj"}
"""Attributes that hold the owner of an object's memory, by the name of its class: numpy may not be installed."""


def _span(x: Any) -> range | None:
    """The addresses of an array that owns its memory, of which tensors may be views (`torch.from_numpy`)."""
    if _OWNERS.get(type(x).__name__) != "base" or not x.nbytes:
        return None
    first = int(x.__array_interface__["data"][0])
    return range(first, first + x.nbytes)


def _one_memory(first: str, second: str) -> str:
    return (
        f"{first} and {second} share memory, and a compiled optimizer keeps each in words of its own: what is written "
        "to the one would not be seen in the other; clone() it"
    )
