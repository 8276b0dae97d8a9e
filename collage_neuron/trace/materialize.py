"""The value of one tensor that waits, computed while the rest goes on waiting: by the calls that it depends on.

Those are the calls which wrote its memory before, and for each of them, again, those that wrote what it has read: the
cone of the value, its backward slice. They run in order on copies of the tensors that they begin with; so nothing that
waits is changed. What they have made of small tensors stays until the step ends, so that a step which reads a number of
each parameter runs each call once more, and not all calls for each number. Large tensors are let go as soon as no call
needs them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from collage_neuron.trace.calls import MEETS, Call, HostNumber, Uncompiled, arguments, is_number, written_by
from collage_neuron.trace.placeholders import set_data
from collage_neuron.trace.read_ahead import SMALL, Ahead, Beginning, Schedule, look

MOST = 4
"""So many times as many calls as a step has made may be in the cones of its values: then all is computed."""


class Run(NamedTuple):
    """A call that runs once more."""

    number: int
    lets_go: list[int]
    """The memory that no later call of the cone needs."""


class Prepared(NamedTuple):
    """What is asked of a call each time it runs once more."""

    call: Call
    function: Any
    """What is called."""
    needs: tuple[int, ...]
    """The places of its arguments."""
    returns: range
    """Those of what it returns."""
    numbers: slice
    """Where its numbers are."""
    plain: list[tuple[type | None, Any]] | None
    """Its arguments: places of tensors, positions of numbers, and all else; None if there are lists among them."""
    written: tuple[int, ...]
    """The memory that it makes or writes."""

    @property
    def meets(self) -> bool:
        """Returns True for a tensor with a value that meets values that wait."""
        return self.call.rule is MEETS


class Cone(NamedTuple):
    """What runs for a value."""

    of: tuple[int, int]
    """Its place, and after how many calls it is asked for."""
    runs: list[Run]
    is_anew: bool
    """True if something that it needs was written since, among what has stayed: it begins from the beginning."""


class Cones:
    """The cones of the values of a step; those of all steps that make the same calls, which may be more and more."""

    def __init__(self, calls: list[Call]) -> None:
        self.calls = calls
        self.known: list[Cone] = []
        """Those of the values that were asked for in the first step, in their order."""
        self.prepared: list[Prepared] = []
        """The calls that were looked at."""
        self.numbers: list[float] = []
        """Those of the last step in which values were asked for."""
        self.schedule: Schedule | None = None
        """What the next one computes ahead."""
        self.begins = 0
        """Before which of the values that is."""
        self.wrong = Counter[int]()
        """How often numbers were guessed wrongly, by their positions."""
        self.guesses = 0
        """How often there were some."""
        self._memories: dict[int, int] = {}
        """Of views."""
        self._views: dict[int, list[int]] = {}
        self._writers: dict[int, list[int]] = {}
        """By memory, which calls have made it, a view of it, or written it."""
        self._numbers = 0

    def grow(self, count: int) -> None:
        """Looks at the calls, up to so many."""
        while len(self.prepared) < count:
            self._add(self.calls[len(self.prepared)])

    @property
    def sets_data(self) -> bool:
        """Returns True if a tensor is given other data."""
        return any(call.func is set_data for call in self.calls)

    def needs(self) -> int:
        """How many numbers a step has given when it has made all calls that run for its values."""
        last = max((run.number for cone in self.known for run in cone.runs), default=-1)
        return 0 if last < 0 else self.prepared[last].numbers.stop

    def are_in_order(self) -> bool:
        """Returns True if all may run on one memory: no call, and no value, needs what another one has overwritten.

        What is large would be let go in between, and computed again from what the step begins with.
        """
        ran, read, wrote = set[int](), Counter[int](), Counter[int]()
        for (place, before), runs, _ in self.known:
            for i in (run.number for run in runs if run.number not in ran):
                call = self.prepared[i]
                needs = {*map(self.memory, call.needs), *call.written}
                if any(wrote[m] > i for m in needs) or any(read[m] > i for m in call.written):
                    return False
                ran.add(i)
                read.update({m: i + 1 - read[m] for m in needs if read[m] <= i})
                wrote.update({m: i + 1 - wrote[m] for m in call.written})
            if wrote[self.memory(place)] > before:
                return False
        return True

    def guess_again(self, k: int, wrong: Sequence[int]) -> None:
        """Numbers of a value were guessed wrongly: some are known when it is asked for, and others then."""
        self.schedule, self.guesses = None, self.guesses + 1
        if k > self.begins:
            self.begins = k
        else:
            self.wrong.update(wrong)

    def _add(self, call: Call) -> None:
        number, first = len(self.prepared), self._numbers
        self._numbers += call.numbers()
        for place in call.returns if call.rule.kind == "view" else ():
            memory = self._memories[place] = self.memory(call.args[0])
            self._views.setdefault(memory, []).append(place)
        written = () if call.func is set_data else self.written(call)  # what a tensor is afterwards is its place
        needs = tuple(dict.fromkeys(call.places()))
        numbers, plain = slice(first, self._numbers), _plain(call, first)
        self.prepared.append(Prepared(call, _function(call), needs, call.returns, numbers, plain, tuple(written)))
        for memory in written:
            self._writers.setdefault(memory, []).append(number)

    def memory(self, place: int) -> int:
        """The place whose memory a tensor has."""
        return self._memories.get(place, place)

    def places(self, memory: int) -> list[int]:
        """The places that have a memory: its own, and those of views."""
        return [memory, *self._views.get(memory, ())]

    def written(self, call: Call) -> set[int]:
        """The memory that a call makes or writes."""
        return {self.memory(place) for place in (*call.returns, *written_by(call.rule, call.args))}

    def cone(self, place: int, before: int, done: Mapping[int, int]) -> Cone:
        """The cone of a value; `done` says of memory that has stayed after how many calls it is there."""
        needed = self._needed(self.memory(place), before, done)
        is_anew = needed is None
        if needed is None:
            needed = self._needed(self.memory(place), before, {}) or []
        last = {memory: i for i in needed for memory in self._used(i)}
        last.pop(self.memory(place), None)  # the value itself stays until it was taken
        ends: dict[int, list[int]] = {}
        for memory, i in last.items():
            ends.setdefault(i, []).append(memory)
        return Cone((place, before), [Run(i, ends.get(i, [])) for i in needed], is_anew)

    def _needed(self, memory: int, before: int, done: Mapping[int, int]) -> list[int] | None:
        """The calls on which a memory depends, as it is before one of them; None if some are done that come later."""
        found: set[int] = set()
        until: dict[int, int] = {}
        waiting = [(memory, before)]
        while waiting:
            memory, before = waiting.pop()
            own = done.get(memory, 0)  # what has stayed is as it was after so many calls
            if own > before:
                return None
            # A memory is asked for by several calls: by the later ones only for what was written in between.
            writers, first = self._writers.get(memory, []), max(own, until.get(memory, 0))
            until[memory] = max(first, before)
            for i in writers[bisect_left(writers, first) : bisect_left(writers, before)]:
                found.add(i)
                waiting += [(self.memory(place), i) for place in self.calls[i].places()]
        return sorted(found)

    def _used(self, i: int) -> set[int]:
        call = self.calls[i]
        return {self.memory(place) for place in (*call.places(), *call.returns)}


class Values:
    """The values that were asked for in one step."""

    def __init__(self) -> None:
        self._there = _There()
        self._cones: Cones | None = None
        """Those of the first value."""
        self._asked = self._ran = 0
        self._is_known = True
        """True as long as the values are those of the first step that has made these calls."""
        self._ahead: Ahead | None = None
        self._last: list[float] = []
        """The numbers of the last step."""

    def ahead(
        self, calls: list[Call], of: tuple[int, int], numbers: Sequence[float], is_number: bool = False
    ) -> torch.Tensor | None:
        """A value that was computed ahead, if it is asked for as in the last step; most are, so this comes first."""
        ahead, cones, k = self._ahead, self._cones, self._asked
        if ahead is None or cones is None or cones.calls is not calls or k not in ahead.values:
            return None
        if cones.known[k].of != of or not ahead.is_right(k, numbers):
            return None
        self._asked += 1
        return ahead.value(k, is_number)

    def value(
        self, cones: Cones, of: tuple[int, int], numbers: list[float], began: Beginning, is_number: bool = False
    ) -> torch.Tensor:
        """What is at a place after so many calls, for reading. The calls of before are the first ones of these.

        Raises:
            Uncompiled: too many calls would run once more.
        """
        cones.grow(of[1])
        k, cone = self._asked, self._cone(cones, of, numbers, began)
        self._ran += len(cone.runs)
        if self._ran > MOST * (of[1] + 64):
            raise Uncompiled("values are read that depend on most of the step")
        if self._ahead is not None and k in self._ahead.values:
            return self._ahead.value(k, is_number)
        return self._computed(cones, cone, numbers, began)

    def _computed(self, cones: Cones, cone: Cone, numbers: Sequence[float], began: Beginning) -> torch.Tensor:
        if self._ahead is not None:
            self._there.tensors = self._ahead.there.by_places()
        there, (place, _) = _There() if cone.is_anew else self._there, cone.of
        done = () if self._ahead is None or cone.is_anew else self._ahead.schedule.calls
        for i, lets_go in cone.runs:
            if i not in done:
                _run(cones.prepared[i], i, there, numbers, began.copy)
            if lets_go and there.has_large:
                there.let_go(cones, lets_go)
        found = there.tensors.get(place)
        if found is None:
            found = there.put(place, began.copy(place))
        if found.numel() > SMALL:
            there.let_go(cones, [cones.memory(place)])
        return found

    def _cone(self, cones: Cones, of: tuple[int, int], numbers: list[float], began: Beginning) -> Cone:
        known, k = cones.known, self._asked
        self._asked += 1
        if self._cones is None:
            self._cones, self._last, cones.numbers = cones, cones.numbers, numbers
        self._is_known = self._is_known and cones is self._cones and (k >= len(known) or known[k].of == of)
        if not self._is_known:
            self._forget()
        elif self._ahead is None and k == cones.begins:
            self._look_ahead(numbers, began)
        elif self._ahead is not None and (wrong := self._ahead.wrong(k, numbers)):
            cones.guess_again(k, wrong)
            self._forget()
            if k == cones.begins:  # by now more is known
                self._look_ahead(numbers, began)
            self._is_known = self._ahead is not None
        if self._is_known and k < len(known):
            return known[k]
        found = cones.cone(*of, self._there.done)
        if self._is_known:
            known.append(found)
        return found

    def _forget(self) -> None:
        """Forgets what was computed ahead: calls that the step does not make so."""
        if self._ahead is not None:
            self._there, self._ahead = _There(), None

    def _look_ahead(self, numbers: Sequence[float], began: Beginning) -> None:
        assert self._cones is not None
        self._ahead = look(self._cones, numbers, self._last, began)
        if self._ahead is not None:
            self._there = _There(lets_go=not self._ahead.schedule.is_lazy)
            self._there.done = dict(self._ahead.schedule.done)


class _There:
    """Tensors by their places, and after how many calls what has their memory is there."""

    def __init__(self, lets_go: bool = True) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.done: dict[int, int] = {}
        self.has_large, self._lets_go = False, lets_go

    def put(self, place: int, t: torch.Tensor) -> torch.Tensor:
        """A tensor is at a place from now on."""
        self.tensors[place] = t
        self.has_large = self.has_large or t.numel() > SMALL
        return t

    def let_go(self, cones: Cones, memories: Sequence[int]) -> None:
        """Nothing needs what has this memory any more; what is small stays."""
        for memory in memories if self._lets_go else ():
            own = [place for place in cones.places(memory) if place in self.tensors]
            if any(self.tensors[place].numel() > SMALL for place in own):  # a view may be small: all of it goes
                for place in own:
                    del self.tensors[place]
                self.done.pop(memory, None)


def _run(
    prepared: Prepared, number: int, there: _There, numbers: Sequence[float], read: Callable[[int], torch.Tensor]
) -> None:
    call, tensors = prepared.call, there.tensors
    if call.rule is MEETS:
        there.put(call.first, read(call.first))
    else:
        for place in prepared.needs:
            if place not in tensors:
                there.put(place, read(place))
        args, named = _arguments(prepared, tensors, numbers)
        out: Any = prepared.function(*args, **named)
        for place, x in zip(prepared.returns, out if isinstance(out, (list, tuple)) else (out,), strict=False):
            # One that returns its argument itself: two places, two objects.
            there.put(place, x.detach() if id(x) in map(id, args) else x)
    for memory in prepared.written:
        there.done[memory] = number + 1


def _arguments(prepared: Prepared, tensors: Mapping[int, torch.Tensor], numbers: Sequence[float]) -> Any:
    call = prepared.call
    if prepared.plain is None:
        given = iter(numbers[prepared.numbers])
        args = arguments(call.args, tensors, given)
        return args, dict(zip(call.kwargs, arguments([*call.kwargs.values()], tensors, given), strict=True))
    found = [
        tensors[x]
        if kind is int
        else numbers[x]
        if kind is float
        else x[0].tensor(numbers[x[1]])
        if kind is HostNumber
        else x
        for kind, x in prepared.plain
    ]
    count = len(call.args)
    return found[:count], dict(zip(call.kwargs, found[count:], strict=True)) if call.kwargs else _NONE


_NONE: dict[str, Any] = {}


def _function(call: Call) -> Any:
    """The operation, or torch's own method that has made the call with the same arguments: it takes half the time."""
    method, operation = call.method, call.quick()
    if method is None or operation is None or method[1:] != operation[1:] or method.asked in vars(torch.Tensor):
        return call.func  # what is written in Python, or has been put in the place of torch's, may do something else
    return getattr(torch.Tensor, method.asked)


def _plain(call: Call, first: int) -> list[tuple[type | None, Any]] | None:
    found: list[tuple[type | None, Any]] = []
    for x in (*call.args, *call.kwargs.values()):
        if type(x) is list and not {tuple}.issuperset(map(type, x)):
            return None
        if type(x) is list:  # of constants
            found.append((None, [each for _, each in x]))
        elif type(x) is int:
            found.append((int, x))
        elif is_number(x):
            found.append((HostNumber, (x, first)) if type(x) is HostNumber else (float, first))
            first += 1
        else:
            found.append((None, x[1]))
    return found
