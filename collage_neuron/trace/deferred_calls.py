"""The operations of a step, which wait: a list of calls, which is compared with an earlier step's, and can be run.

Each placeholder has a number, its place, in the order in which the step meets it. So two steps do the same if their
calls are equal, whatever their numbers are. Whatever has to be known before the step's end (`.item()`, an operation
that is not torch's own, memory) makes `fill` run all calls, in order, on real memory: from there the step runs as
written, with the tensor objects that it has already.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Token
from functools import cached_property
from itertools import chain, compress, islice
from operator import add, ge, gt
from typing import Any

import torch

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.functionalize.recorded_ops import ALL_REDUCE, WAIT
from collage_neuron.trace import adopted_tensors, factory_tensors, fused_ops, method_cache  # noqa: F401  # placeholders get method_cache
from collage_neuron.trace.calls import (
    MEETS,
    NORMS,
    SETS,
    Call,
    Geometry,
    Quick,
    Rule,
    Uncompiled,
    Writing,
    Written,
    arguments,
    check_written,
    geometries,
    made_of_values,
    memories_of,
    quick,
    reads_values,
    rule_of,
    vector_norm,
    without_out,
    without_values,
    written_by,
)
from collage_neuron.trace.materialize import Cones, Values
from collage_neuron.trace.placeholders import (
    IN_PROGRESS,
    STEP,
    Step,
    give,
    placeholder,
    put_off,
    set_data,
    value_of,
    valued,
    waits,
)
from collage_neuron.trace.read_ahead import Beginning
from collage_neuron.trace.source_location import here
from collage_neuron.trace.structure_guard import CallSequence

SHARED = (
    "something else than a state keeps a value, a gradient or a state that was replaced: keep each in "
    "optimizer.state[p], under a name of its own, or a copy (clone())"
)
"""Why a step is computed that leaves values which nobody could compute later."""


EXCHANGED = "step() exchanges what is inside tensors (torch.utils.swap_tensors)"


class Exchanged(UnsupportedUpdate):
    """Code has exchanged what is inside tensors, and nobody saw when."""


class DeferredCalls:
    """The calls of one step.

    `values` are its first placeholders; `compute` gives them memory, and values. `same` are the places of further
    objects, by their ids. `spare` are the placeholders that the first of the earlier steps has made, which nobody holds
    any more: they are made once more, and `steady` is for it. `inside` says what is inside the first values, if known.
    """

    copy_into: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] | None = None
    """Copies first values into tensors, if those that will be read may be computed ahead."""

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        same: Mapping[int, int],
        earlier: Sequence[Cones],
        spare: Sequence[torch.Tensor],
        steady: Sequence[tuple[Quick | None, Quick | None]],
        compute: Callable[[], None],
        state_of: Callable[[torch.Tensor], adopted_tensors.Name | None],
        copy_of: Callable[[torch.Tensor], torch.Tensor],
        inside: Sequence[int] = (),
    ) -> None:
        self.tensors = [*values, *spare]
        """By their places."""
        self.numbers: list[float] = []
        self.is_filled = False
        self.why = ""
        """Why values were computed."""
        self.outer: Step | None = None
        self.given: dict[int, torch.Tensor] = {}
        self._own, self._are_own = dict[int, int](), True
        """The first places of tensors that have been given other data; True if there are none."""
        self.decide: Callable[[], None] = lambda: None
        """Called before anything is computed: it may end the step."""
        self.failed: BaseException | None = None
        """What was raised when values were computed: code may have caught it."""
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What gets its value at the end: the operation that writes it is under way."""
        self._token: Token[Step | None]
        self.modes = 0
        self._making: AbstractContextManager[object] = nullcontext()
        if values and not values[0].is_cpu:  # on the host a mode costs time: it is on where a step may make some
            self.see_made()
        self._same = dict(same)
        """Places by ids: also of tensors that have been given other data."""
        self._course, self._earlier = CallSequence([cones.calls for cones in earlier]), list(earlier)
        self._quick, self._compute, self._spare = steady, compute, bool(spare)
        self.met: dict[int, torch.Tensor] = {}
        """What is inside tensors that have met values that wait, by their places: with their own values."""
        self.reading: Callable[[list[tuple[int, int]]], AbstractContextManager[object]] = nullcontext
        """The context in which values are read before updates are launched."""
        self.may_send = False
        """True if what is added up between processes waits: only if they agree on what is launched."""
        self.has_met, self._meeting, self._begun = False, list[Call](), 0
        """True if there were some, and the calls by which states are known that were."""
        self._just_met: list[int] = []
        """The ids of those of the operation that is under way: torch returns what was inside when it began."""
        self._state_of, self._copy_of = state_of, copy_of
        self._values = Values()
        self._first = len(values)
        self._inside, self._users = (
            [*inside, *map(torch_privates.inside, self.tensors[len(inside) :])],
            list(map(torch_privates.users, values)),
        )
        self._set_places()

    def _set_places(self) -> None:
        self._places = dict(zip(map(id, self.tensors), range(len(self.tensors)), strict=True))
        self._places.update(self._same)
        self._place = self._places.get

    def see_made(self) -> None:
        """Tensors that the step makes of a number will wait too."""
        if self.tensors:
            self.modes, self._making = 1, factory_tensors.MadeOnDevice(self.tensors[0].device)

    # --- one operation ----------------------------------------------------------------------------------------------

    def __enter__(self) -> None:
        self.outer = STEP.get()
        self._token = STEP.set(self)
        IN_PROGRESS.append(self)
        self._making.__enter__()

    def __exit__(self, *error: object) -> None:
        self._making.__exit__(None, None, None)
        IN_PROGRESS.remove(self)
        STEP.reset(self._token)

    def is_asked_for(self, x: torch.Tensor, error: BaseException) -> None:
        """Notes that `error` is raised, since another thread asks for a value that waits: its work is missing."""
        if not self.is_filled and id(x) in self._places:
            self.failed = error.with_traceback(None)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Notes an operation, or runs it."""
        found = self.again(0, func, args, kwargs)
        return self._compared(func, args, kwargs or {}) if found is None else found

    def method(self, name: str, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a method of a placeholder, and notes which calls it makes."""
        at, count = self._course.at, len(self.numbers)
        out = function(*args, **kwargs)
        if self._course.is_new and self._course.at > at and not self.is_filled and self.calls[at].method is None:
            self._see_method(at, self.numbers[count:], name, args, kwargs, out)
        return out

    def _see_method(
        self, at: int, numbers: list[float], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        """Notes which method has made the calls from one on: a number has to be that of the call."""
        found: list[float] = []
        call, place = self.calls[at], -1 if out is args[0] else self._place(id(out))
        with suppress(Uncompiled):
            own = self.written_of(args, found, call.rule.is_constant)
            named = dict(zip(kwargs, self.written_of(list(kwargs.values()), found, call.rule.is_constant), strict=True))
            if (numbers or found) and not (call.is_written(own, named) and repr(found) == repr(numbers)):
                return
            if place is not None:
                method = quick(name, own, named, place, self._course.at - at)
                self.calls[at] = call._replace(method=method)

    def again(self, by: int, asked: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """What a steady step returns that calls what the last one did: an operation (0), a method (1); else None."""
        at = self._course.at
        if at >= len(self._quick) or (expected := self._quick[at][by]) is None:
            return None
        what, places, number, returns, calls, others, _ = expected
        if what != asked or not args or (count := len(args)) != len(places):
            return None
        # Mostly these are one or two objects, each in its place; what is no tensor is looked at below.
        tensors, first, second = self.tensors, places[0], places[-1]
        are_there = (
            first is not None
            and args[0] is tensors[first]
            and (count == 1 or (count == 2 and (second is None or args[1] is tensors[second])))
            and self._are_own
        )
        # Else by ids: all that waits is alive in `tensors`. Without a comprehension, which is a call of Python's.
        if not are_there and [*map(self._place, map(id, args))] != places:
            return None
        if others:
            numbers = expected.numbers(args, kwargs or {}, self._place)
            if numbers is None:
                return None
            self.numbers += numbers
        elif number is None:
            if kwargs:
                return None
        else:
            if not kwargs:
                x = args[number] if isinstance(number, int) else None
            else:
                x = kwargs.get(number) if len(kwargs) == 1 else None  # type: ignore[arg-type]  # or None
            if type(x) is not float:
                return None
            self.numbers.append(x)
        self._course.at = at + calls
        return args[0] if returns < 0 else self.tensors[returns]

    def _into(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What has an `out`, as two operations; NotImplemented if torch would give that another shape, or rounds."""
        plain, out = without_out(func), kwargs["out"]
        if plain is None:
            return NotImplemented
        rest = {k: x for k, x in kwargs.items() if k != "out"}
        try:
            geometry = geometries(plain, args, rest)[0]
        except Uncompiled:
            return NotImplemented
        if (geometry.shape, geometry.dtype) != (out.shape, out.dtype):
            return NotImplemented
        return self.call(torch.ops.aten.copy_.default, (out, self.call(plain, args, rest)), None)

    def _compared(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if (step := fused_ops.step_of(func)) is not None:
            return fused_ops.run(step, args, dict(kwargs))
        if func in NORMS or torch_privates.is_wrapping(func):
            return self.call(*(vector_norm(*args, **kwargs) if func in NORMS else (WAIT, args, kwargs)))
        if "out" in kwargs and (done := self._into(func, args, kwargs)) is not NotImplemented:
            return done
        if reads_values(func):
            try:
                return self._looked_at(func, args, kwargs)
            except Uncompiled as error:
                return self._now(str(error), func, args, kwargs)
        rule = rule_of(func)
        # Autograd would keep what is inside a placeholder now, before that has its value.
        if rule is None or torch.is_grad_enabled() or (func in (ALL_REDUCE, WAIT) and not self.may_send):
            return self._now(f"{func} cannot wait", func, args, kwargs)
        found: list[float] = []
        self._just_met = []
        try:
            # First what is written: among arguments, a tensor of one element is a number of the step (`Writing`).
            for x in written_by(rule, args):
                if self._place(id(x)) is None and isinstance(x, torch.Tensor):
                    self._meet(x)
            own = self.written_of(args, found, rule.is_constant)
            named = dict(zip(kwargs, self.written_of(list(kwargs.values()), found, rule.is_constant), strict=True))
            check_written(func, rule, own)
            call = self._course.known(func, own, named) or self._new(func, rule, (own, named), args, kwargs)
        except Uncompiled as error:
            return self._now(str(error), func, args, kwargs)
        self._note(call, found)
        return self._result(call, args, kwargs)

    def looked_at(self, x: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that goes on waiting; None if it cannot be computed alone."""
        place = None if self.is_filled else self._place(id(x))
        try:
            return None if place is None else self._value(place)
        except Uncompiled:
            return None

    def _looked_at(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operation tells of values, which go on waiting."""
        with _unobserved():
            there = [self._value(self._places[id(x)]) if id(x) in self._places else x for x in args]
            return func(*there, **kwargs)

    @property
    def cones(self) -> Cones:
        """The cones of the values of this step, at its end."""
        calls = self.calls
        return self._cones if self._cones.calls is calls else Cones(calls)  # the one it has followed may have gone on

    @property
    def _cones(self) -> Cones:
        """The cones of the values so far: of an earlier step, if that has made the same calls."""
        calls = self._course.whole
        found = next((each for each in self._earlier if each.calls is calls), None)
        if found is None:
            found = Cones(calls)
            self._earlier.append(found)
        return found

    def _value(self, place: int, before: int | None = None) -> torch.Tensor:
        before = self._course.at if before is None else before
        found = self._values.ahead(self._course.whole, (place, before), self.numbers)
        if found is not None:
            return found
        self.decide()
        began = Beginning(self._copied, self._copied_into if self.copy_into else None, self._like)
        with _unobserved():
            return self._values.value(self._cones, place, before, self.numbers, began)

    def _like(self, place: int) -> torch.Tensor | None:
        return self.tensors[place] if place < self._first or place in self.met else None

    def _copied_into(self, places: Sequence[int], into: Sequence[torch.Tensor]) -> bool:
        if self.copy_into is None or any(i >= self._first and i not in self.met for i in places):
            return False
        own = [*map(self.tensors.__getitem__, places)]
        if [*map(torch_privates.inside, own)] != [*map(self._inside.__getitem__, places)]:
            raise Exchanged(EXCHANGED)
        if self.met:
            met = {i: x for i, x in zip(places, into, strict=True) if i in self.met}
            torch_privates.copy_each([*met.values()], [adopted_tensors.value_in(self.met[i]) for i in met])
            own, into = [*compress(own, are_first := [i not in met for i in places])], [*compress(into, are_first)]
        self.copy_into(own, into)
        return True

    def meet_all(self, names: Sequence[adopted_tensors.Name], states: Sequence[torch.Tensor]) -> bool:
        """Makes the states with these names wait that have met values in the last step, which began with the same.

        False, and nothing is done, if that step has not begun with their calls.
        """
        calls, first = self._course.whole[: len(names)], self._first
        if [call.args for call in calls] != [[(tuple, name)] for name in names] or not self._spare:
            return False
        if any(call.func is not adopted_tensors.state for call in calls):
            return False
        others = self.tensors[first : first + len(states)]
        if not adopted_tensors.exchange_all(states, others):
            return False
        for t in others:
            del self._places[id(t)]
        self.tensors[first : first + len(states)] = states  # what is inside them was inside the others
        places = range(first, first + len(states))
        self._places.update(zip(map(id, states), places, strict=True))
        self.met, self._meeting, self.has_met = dict(zip(places, others, strict=True)), calls, True
        self._course.at += len(states)
        return True

    def meet_again(self, states: Iterable[torch.Tensor]) -> None:
        """Makes states wait that met values in the last step."""
        for x in states:
            if self._place(id(x)) is None:
                with suppress(Uncompiled):
                    self._meet(x)

    def value(self, place: int) -> torch.Tensor:
        """A copy of the value that a tensor has now."""
        return self._value(place).clone()

    def add_values(self, reads: Iterable[tuple[int, int]]) -> None:
        """Adds the values of tensors of one element to the numbers: their places, and after how many calls."""
        asked = list(reads)
        with _unobserved(), self.reading(asked) if asked else nullcontext():
            for place, before in asked:
                self.numbers.append(float(self._value(place, before)))

    def _copied(self, place: int) -> torch.Tensor:
        if torch_privates.inside(self.tensors[place]) != self._inside[place]:
            raise Exchanged(EXCHANGED)
        return adopted_tensors.copied(self.met[place]) if place in self.met else self._copy_of(self.tensors[place])

    @cached_property
    def _shapes(self) -> set[torch.Size]:
        """The shapes of the values that the step begins with."""
        return {t.shape for t in self.tensors[: self._first]}

    def _meet(self, x: torch.Tensor) -> int:
        """Makes a tensor wait that has a value; its place."""
        is_like_value = x.shape in self._shapes
        func, own, numbers = adopted_tensors.written(
            x, self._state_of(x), self.tensors[0].device, is_like_value, self._course.expected
        )
        makes = [Geometry(tuple(x.shape), x.stride(), torch.float32, 0)]
        call = self._course.known(func, own, {}) or Call(func, MEETS, own, {}, makes, self._count())
        self._note(call, numbers)
        self.met[call.first] = adopted_tensors.exchanged(x)
        self._meeting += [call] if func is adopted_tensors.state else []
        self._just_met.append(id(x))
        self.has_met = True
        self._put(call, [x])
        return call.first

    def make(self, shape: Sequence[int], value: float) -> torch.Tensor:
        """A tensor on the device of the values, which waits, with one number in all elements."""
        device = self.tensors[0].device
        asked = {"dtype": torch.float32, "device": device}
        found: torch.Tensor | None = self.again(0, factory_tensors.FULL, (shape, value), asked)
        if found is not None:
            return found
        args, kwargs, numbers = factory_tensors.written(shape, value, device)
        call = self._course.known(factory_tensors.FULL, args, kwargs)
        if call is None:
            makes = geometries(factory_tensors.FULL, [list(shape), value], {"dtype": torch.float32, "device": "meta"})
            call = Call(factory_tensors.FULL, factory_tensors.RULE, args, kwargs, makes, self._count(), line=here())
        self._note(call, numbers)
        if not self._spare:
            self._put(call, [placeholder(x.shape, x.stride, x.dtype, device) for x in call.makes or ()])
        return self.tensors[call.first]

    def _new(self, func: Any, rule: Rule, written: tuple[Written, dict[str, Any]], args: Any, kwargs: Any) -> Call:
        if rule.kind == "writes":
            without_values(func, args, kwargs)  # what torch would raise is raised here, and not when it is computed
            return Call(func, rule, *written, None, self._count(), line=here())
        return Call(func, rule, *written, geometries(func, args, kwargs), self._count(), line=here())

    def _note(self, call: Call, numbers: Sequence[float]) -> None:
        if not self._course.goes_on(call):
            self._make_new(call.first)
        self.numbers += numbers

    def _result(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns."""
        if call.makes is None:
            return None if call.rule.is_list else args[0]
        if call.is_new_view or not self._spare:
            self._add(call, call.makes, (*args, *kwargs.values()))
        made = [self.tensors[i] for i in call.returns]
        return made if call.rule.is_list else made[0]

    def _add(self, call: Call, makes: Sequence[Geometry], args: tuple[Any, ...]) -> None:
        given = chain.from_iterable(x if isinstance(x, (list, tuple)) else (x,) for x in args)
        device = next((x.device for x in given if waits(x)), self.tensors[0].device)  # none, if only an `out` waits
        self._put(call, [placeholder(each.shape, each.stride, each.dtype, device, each.offset) for each in makes])

    def _put(self, call: Call, made: Sequence[torch.Tensor]) -> None:
        """Gives what a call returns its places."""
        # Spare placeholders that nobody was given are replaced: their ids may be used again.
        for t in self.tensors[call.first : call.first + len(made)] if self._spare else ():
            self._places.pop(id(t), None)
        self.tensors[call.first : call.first + len(made)] = made
        self._inside[call.first : call.first + len(made)] = map(torch_privates.inside, made)
        self._places.update(zip(map(id, made), call.returns, strict=True))

    def meet_states(self, p: torch.Tensor, state: Mapping[Any, Any], only_narrow: bool) -> None:
        """Makes the states of a parameter wait that are not in words, before the step."""
        # On XLA an operation gets another object than the state has, so it would not be known when it meets values.
        # What is done with a state in bf16 alone, before it meets anything, would be done in bf16; and one in fp32
        # of which nobody knew the format when it was loaded, would not show what it is for.
        for x in state.values():
            if isinstance(x, torch.Tensor) and self._place(id(x)) is None:
                is_loaded = x.dim() > 0 and x.shape == p.shape and x.dtype == torch.float32
                if is_loaded or (x.shape != p.shape and not (only_narrow and x.dtype != torch.bfloat16)):
                    with suppress(Uncompiled):
                        self._meet(x)

    def are_of_values(self, places: Sequence[int], first: int) -> bool:
        """Returns True if one of these depends on the first values, or on what the step met."""
        if not places:
            return False
        memories = memories_of(self.calls, len(self.tensors))
        return not made_of_values(self.calls, memories, first).isdisjoint(memories[i] for i in places)

    def _make_new(self, count: int) -> None:
        """From the place `count` on, what calls make is new."""
        self._quick = ()
        if self._spare:
            self._spare = False
            del self.tensors[count:], self._inside[count:]
            self._set_places()

    def _count(self) -> int:
        """How many placeholders the calls so far have made."""
        if not self._spare:
            return len(self.tensors)
        expected = self._course.expected
        if expected is None:  # there may be more placeholders than the calls so far have made
            return self._first + sum(len(call.makes or ()) for call in self._course.calls)
        return expected.first

    def written_of(self, given: Sequence[Any], numbers: list[float], is_constant: bool) -> Written:
        return Writing(numbers, is_constant, self._place, self._meet).each(given)

    def _now(self, why: str, func: Any, args: Any, kwargs: Any) -> Any:
        self.fill(why)
        if "out" in kwargs or _writes(func):
            own = kwargs.get("out", args[0])
            each = own if isinstance(own, (list, tuple)) else [own]
            # C++ returns what was inside `t` when the operation began, and `fill` has exchanged that with the value: it
            # is put back until the step settles, so that the caller gets the object `t`.
            late = [t for t in each if id(t) in self.given and id(t) not in self._just_met]
            self._late = [(t, self.given[id(t)]) for t in late]
            for t, other in self._late:
                put_off(t, other)
        return func(*valued(args), **dict(zip(kwargs, valued(kwargs.values()), strict=True)))

    def settle(self) -> None:
        """Gives values to what has none itself; before anything else looks at it."""
        for t, other in self._late:
            give(t, other)
        self._late = []
        self.given.clear()  # what stands for a view may share the memory of a state

    def set_data(self, t: torch.Tensor, value: torch.Tensor) -> bool:
        """Notes `t.data = value`, a call too; False if the value does not wait, or is of another shape or type."""
        there, new = self._place(id(t)), self._place(id(value))
        if self.is_filled or there is None or new is None or not isinstance(t, torch.nn.Parameter):
            return False
        there, self._are_own = self._own.setdefault(id(t), there), False  # it may have been given other data before
        if _geometry(t) != _geometry(value):
            return False
        own = [there, new]
        self._note(self._course.known(set_data, own, {}) or Call(set_data, SETS, own, {}, None, self._count()), [])
        self._places[id(t)] = self._same[id(t)] = new
        return True

    # --- what the step has done -------------------------------------------------------------------------------------

    @property
    def is_untouched(self) -> bool:
        """Returns True if nothing was called or computed yet, but that states wait from the beginning."""
        return not (self._course.at > self._begun or self.is_filled)

    def begins(self) -> None:
        """Called when the states wait that wait from the beginning: what comes is the step's own."""
        self._begun = self._course.at

    @property
    def calls(self) -> list[Call]:
        """The calls of this step: the list of an earlier one, if it has made the same."""
        return self._course.calls

    def places_of(self, objects: Iterable[object]) -> list[int | None]:
        """The places of objects; None for what does not wait."""
        return list(map(self._place, map(id, objects)))

    def inside(self) -> list[int]:
        """What is inside the first values."""
        return self._inside[: self._first]

    def let_go(self, first: int) -> list[torch.Tensor]:
        """The placeholders from a place on, which this has no more."""
        made = self.tensors[first:]
        del self.tensors[first:]
        return made

    def original(self, returned: torch.Tensor) -> torch.Tensor | None:
        """The tensor for which torch has returned another object."""
        if self.is_filled:
            value: torch.Tensor = value_of(returned)
            return value
        return next((self.tensors[place] for place, t in self.met.items() if t is returned), None)

    def put_originals(self, states: Iterable[dict[Any, Any]]) -> None:
        """States have tensors themselves, and not what torch has returned for them."""
        for state in states:
            found = {name: self.original(x) for name, x in dict.items(state) if adopted_tensors.stands_for_another(x)}
            dict.update(state, {name: x for name, x in found.items() if x is not None})

    def give_back(self) -> None:
        """What has met values that wait has its own again: the step is undone."""
        for place, other in self.met.items():
            adopted_tensors.exchange_back(self.tensors[place], other)
            self.tensors[place] = other  # a placeholder as before
        self.met = {}

    def exchange_states(self, exchange: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Exchanges what is inside states that have met values that wait: they are there while updates are launched."""
        for call in self._meeting:
            exchange(self.tensors[call.first], self.met[call.first])

    def met_states(self) -> Iterator[tuple[adopted_tensors.Name, torch.Tensor]]:
        """The states that have met values that wait, with their names."""
        return ((call.args[0][1], self.tensors[call.first]) for call in self._meeting)

    def is_shared(self, first: int, users: Sequence[int]) -> bool:
        """Returns True if something in C++ has a placeholder, or something that is not known one from a place on.

        `users` are those that the calls make (`users_of`).
        """
        self._check_inside()
        now = list(map(torch_privates.users, self.tensors))
        # Both the count before and that which calls add have the tensor itself once.
        more = any(map(ge, now, map(add, users, self._users)))
        return (
            more or any(map(gt, now[first:], users[first:])) or any(map(weakref.getweakrefcount, self.tensors[first:]))
        )

    def fill(self, why: str) -> None:
        """Computes all that waits, in the order of the calls; the rest of the step runs as written."""
        if self.is_filled:
            return
        self.decide()
        calls, numbers = self.calls, iter(self.numbers)
        self.is_filled, self.why, self._quick = True, why, ()  # first: what runs from here on is not noted again
        try:
            self._check_inside()
            with _unobserved():
                self._compute()
                for call in calls:
                    self._run(call, numbers)
                for t in self.tensors[: self._first]:
                    if waits(t.grad):  # the step has set it
                        t.grad = value_of(t.grad)
        except BaseException as error:
            self.failed = error
            raise
        self.tensors.clear()  # they may be alone with their memory
        self._set_places()

    def _check_inside(self) -> None:
        if list(map(torch_privates.inside, self.tensors)) != self._inside:
            raise Exchanged(EXCHANGED)

    def _run(self, call: Call, numbers: Iterator[float]) -> None:
        if call.rule is MEETS:
            adopted_tensors.give_back(self.tensors[call.first], self.met.pop(call.first))
            deque(islice(numbers, call.numbers()), maxlen=0)  # it has its value
            return
        args = arguments(call.args, self.tensors, numbers)
        kwargs = dict(zip(call.kwargs, arguments(list(call.kwargs.values()), self.tensors, numbers), strict=True))
        out = call.func(*args, **kwargs)
        for i, x in zip(call.returns, out if isinstance(out, (list, tuple)) else [out], strict=False):
            # An operation may return its argument itself (`lift_fresh`), whose object keeps its own inside.
            give(self.tensors[i], x.detach() if any(x is y for y in args) else x)


@contextmanager
def _unobserved() -> Iterator[None]:
    """A context in which torch computes, and nothing else."""
    # Most often it does already, and the contexts cost 20 us.
    if not (torch_privates.dispatch_modes() or torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
        yield
        return
    with torch_privates.without_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def _writes(func: Any) -> bool:
    written = torch_privates.schema(func).arguments[:1] if torch_privates.is_operation(func) else ()
    return any(a.alias_info is not None and a.alias_info.is_write for a in written)


def _geometry(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset(), t.dtype
