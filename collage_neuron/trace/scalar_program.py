"""Follows the numbers of a step of torch's own optimizers, so that later steps need not run the optimizer's code.

Recording a step runs the optimizer's code on a copy, and later recordings differ from the first in their numbers only.
Of an optimizer of torch it is known that its code reads nothing but its groups and states: it runs once with its
numbers on a tape (`tape`), and what it computed is played again from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.ir.update import Recording
from collage_neuron.settings import is_tensor_number
from collage_neuron.states.visible_states import visible
from collage_neuron.trace.calls import Uncompiled, Written
from collage_neuron.trace.deferred_calls import DeferredCalls
from collage_neuron.trace.meta_copy import alone, state_of
from collage_neuron.trace.number_tape import Followed, Tape
from collage_neuron.trace.placeholders import waits


def _settings_of(base: Any) -> tuple[str, ...]:
    """The names of the settings that one of torch's own classes reads; what else is in a group is the user's."""
    return tuple(base([{"params": []}]).defaults)


settings_of: Callable[[Any], tuple[str, ...]] = cache(_settings_of)


def follow(
    base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], p: Any, recording: Recording
) -> Followed | None:
    """Takes the step of which `recording` is the recording once more, with its numbers on a tape.

    None if they cannot be followed all the way, or if the step changes more than the states.
    """
    tape = Tape()
    copied = alone(base, optimizer, group, p, visible(optimizer.state.get(p, {}), p, ()))
    copied.optimizer.defaults = {"differentiable": False}  # of the others, the step must read none
    (settings,) = copied.optimizer.param_groups
    settings.update({k: _given(tape, settings[k]) for k in settings_of(base) if k in settings})
    for value in state_of(copied).values():
        if isinstance(value, torch.Tensor) and not waits(value):
            tape.give(value)
    before = [*settings.items()]
    try:
        kind, numbers = copied.step(partial(_OnTape, tape), _Watch(tape), _Reads(tape))
    except (UnsupportedUpdate, Uncompiled):
        return None
    left = {k: v for k, v in state_of(copied).items() if not waits(v)}
    scalars = {k: place for k, v in left.items() if (place := tape.place_of(v)) is not None}
    kept = len(settings) == len(before) and all(settings.get(k) is x for k, x in before)
    if tape.lost or not kept or len(kind.planned) != 1 or len(scalars) < len(left):
        return None
    (planned,) = kind.planned
    (slots,) = planned.numbers
    places = [tape.constant(x) if type(x) is not _Known else x.place for x in numbers]
    of_slots = [*slots(places), *map(tape.constant, planned.more)]
    found = Followed(recording, tape.played(), tuple(of_slots), tuple(places), scalars)
    # Played with the numbers of this very step, it has to give this step's recording, bit for bit.
    is_whole = planned.recording.captured is recording.captured
    return found if is_whole and is_same(found.again(tape.given), recording) else None


def is_same(one: Recording | None, other: Recording) -> bool:
    """Returns True if two recordings are of one step, bit for bit; of parameters of other shapes, graphs are equal."""
    return one is not None and _told(one) == _told(other)


def _told(recording: Recording) -> str:  # as text: equal for equal doubles, NaN among them
    scalars = {k: (v.dtype, v.item()) if isinstance(v, torch.Tensor) else v for k, v in recording.scalars.items()}
    captured = recording.captured
    graph = captured.text, captured.states, dict(captured.fresh), captured.clears_gradient
    return repr((graph, list(map(float, recording.slots)), scalars))


def _given(tape: Tape, value: Any) -> Any:
    if isinstance(value, float) or is_tensor_number(value):
        return tape.give(value)
    return type(value)(_given(tape, x) for x in value) if type(value) in (tuple, list) else value


class _Known(float):
    """A number of a call that is on the tape."""

    place: int

    @classmethod
    def at(cls, place: int, value: float) -> _Known:
        """The number at a place."""
        found = cls(value)
        found.place = place
        return found


class _OnTape(DeferredCalls):
    """Notes where on the tape the numbers of calls are."""

    def __init__(self, tape: Tape, *args: Any) -> None:
        self._tape = tape
        super().__init__(*args)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Notes an operation, of which numbers on the tape are plain ones from here on."""
        known = {k: self._known(x) for k, x in (kwargs or {}).items()}
        return super().call(func, tuple(map(self._known, args)), known)

    def _known(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._known, x))
        place = None if isinstance(x, torch.Tensor) else self._tape.place_of(x)
        return x if place is None else _Known.at(place, self._tape.values[place])

    def written_of(self, given: Sequence[Any], numbers: list[float], is_constant: bool) -> Written:
        first = len(numbers)
        with torch_privates.unseen():  # what is asked here is no part of the step
            found = super().written_of([_plain(x) for x in given], numbers, is_constant)
        known = list(self._numbers_in(given))
        if is_constant and any(type(x) is _Known for x in known):
            self._tape.lose()
        numbers[first:] = known[: len(numbers) - first]
        return found

    def _numbers_in(self, given: Sequence[Any]) -> Iterator[Any]:
        """The numbers among arguments, in the order in which calls have them."""
        for x in given:
            if isinstance(x, (list, tuple)):
                yield from self._numbers_in(x)
            elif isinstance(x, torch.Tensor):
                if self._place(id(x)) is None and self._tape.place_of(x) is None:
                    yield x.item()
                elif self._place(id(x)) is None:
                    place = self._tape.apply(torch.Tensor.item, x).node.place
                    yield _Known.at(place, self._tape.values[place])
            elif type(x) in (int, float, _Known):
                yield x


def _plain(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)(map(_plain, x))
    return float(x) if type(x) is _Known else x


class _Watch(TorchFunctionMode):
    """Puts what is computed with 0-d tensors on the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        on_tape = [x for x in given if self._tape.place_of(x) is not None]
        if not on_tape or any(map(_touches_waiting, given)):
            return func(*args, **kwargs)
        if kwargs or not (func in _MADE_OF_NUMBERS or any(isinstance(x, torch.Tensor) for x in on_tape)):
            self._tape.lose()
        if func in _QUERIES:
            return func(*args)
        return self._tape.apply(func, *args)


class _Reads(torch_privates.DispatchMode):
    """Puts the number that is read of a 0-d tensor on the tape, whoever reads it: torch does for `value=tensor`."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and self._tape.place_of(args[0]) is not None:
            return self._tape.apply(torch.Tensor.item, args[0])
        return func(*args, **(kwargs or {}))


def _touches_waiting(x: Any) -> bool:
    return any(map(_touches_waiting, x)) if isinstance(x, (list, tuple)) else waits(x)


# What the tape follows where it gets a number that is on it, and no tensor.
_MADE_OF_NUMBERS = (torch.tensor, torch.as_tensor)

# What may be asked of a count or a rate without reading it: the answer is the same in each step.
_QUERIES = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_sparse", "layout", "requires_grad", "shape")
) | {torch.Tensor.dim, torch.Tensor.numel}
