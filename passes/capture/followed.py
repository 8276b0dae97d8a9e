"""Follows the numbers of a step of torch's own optimizers, so that later steps need not run the optimizer's code.

Recording a step runs the optimizer's code on stand-ins, and later recordings differ from the first in their numbers
only. Of an optimizer of torch it is known that its code reads nothing but its groups and states: it runs once with
its numbers on a tape (`tape`), and what it computed is played again from then on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.capture import kept_by, run_step, tensors_of
from collage_neuron.passes.capture.captured_graph import captured_of
from collage_neuron.passes.capture.planes import is_meta, touches_meta
from collage_neuron.passes.capture.reach import of_torch
from collage_neuron.passes.capture.recorder import Recorder
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import shadow_of
from collage_neuron.passes.capture.shape_watch import ShapeWatch
from collage_neuron.passes.capture.tape import Program, Tape


@dataclass(frozen=True, eq=False)
class Followed:
    """A recording, and how its numbers are computed."""

    recording: Recording
    program: Program
    slots: tuple[int, ...]
    """The places of the recording's slots among the program's numbers."""
    scalars: Mapping[str, int]
    """The same of the numbers in the state after the step."""

    def again(self, numbers: Sequence[Any]) -> Recording | None:
        """The recording of a step with other numbers (settings, then states); None if that may be another one."""
        values = self.program.again(numbers)
        if values is None:
            return None
        slots = [values[i] for i in self.slots]
        if not _FLOATS.issuperset(map(type, slots)):
            return None
        return replace(
            self.recording, slots=list(map(float, slots)), scalars={k: values[i] for k, i in self.scalars.items()}
        )


_FLOATS = frozenset({float, int})


class Settings:
    """The settings of a group: the numbers, and all else as a key that is equal where these may be exchanged."""

    def __init__(self, group: Mapping[str, Any]) -> None:
        self.numbers: list[float] = []
        self.key: tuple[Any, ...] | None = None
        """None if there are settings that are not numbers and texts, or tuples of these."""
        told: list[Any] = []
        for name, value in group.items():
            if type(value) is float:  # first, since most are
                self.numbers.append(value)
                told += name, float
            elif name != "params" and name[:8] != "collage_":
                told += name, self._told(value)
        self.key = None if _OTHER in told else tuple(told)

    def _told(self, value: Any) -> Any:
        kind = type(value)
        if kind is float:
            self.numbers.append(value)
            return kind
        if kind is tuple:
            parts = tuple(map(self._told, value))
            return _OTHER if _OTHER in parts else parts
        return (kind, value) if kind in _CONSTANT else _OTHER


_OTHER = object()
_CONSTANT = (type(None), bool, int, str)


def follow(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: Mapping[str, Any],
    param: torch.Tensor,
    state: Mapping[str, Any],
    recording: Recording,
) -> Followed | None:
    """Takes the step of which `recording` is the recording once more, with its numbers on a tape.

    None if they cannot be followed all the way, or if the step changes more than the states.
    """
    if recording.host or recording.group or recording.attributes:
        return None
    tape = Tape()
    shadow = shadow_of(base, optimizer, group, param, state)
    for name in vars(shadow.optimizer).keys() - of_torch():
        del vars(shadow.optimizer)[name]  # code that reads it raises
    shadow.optimizer.defaults = {"differentiable": False}  # of the others, the step must read none
    shadow.group.update({k: _given(tape, v) for k, v in shadow.group.items() if k != "params"})
    for value in shadow.state.values() if state else ():
        if isinstance(value, torch.Tensor) and not value.is_meta:
            tape.give(value)
    settings = [*shadow.group.items()]
    roles = tensors_of(shadow.optimizer, shadow.param)
    recorder = _Recorder(tape)
    recorder.keep(kept_by(shadow.optimizer, shadow.param))
    try:
        run_step(base, shadow.optimizer, _Watch(tape), recorder)
    except UnsupportedUpdate:
        return None
    same = [*shadow.group.items()]
    kept = len(same) == len(settings) and all(k == j and x is y for (k, x), (j, y) in zip(same, settings, strict=True))
    captured = captured_of(recorder, roles, tensors_of(shadow.optimizer, shadow.param))
    places = {k: tape.place_of(v) for k, v in shadow.state.items() if not is_meta(v)}
    scalars = {k: place for k, place in places.items() if place is not None}
    followed = Followed(recording, tape.played(), tuple(recorder.places), scalars)
    is_whole = kept and not tape.lost and captured is recording.captured and len(scalars) == len(places)
    return followed if is_whole and is_same(followed.again(tape.given), recording) else None


def is_same(one: Recording | None, other: Recording) -> bool:
    """Returns True if two recordings are of one step, bit for bit; of parameters of other shapes, graphs are equal."""
    return one is not None and _told(one) == _told(other)


def _told(recording: Recording) -> str:  # as text: equal for equal doubles, NaN among them
    scalars = {k: (v.dtype, v.item()) if isinstance(v, torch.Tensor) else v for k, v in recording.scalars.items()}
    captured = recording.captured
    graph = captured.text, captured.states, dict(captured.fresh), captured.clears_gradient
    return repr((graph, recording.slots, scalars, sorted(recording.asked)))


def _given(tape: Tape, value: Any) -> Any:
    if type(value) is float:
        return tape.give(value)
    return tuple(_given(tape, x) for x in value) if type(value) is tuple else value


class _Known(float):
    """A number in a recording that is on the tape."""

    place: int


class _Recorder(Recorder):
    """Notes where on the tape the slots are."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self.places: list[int] = []
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {k: self._known(x) for k, x in (kwargs or {}).items()}
        return super().__torch_dispatch__(func, types, tuple(map(self._known, args)), known)

    def _known(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._known, x))
        place = self._tape.place_of(x)
        if place is None:
            return x
        if isinstance(x, torch.Tensor):
            return x
        found = _Known(self._tape.values[place])
        found.place = place
        return found

    def read(self, x: torch.Tensor) -> Any:
        """Loses the tape, on which there are no numbers that are read from tensors."""
        self._tape.lose()

    def encode(self, x: Any, constant: bool) -> Any:
        """As in any recording; notes the place of the slot."""
        if (isinstance(x, torch.Tensor) and not x.is_meta) or (constant and isinstance(x, _Known)):
            self._tape.lose()
        before = len(self.slots)
        found = super().encode(x, constant)
        if len(self.slots) > before and not isinstance(x, (list, tuple)):
            self.places.append(x.place if isinstance(x, _Known) else self._tape.constant(float(x)))
        return found


class _Watch(ShapeWatch):
    """Puts what is computed with 0-d tensors on the tape."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*args, *kwargs.values()]
        on_tape = [x for x in given if self._tape.place_of(x) is not None]
        if not on_tape or any(map(touches_meta, given)):
            return super().__torch_function__(func, types, args, kwargs)
        if kwargs or not any(isinstance(x, torch.Tensor) for x in on_tape):
            self._tape.lose()
        if func in _QUERIES:
            return func(*args)
        return self._tape.apply(func, *args)


_QUERIES = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "is_cpu", "is_cuda", "is_meta", "is_sparse", "layout", "requires_grad")
)
"""What may be asked of a count without reading it; its shape belongs there too, and no optimizer asks for that."""
