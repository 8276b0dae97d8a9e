"""Which classes are recorded: the elementwise ones of torch, while their code is torch's. All others are traced.

Recording a step runs the optimizer's code on a copy, and later recordings differ from the first in their numbers only.
Of an optimizer of torch it is known that its code reads nothing but its groups and states: it runs once with its
numbers on a tape (`number_tape`), and what it computed is played again from then on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.ir.update import Recording
from collage_neuron.settings import is_tensor_number
from collage_neuron.states import step_inventory
from collage_neuron.states.inner_optimizers import inner_of
from collage_neuron.states.store import record_of
from collage_neuron.states.visible_states import visible
from collage_neuron.trace.calls import Uncompiled, Written
from collage_neuron.trace.code_inspection import attributes_of_torch
from collage_neuron.trace.deferred_calls import DeferredCalls
from collage_neuron.trace.meta_copy import alone, state_of
from collage_neuron.trace.number_tape import Program, Tape, is_number
from collage_neuron.trace.placeholders import waits
from collage_neuron.trace.reachable_code import cells_of

TRACE = "COLLAGE_NEURON_TRACE"
"""The environment variable with which steps of torch's own classes are traced too, if it is "on"."""


CLASSES = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""The elementwise ones, whose step evaluates a closure once, first, and counts nothing outside of states."""


def is_traced(base: type[Optimizer], optimizer: Optimizer) -> bool:
    """Returns True if steps are traced; to record those of torch's elementwise classes costs less."""
    if os.environ.get(TRACE) == "on" or base not in CLASSES:
        return True
    seen = step_inventory.of(optimizer)
    if seen is None:
        return not is_recorded(base, optimizer)
    known, own, code = seen.structure.known, [*vars(optimizer)], _code_of(base).now()
    if known.get("code") is not code or known["attributes"] != own:
        known["code"], known["attributes"], known["is recorded"] = code, own, is_recorded(base, optimizer)
    return not known["is recorded"]


def is_recorded(base: type[Optimizer], optimizer: Optimizer | None = None) -> bool:
    """Returns True for these classes, unless somebody has put code of another kind in the place of theirs."""
    if base not in CLASSES or not is_of_library(base):
        return False
    if optimizer is not None and not _has_no_code_of_its_own(base, tuple(vars(optimizer))):  # type: ignore[arg-type]
        return False
    if optimizer is not None and inner_of(optimizer):
        return False
    return _code_of(base).is_of_library()


@lru_cache
def _has_no_code_of_its_own(base: Any, attributes: tuple[str, ...]) -> bool:
    """Returns True if no attribute of the object is in the place of one of its class."""
    own = (k for k in attributes if k not in attributes_of_torch() and not k.startswith("_collage") and k != "step")
    return not any(hasattr(base, k) for k in own)


class _Code:
    """What the code of a class is, and what it refers to: the classes, and what is in their modules."""

    def __init__(self, base: type[Optimizer]) -> None:
        classes = base.__mro__[:-1]
        names = dict.fromkeys(c.__module__ for c in classes)
        modules = [sys.modules[name] for name in names if name in sys.modules]  # importlib need not put it there
        self._views = [vars(x).values() for x in (*classes, *modules)]
        """Of what is there when they are read."""
        self._last: list[Any] = []
        self._is_of_library = True
        """Whether the last one is."""

    def now(self) -> list[Any]:
        """All of it, in a list that is the same object as long as nothing has changed."""
        now = list(chain.from_iterable(self._views))
        if now != self._last:  # functions and classes are equal if they are the same
            self._last, self._is_of_library = now, all(map(is_of_library, now))
        return self._last

    def is_of_library(self) -> bool:
        """Returns True if all of it is what Python or torch defines."""
        self.now()
        return self._is_of_library


_code_of: Callable[[Any], _Code] = cache(_Code)


# --- what Python or torch defines ------------------------------------------------------------------------------------


def is_of_library(x: Any) -> bool:
    """Returns True for what Python or torch defines, and not for other code that is wrapped by theirs."""
    return _is_of_library(x, set())


