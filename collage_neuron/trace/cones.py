"""The value of one tensor that waits, computed while the rest goes on waiting: by the calls that it depends on.

Those are the calls which wrote its memory before, and for each of them, again, those that wrote what it has read: the
cone of the value. They run in order on copies of the tensors that they begin with; so nothing that waits is changed,
and what they have made is let go as soon as none of them needs it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from collage_neuron.trace.calls import MEETS, Call, Uncompiled, arguments, written_by
from collage_neuron.trace.placeholders import set_data

Read = Callable[[int], torch.Tensor]
"""A copy of the value of a tensor that a step begins with, by its place."""

MOST = 4
"""So many times as many calls as a step has made may be in the cones of its values: then all is computed."""


class Cones:
    """The cones of the values of a step."""

    def __init__(self) -> None:
        self._calls: list[Call] = []
        self._firsts: list[int] = []
        """For each of them the position of its first number."""
        self._memories: dict[int, int] = {}
        self._writers: dict[int, list[int]] = {}
        """By memory, which calls have made it, a view of it, or written it."""
        self._numbers = self._ran = 0

    def value(
        self, place: int, calls: Sequence[Call], numbers: Sequence[float], read: Read, before: int | None = None
    ) -> torch.Tensor:
        """The value of what is at a place after these calls, which are those of before and further ones, or after some.

        `read` gives what they begin with.

        Raises:
            Uncompiled: too many calls would run once more.
        """
        for call in calls[len(self._calls) :]:
            self._add(call)
        needed = self._needed(self._memory(place), len(calls) if before is None else before)
        self._ran += len(needed)
        if self._ran > MOST * (len(calls) + 64):
            raise Uncompiled("values are read that depend on most of the step")
        return self._run(place, needed, numbers, _There(self._memory, read))

    def _memory(self, place: int) -> int:
        return self._memories.get(place, place)

    def _add(self, call: Call) -> None:
        number = len(self._calls)
        self._calls.append(call)
        self._firsts.append(self._numbers)
        self._numbers += call.numbers()
        if call.func is set_data:  # what a tensor is afterwards is its place
            return
        for place in call.returns if call.rule.kind == "view" else ():
            self._memories[place] = self._memory(call.args[0])
        for memory in {self._memory(place) for place in (*call.returns, *written_by(call.rule, call.args))}:
            self._writers.setdefault(memory, []).append(number)

    def _needed(self, memory: int, before: int) -> list[int]:
        """The calls on which a memory depends, as it is before one of them."""
        found: set[int] = set()
        done: dict[int, int] = {}
        waiting = [(memory, before)]
        while waiting:
            memory, before = waiting.pop()
            writers, first = self._writers.get(memory, []), done.get(memory, 0)
            done[memory] = max(first, before)
            for i in writers[bisect_left(writers, first) : bisect_left(writers, before)]:
                found.add(i)
                waiting += [(self._memory(place), i) for place in self._calls[i].places()]
        return sorted(found)

    def _run(self, place: int, needed: Sequence[int], numbers: Sequence[float], there: _There) -> torch.Tensor:
        last = {memory: i for i in needed for memory in self._used(i)}
        last[self._memory(place)] = len(self._calls)
        for i in needed:
            call, first = self._calls[i], self._firsts[i]
            made = _made(call, there, (numbers[k] for k in range(first, len(numbers))))
            for returned, x in zip(call.returns, made, strict=False):
                there.put(returned, x)
            for memory in self._used(i):
                if last[memory] == i:
                    there.let_go(memory)
        return there[place]

    def _used(self, i: int) -> set[int]:
        call = self._calls[i]
        return {self._memory(place) for place in (*call.places(), *call.returns)}


class _There:
    """Tensors by their places, which are read when they are asked for first."""

    def __init__(self, memory: Callable[[int], int], read: Read) -> None:
        self._memory, self.read = memory, read
        self._tensors: dict[int, dict[int, torch.Tensor]] = {}
        """By their memory."""

    def __getitem__(self, place: int) -> torch.Tensor:
        own = self._tensors.setdefault(self._memory(place), {})
        if place not in own:
            own[place] = self.read(place)
        return own[place]

    def put(self, place: int, x: torch.Tensor) -> None:
        """What a call has made."""
        self._tensors.setdefault(self._memory(place), {})[place] = x

    def let_go(self, memory: int) -> None:
        """Nothing needs what has this memory any more."""
        self._tensors.pop(memory, None)


def _made(call: Call, there: _There, numbers: Iterator[float]) -> Sequence[torch.Tensor]:
    """What a call makes; in place it returns its argument."""
    if call.rule is MEETS:
        return [there.read(call.first)]
    tensors = {place: there[place] for place in call.places()}
    args = arguments(call.args, tensors, numbers)
    kwargs = dict(zip(call.kwargs, arguments(list(call.kwargs.values()), tensors, numbers), strict=True))
    out: Any = call.func(*args, **kwargs)
    return [x.detach() if any(x is y for y in args) else x for x in (out if isinstance(out, (list, tuple)) else [out])]
