"""The values that a step will read, computed together: those of all parameters, when the first of them is asked for.

Code that reads a number of each parameter (`p.norm().item()`) reads the same in most steps. So what it is going to read
is known from the last step: the cones of these values, which run call by call, each over all parameters. Numbers of
calls that the code has not made yet are guessed: they are what they were in the last step, or one that is known already
and was the same there. Who asks for a value compares the numbers of its cone with what was guessed; if one of them is
another, all that was computed ahead is forgotten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import copysign, prod
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

import torch

from collage_neuron.trace.batched_calls import Batch, Places, There, is_elementwise

if TYPE_CHECKING:
    from collage_neuron.trace.materialize import Cones, Prepared

SMALL = 4096
"""Of up to so many elements what was computed stays, and may be computed ahead."""

KEPT = 1 << 20
"""Up to so many elements of what a step begins with have memory between steps, too: 4 MiB."""

FEWEST = 4
"""Values for which it pays."""

WRONG = 2
"""A number that was guessed wrongly so often is not guessed any more."""

MOST_GUESSES = 16
"""Steps in which a guess may be wrong; then values are computed when they are asked for."""


Stacks = dict[Places, torch.Tensor]
"""Tensors of which rows are at places."""


class Beginning(NamedTuple):
    """What a step begins with."""

    copy: Callable[[int], torch.Tensor]
    """A copy of the value at a place."""
    copy_into: Callable[[Sequence[int], Sequence[torch.Tensor]], bool] | None
    """Copies the values at places into tensors; None if they are not to be read ahead, False if one is missing."""
    like: Callable[[int], torch.Tensor | None]
    """What lies as the value at a place does; None if a call makes it."""
    device: torch.device
    """That of the parameters."""


class Level(NamedTuple):
    """Calls that need nothing of one another, and what is there after them."""

    calls: dict[Hashable, list[Prepared]]
    """By what they do."""
    values: list[tuple[int, int]]
    """Which of the values that are read, and their places."""


class Schedule:
    """What is computed ahead in steps that read what the last one did."""

    def __init__(self, cones: Cones, began: Beginning, first: int, last: Sequence[float]) -> None:
        """Numbers are known up to the position `first`, and those of the `last` step."""
        self._cones, self._device = cones, began.device
        self.is_lazy = began.device.type == "xla"
        """True where calls are noted, and run together when a value is read. There, what is large is computed ahead too
        and not let go, and no call may be left to run, once more, when a value is asked for."""
        self.calls: dict[int, Prepared] = {}
        """Those that run, by their numbers."""
        self.done: dict[int, int] = {}
        """After how many calls the memory is that they make and write."""
        self.positions: list[list[int]] = []
        """For each value, where the numbers of its calls are."""
        self._shapes: dict[int, tuple[int, ...]] = {}
        """By places."""
        self._initial: dict[int, tuple[int, ...]] = {}
        """Those of what the step begins with."""
        self._read, self._written = Counter[int](), Counter[int]()
        """The last level that reads and writes memory."""
        self._late_read, self._late_written = set[int](), set[int]()
        """The memory that calls read and write which run when they are asked for."""
        self._values: dict[int, list[int]] = {}
        """Those that are in a memory."""
        self._overwritten: set[int] = set()
        """Those that later calls write to."""
        self._levels: dict[int, Level] = {}
        for k in range(len(cones.known)):
            self._add_value(k, began)
        levels = [level for _, level in sorted(self._levels.items())]
        self._batches = [
            (
                [*map(self._batch, level.calls.values())],
                [k for k, _ in level.values],
                tuple(at for _, at in level.values),
            )
            for level in levels
        ]
        self.getters = [itemgetter(*own, *own[:1]) if own else None for own in self.positions]
        """For each value, what gives those numbers, the first one twice: always a tuple."""
        self._shapes_of_stacks = dict(self._found_stacks())
        self._kept: tuple[Stacks, list[torch.Tensor]] | None = None
        self.needs = cones.needs()
        """How many numbers it goes by."""
        needed = cones.known if self.is_lazy else cones.known[: cones.begins]
        self.is_whole = bool(self.calls) and all(run.number in self.calls for cone in needed for run in cone.runs)
        """False if what earlier values needed and was not computed ahead would be missing."""
        self._alike = dict(_alike(last, first, {at for own in self.positions for at in own}))
        """Numbers that were like one that is known, and which that is."""

    def _batch(self, calls: Sequence[Prepared]) -> Batch:
        needs = calls[0].needs
        if self.is_lazy:
            return Batch(calls, False, ())
        return Batch(calls, is_elementwise(calls[0], self._shapes), self._shapes[needs[0]] if needs else ())

    def _add_value(self, k: int, began: Beginning) -> None:
        (place, _), runs, _ = self._cones.known[k]
        own = [i for j, (i, _) in enumerate(runs) if self._add_call(i, j, began)]
        self.positions.append([at for i in own for at in _positions(self._cones.prepared[i])])
        memory = self._cones.memory(place)
        if not own or memory in self._late_written:
            self._late_read.add(memory)
            return
        self._values.setdefault(memory, []).append(k)
        self._level(self._written[memory]).values.append((k, place))

    def _add_call(self, i: int, j: int, began: Beginning) -> bool:
        """Adds the call `j` of a value to the first level in which it can run; False if it runs when asked for."""
        if i in self.calls:  # what is large would be let go, and computed again
            return True
        call = self._cones.prepared[i]
        if call.meets and self._is_initial(call.call.first, began):
            self.calls[i] = call
            return True
        read, written = set(map(self._cones.memory, call.needs)), set(call.written)
        if not self._may_run(call, read, written, began):
            self._late_read |= read
            self._late_written |= written
            return False
        level = 1 + max(0, 0, *map(self._written.__getitem__, read | written), *map(self._read.__getitem__, written))
        self._read.update({m: max(0, level - self._read[m]) for m in read})
        self._written.update({m: level - self._written[m] for m in written})
        self._overwritten.update(k for m in written for k in self._values.get(m, ()))
        self._level(level).calls.setdefault((j, self._kind(call)), []).append(call)
        self.calls[i] = call
        self.done.update(dict.fromkeys(written, i + 1))
        return True

    def _may_run(self, call: Prepared, read: set[int], written: set[int], began: Beginning) -> bool:
        if not (read | written).isdisjoint(self._late_written) or not written.isdisjoint(self._late_read):
            return False
        if call.plain is None or call.meets or call.call.rule.is_list:
            return False
        if not all(place in self._shapes or self._is_initial(place, began) for place in call.needs):
            return False
        self._shapes.update(zip(call.returns, (x.shape for x in call.call.makes or ()), strict=True))
        are_small = all(self._is_small(self._shapes[place]) for place in (*call.needs, *call.returns))
        return are_small and all(self._cones.wrong[at] < WRONG for at in _positions(call))

    def _is_initial(self, place: int, began: Beginning) -> bool:
        """Returns True for what the step begins with, with a copy that is made ahead, if it is small."""
        like = began.like(place)
        if like is None or not like.is_contiguous() or not self._is_small(like.shape):
            return False
        self._shapes[place] = self._initial[place] = tuple(like.shape)
        return True

    def _is_small(self, shape: Sequence[int]) -> bool:
        """Returns True for what may be computed ahead: on XLA, where a wait costs more than a call, everything."""
        return self.is_lazy or prod(shape) <= SMALL

    def _level(self, number: int) -> Level:
        return self._levels.setdefault(number, Level({}, []))

    def _kind(self, call: Prepared) -> Hashable:
        """What calls have in common that run together: a place or a number may be another one for each."""
        args = [
            (kind, self._shapes[x] if kind is int else kind is not float and repr(x if kind is None else x[0]))
            for kind, x in call.plain or ()
        ]
        return call.function, tuple(args), tuple(call.call.kwargs), len(call.returns)

    def _found_stacks(self) -> Iterator[tuple[Places, tuple[int, ...]]]:
        """The tensors, with their shapes, in which what the step begins with lies: as the first calls have it."""
        left = dict(self._initial)
        together = () if self.is_lazy else self._batches
        for batch in chain.from_iterable(batches for batches, *_ in together):
            for places in (places for kind, places in batch.columns if kind is int):
                if all(place in left for place in places) and len({*places}) == len(places):
                    yield places, left[places[0]]
                    for place in places:
                        del left[place]
        for place, shape in left.items():
            yield (place,), shape

    def _memory(self) -> tuple[Stacks, list[torch.Tensor]]:
        """Tensors for what the step begins with, and their rows: the same in each step, if they are small."""
        if self._kept is not None:
            return self._kept
        shapes = {places: (len(places), *shape) for places, shape in self._shapes_of_stacks.items()}
        stacks = {places: torch.empty(x, dtype=torch.float32, device=self._device) for places, x in shapes.items()}
        found = stacks, [*chain.from_iterable(stack.unbind() for stack in stacks.values())]
        is_kept = not self.is_lazy and sum(map(prod, shapes.values())) <= KEPT
        self._kept = found if is_kept else None
        return found

    def run(self, numbers: Sequence[float], last: Sequence[float], copy_into: Callable[..., bool]) -> Ahead | None:
        """Computes all, with the `numbers` that are known and those of the `last` step."""
        guess = [*numbers, *last[len(numbers) :]]
        for at, like in self._alike.items():
            guess[at] = numbers[like]
        stacks, rows = self._memory()
        there, values, begun = There(stacks), dict[int, torch.Tensor](), [*chain.from_iterable(stacks)]
        there.put_each(begun, rows)
        if not copy_into(begun, rows):
            return None
        for batches, asked, places in self._batches:
            for batch in batches:
                batch.run(there, guess)
            if places:
                values.update(zip(asked, there.at(places), strict=True))
                values.update((k, values[k].clone()) for k in self._overwritten.intersection(asked))
        return Ahead(self, guess, there, values, _on_host(values) if self.is_lazy else {})


def _on_host(values: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """Those of one element, read from a device at once: waiting for each alone would run a program for each."""
    numbers = {k: x for k, x in values.items() if x.numel() == 1 and x.dtype in (torch.float32, torch.bool)}
    if not numbers:
        return {}
    read = torch.stack([x.reshape(()).to(torch.float32) for x in numbers.values()]).cpu()
    return {k: each.to(x.dtype) for (k, x), each in zip(numbers.items(), read.unbind(), strict=True)}


def look(cones: Cones, numbers: Sequence[float], last: Sequence[float], began: Beginning) -> Ahead | None:
    """Computes the values that a step will ask for, with the `numbers` that it has, and those of the `last` one."""
    known = cones.known
    if began.copy_into is None or len(known) < cones.begins + FEWEST or cones.guesses > MOST_GUESSES:
        return None
    schedule = cones.schedule
    if schedule is None or len(schedule.positions) < len(known):
        if any(cone.is_anew for cone in known) or cones.sets_data or not cones.are_in_order():
            return None
        if len(last) < cones.needs():
            return None
        schedule = cones.schedule = Schedule(cones, began, len(numbers), last)
    if not schedule.is_whole or len(last) < max(schedule.needs, len(numbers)):  # it has raised, or ended earlier
        return None
    return schedule.run(numbers, last, began.copy_into)


@dataclass(frozen=True, eq=False)
class Ahead:
    """What was computed ahead in a step."""

    schedule: Schedule
    guess: list[float]
    there: There
    values: dict[int, torch.Tensor]
    on_host: dict[int, torch.Tensor]
    """Numbers of a device that were read."""

    def value(self, k: int, is_number: bool) -> torch.Tensor:
        """One of the values; a number may be on the host."""
        return self.on_host[k] if is_number and k in self.on_host else self.values[k]

    @cached_property
    def _guesses(self) -> list[tuple[float, ...]]:
        return [() if get is None else get(self.guess) for get in self.schedule.getters]

    def is_right(self, k: int, numbers: Sequence[float]) -> bool:
        """Returns True if the numbers of a value are known to be those that were guessed: most are equal, and not 0."""
        get, guess = self.schedule.getters[k], self._guesses[k]
        return get is None or (get(numbers) == guess and 0.0 not in guess)

    def wrong(self, k: int, numbers: Sequence[float]) -> list[int]:
        """The positions of numbers of a value that were guessed wrongly."""
        positions = self.schedule.positions[k : k + 1]  # none, if the last step has not asked for it
        return [at for at in chain.from_iterable(positions) if not _is_same(numbers[at], self.guess[at])]


def _is_same(x: float, y: float) -> bool:
    return x is y or (x == y and type(x) is type(y) and (x != 0.0 or copysign(1.0, x) == copysign(1.0, y)))


def _positions(call: Prepared) -> range:
    return range(call.numbers.start, call.numbers.stop)


def _alike(last: Sequence[float], first: int, asked: Collection[int]) -> Iterator[tuple[int, int]]:
    """The positions of numbers that were like one before `first`, and that one's."""
    known = {(type(x), x): at for at, x in reversed([*enumerate(last[:first])])}
    for at in asked:
        if at >= first and (like := known.get((type(last[at]), last[at]))) is not None:
            yield at, like