def _is_of_library(x: Any, seen: set[int]) -> bool:
    if id(x) in seen:
        return True
    seen.add(id(x))
    # `torch.no_grad()(f)` is a function of torch around `f`, `functools.partial(f)` an object of Python.
    parts = _parts(x)
    if parts is not None:
        return all(_is_of_library(part, seen) for part in parts) and _is_named_so(x)
    if isinstance(x, type) or not callable(x):
        return _is_named_so(x)
    return _root(type(x).__module__) in _OF_OBJECTS


def _parts(x: Any) -> list[Any] | None:
    """What a wrapper holds; None of what is no wrapper."""
    if isinstance(x, FunctionType):
        return cells_of(x)
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, (staticmethod, classmethod)):
        return [x.__func__]
    if isinstance(x, property):
        return [f for f in (x.fget, x.fset, x.fdel) if f is not None]
    return None


def _is_named_so(x: Any) -> bool:
    module = getattr(x, "__globals__", {}).get("__name__") or getattr(x, "__module__", None) or type(x).__module__
    return _root(module) in _LIBRARIES


def _root(module: object) -> str:
    return str(module).partition(".")[0]


# Ours too: `compile(model)` wraps `Optimizer.load_state_dict`, which no step calls.
_LIBRARIES = sys.stdlib_module_names | {"torch", "typing_extensions", "collage_neuron"}
# Modules whose callable objects hold no code of others: functools has partial, unittest has Mock.
_OF_OBJECTS = frozenset({"builtins", "collections", "types", "typing", "typing_extensions", "torch"})


# --- the numbers of their steps ---------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Followed:
    """A recording, and how its numbers are computed."""

    recording: Recording
    program: Program
    slots: tuple[int, ...]
    """The places of the recording's slots among the program's numbers."""
    numbers: tuple[int, ...]
    """The same of the numbers of its calls."""
    scalars: Mapping[str, int]
    """The same of the numbers in the state after the step."""

    def again(self, numbers: Sequence[Any]) -> Recording | None:
        """The recording of a step with other numbers (settings, then states); None if that may be another one."""
        values = played_again(self.program, numbers)
        if values is None:
            return None
        get = values.__getitem__
        slots = [*map(get, self.slots)]
        if not all(type(x) is not bool and isinstance(x, (int, float)) for x in slots):
            return None
        of_calls = slots if self.numbers == self.slots else [*map(get, self.numbers)]
        scalars = dict(zip(self.scalars, map(get, self.scalars.values()), strict=True))
        recording, own = self.recording, list(map(float, slots))
        # `dataclasses.replace` takes three times as long, and this is called in each step.
        same = recording.by_shape, recording.following, recording.kind
        return Recording(recording.captured, own, scalars, *same, of_calls, self)


def played_again(program: Program, inputs: Sequence[Any]) -> list[Any] | None:
    """All numbers, by their places, for other inputs; tensors among these are not written.

    None if a comparison has another result, or a computation fails: then the code has to run itself.
    """
    # Operations in place write what they are given: each time it is played they have tensors of their own.
    values = [*program.constants]
    for place in program.tensors:
        values[place] = values[place].clone()
    for place, x in zip(program.inputs, inputs, strict=True):
        values[place] = x.clone() if isinstance(x, torch.Tensor) else x
    get = values.__getitem__
    try:
        for function, args, into, told in program.played:
            value = function(*map(get, args))
            if told is not None and bool(value) is not told:
                return None
            values[into] = value
    except (ArithmeticError, TypeError, ValueError):
        return None
    return values


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
    copied = alone(base, optimizer, group, p, visible(optimizer.state.get(p, {}), p, (), record_of(optimizer, p)))
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
    # A number that is not on the tape depends on none that is: a first step begins its counts with it.
    scalars = {k: tape.given(v) for k, v in left.items() if is_number(v)}
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
    return found if is_whole and is_same(found.again(tape.inputs_given), recording) else None


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
            out = func(*args, **kwargs)
            return self._tape.lose() if on_tape and is_number(out) and not waits(out) else out
        if kwargs or not (func in _MADE_OF_NUMBERS or any(isinstance(x, torch.Tensor) for x in given)):
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
