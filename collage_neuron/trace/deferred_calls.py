"""The operations of a step, which wait: a list of calls, which is compared with an earlier step's, and can be run.

Each placeholder has a number, its place, in the order in which the step meets it. So two steps do the same if their
calls are equal, whatever their numbers are. Whatever has to be known before the step's end (`.item()`, an operation
that is not torch's own, memory) makes `fill` run all calls, in order, on real memory: from there the step runs as
written, with the tensor objects that it has already.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from contextvars import Token
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron import torch_privates
from collage_neuron.passes.functionalize.recorded_ops import ALL_REDUCE, WAIT, Geometry
from collage_neuron.trace import adopted_tensors, factory_tensors, fused_ops, method_cache  # noqa: F401  # placeholders get method_cache
from collage_neuron.trace.adopted_tensors import Adopted
from collage_neuron.trace.calls import (
    MEETS,
    NORMS,
    SETS,
    Call,
    Quick,
    Rule,
    Uncompiled,
    Writing,
    Written,
    arguments,
    check_written,
    geometries,
    made_by,
    made_of_values,
    memories_of,
    quick,
    reads_values,
    rule_of,
    vector_norm,
    without_out,
    written_by,
)
from collage_neuron.trace.placeholders import (
    IN_PROGRESS,
    STEP,
    computed,
    give,
    has_xla,
    in_lists,
    placeholder,
    put_off,
    set_data,
    value_of,
    waits,
    written_in,
)
from collage_neuron.trace.source_location import here
from collage_neuron.trace.structure_guard import CallSequence
from collage_neuron.trace.tensor_places import TensorPlaces
from collage_neuron.trace.xla_calls import SeenBefore

if TYPE_CHECKING:
    from collage_neuron.trace.materialize import Cones
    from collage_neuron.trace.step_reads import Sources


class DeferredCalls:
    """The calls of one step.

    `values` are its first placeholders; `compute` gives them memory, and values. `same` are the places of further
    objects, by their ids. `spare` are the placeholders that the first of the earlier steps has made, which nobody holds
    any more: they are made once more, and `steady` is for it. `inside` says what is inside the first values, if known.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        compute: Callable[[], None],
        state_of: Callable[[torch.Tensor], adopted_tensors.Name | None],
        sources: Sources,
        same: Mapping[int, int] | None = None,
        earlier: Sequence[Cones] = (),
        spare: Sequence[torch.Tensor] = (),
        steady: Sequence[tuple[Quick | None, Quick | None]] = (),
        inside: Sequence[int] = (),
    ) -> None:
        self.is_filled = False
        self.why = ""
        """Why values were computed."""
        self.outer: DeferredCalls | None = None
        """The step in which this one runs, if that waits too."""
        self.given: dict[int, torch.Tensor] = {}
        """What stands for placeholders that have values, by the ids of these."""
        self.failed: BaseException | None = None
        """What was raised when values were computed: code may have caught it."""
        self._late: list[tuple[torch.Tensor, torch.Tensor]] = []
        """What gets its value at the end: the operation that writes it is under way."""
        self._token: Token[DeferredCalls | None]
        self._course = CallSequence([cones.calls for cones in earlier], steady)
        self.numbers = self._course.numbers
        self.places = TensorPlaces(values, same or {}, spare, inside, self._course)
        self.tensors, self._place = self.places.tensors, self.places.of
        self.adopted = Adopted(self.places, self._course, state_of)
        self.reads = sources.reads(self.places, self._course, self.adopted, earlier)
        self._compute, self._decide = compute, sources.decide
        self._are_own = True
        """True if no tensor has been given other data."""
        self.may_send = False
        """True if what is added up between processes waits: only if they agree on what is launched."""
        self._begun = 0
        """The calls by which states wait from the beginning."""
        self.modes = self.function_modes = 0
        """How many modes of ours see its operations, and its functions."""
        self._making: AbstractContextManager[object] = nullcontext()
        self._seen_before: AbstractContextManager[object] = nullcontext()
        if values and not values[0].is_cpu:  # on the host a mode costs time: it is on where a step may make some
            self.see_made()
        if values and values[0].device.type == "xla":
            self.function_modes, self._seen_before = 1, SeenBefore()

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
        self._seen_before.__enter__()

    def __exit__(self, *error: object) -> None:
        self._seen_before.__exit__(None, None, None)
        self._making.__exit__(None, None, None)
        IN_PROGRESS.remove(self)
        STEP.reset(self._token)

    def is_asked_for(self, x: torch.Tensor, error: BaseException) -> None:
        """Notes that `error` is raised, since another thread asks for a value that waits: its work is missing."""
        if not self.is_filled and self._place(id(x)) is not None:
            self.failed = error.with_traceback(None)

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Notes an operation, or runs it."""
        if torch_privates.is_cast(func):
            return self._now(f"torch.autocast casts what {func} gets", func, args, kwargs or {})
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
        course = self._course
        at, steady = course.at, course.steady
        if at >= len(steady) or (expected := steady[at][by]) is None:
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
        course.at = at + calls
        return args[0] if returns < 0 else self.tensors[returns]

    def _into(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What has an `out`, as two operations; NotImplemented if torch would give that another shape, or rounds."""
        plain, out = without_out(func), kwargs["out"]
        if plain is None:
            return NotImplemented
        rest = {k: x for k, x in kwargs.items() if k != "out"}
        try:
            geometry = made_by(plain, args, rest)[0]
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
                return self.reads.told(func, args, kwargs)
            except Uncompiled as error:
                return self._now(str(error), func, args, kwargs)
        rule = rule_of(func)
        # Autograd would keep what is inside a placeholder now, before that has its value, or its tangent.
        is_kept = torch.is_grad_enabled() or torch_privates.has_dual_level()
        if rule is None or is_kept or (func in (ALL_REDUCE, WAIT) and not self.may_send):
            return self._now(f"{func} cannot wait", func, args, kwargs)
        found: list[float] = []
        self.adopted.just_now.clear()
        try:
            # First what is written: among arguments, a tensor of one element is a number of the step (`Writing`).
            for x in written_by(rule, args):
                if self._place(id(x)) is None and isinstance(x, torch.Tensor):
                    self.adopted.meet(x)
            own = self.written_of(args, found, rule.is_constant)
            named = dict(zip(kwargs, self.written_of(list(kwargs.values()), found, rule.is_constant), strict=True))
            check_written(func, rule, own)
            call = self._course.known(func, own, named) or self._new(func, rule, (own, named), args, kwargs)
        except Uncompiled as error:
            return self._now(str(error), func, args, kwargs)
        self.places.note(call, found)
        return self._result(call, args, kwargs)

    def looked_at(self, x: torch.Tensor) -> torch.Tensor | None:
        """The value of a tensor that goes on waiting; None if it cannot be computed alone."""
        place = None if self.is_filled else self._place(id(x))
        try:
            return None if place is None else self.reads.value(place)
        except Uncompiled:
            return None

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
            makes = made_by(factory_tensors.FULL, [list(shape), 0.0], {"dtype": torch.float32, "device": "meta"})
            call = Call(
                factory_tensors.FULL, factory_tensors.RULE, args, kwargs, makes, self.places.next(), line=here()
            )
        self.places.note(call, numbers)
        if not self.places.has_spare:
            self.places.put(call.first, [placeholder(x.shape, x.stride, x.dtype, device) for x in call.makes or ()])
        return self.tensors[call.first]

    def _new(self, func: Any, rule: Rule, written: tuple[Written, dict[str, Any]], args: Any, kwargs: Any) -> Call:
        if rule.kind == "writes":
            geometries(func, args, kwargs)  # what torch would raise is raised here, and not when it is computed
            return Call(func, rule, *written, None, self.places.next(), line=here())
        return Call(func, rule, *written, made_by(func, args, kwargs), self.places.next(), line=here())

    def _result(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns."""
        if call.makes is None:
            return None if call.rule.is_list else args[0]
        if call.is_new_view or not self.places.has_spare:
            self._add(call, call.makes, (*args, *kwargs.values()))
        made = [self.tensors[i] for i in call.returns]
        return made if call.rule.is_list else made[0]

    def _add(self, call: Call, makes: Sequence[Geometry], args: tuple[Any, ...]) -> None:
        # none, if only an `out` waits
        device = next((x.device for x in in_lists(args, {}) if waits(x)), self.tensors[0].device)
        made = [placeholder(each.shape, each.stride, each.dtype, device, each.offset) for each in makes]
        self.places.put(call.first, made)

    def are_of_values(self, places: Sequence[int], first: int) -> bool:
        """Returns True if one of these depends on the first values, or on what the step met."""
        if not places:
            return False
        memories = memories_of(self.calls, len(self.tensors))
        return not made_of_values(self.calls, memories, first).isdisjoint(memories[i] for i in places)

    def written_of(self, given: Sequence[Any], numbers: list[float], is_constant: bool) -> Written:
        return Writing(numbers, is_constant, self._place, self.adopted.meet).each(given)

    def _now(self, why: str, func: Any, args: Any, kwargs: Any) -> Any:
        has_own = has_xla(args, kwargs)  # asked first: placeholders get their values
        self.fill(why)
        # C++ returns what was in `t` before `fill`. It stays there until it has returned: the caller gets `t`.
        late = {id(t): t for t in written_in(func, args, kwargs) if id(t) not in self.adopted.just_now}
        self._late = [(t, self.given[key]) for key, t in late.items() if key in self.given]
        for t, other in self._late:
            put_off(t, other)
        return computed(func, args, kwargs, has_own)

    def give_late(self) -> None:
        """Gives values to what has none itself, between operations."""
        late, self._late = self._late, []
        for t, other in late:
            give(t, other)

    def settle(self) -> None:
        """The same at the end of the step, before anything else looks at it."""
        self.give_late()
        self.given.clear()  # what stands for a view may share the memory of a state

    def set_data(self, t: torch.Tensor, value: torch.Tensor) -> bool:
        """Notes `t.data = value`, a call too; False if the value does not wait, or is of another shape or type."""
        there, new = self._place(id(t)), self._place(id(value))
        if self.is_filled or there is None or new is None or not isinstance(t, torch.nn.Parameter):
            return False
        if _geometry(t) != _geometry(value):
            return False
        self._are_own = False
        own = [self.places.is_given(t, there, new), new]
        call = self._course.known(set_data, own, {}) or Call(set_data, SETS, own, {}, None, self.places.next())
        self.places.note(call, [])
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

    def original(self, returned: torch.Tensor) -> torch.Tensor | None:
        """The tensor for which torch has returned another object."""
        if self.is_filled:
            value: torch.Tensor = value_of(returned)
            return value
        return self.adopted.original(returned)

    def put_originals(self, states: Iterable[dict[Any, Any]]) -> None:
        """States have tensors themselves, and not what torch has returned for them."""
        for state in states:
            found = {name: self.original(x) for name, x in dict.items(state) if adopted_tensors.stands_for_another(x)}
            dict.update(state, {name: x for name, x in found.items() if x is not None})

    def fill(self, why: str) -> None:
        """Computes all that waits, in the order of the calls; the rest of the step runs as written."""
        if self.is_filled:
            return
        self._decide()
        calls, numbers = self.calls, iter(self.numbers)
        self.is_filled, self.why = True, why
        self._course.steady = ()  # first: what runs from here on is not noted again
        try:
            self.places.check_inside()
            with self.reads.computing():
                self._compute()
                for call in calls:
                    self._run(call, numbers)
                for t in self.tensors[: self.places.first]:
                    if waits(t.grad):  # the step has set it
                        t.grad = value_of(t.grad)
        except BaseException as error:
            self.failed = error
            raise
        self.places.clear()  # they may be alone with their memory

    def _run(self, call: Call, numbers: Iterator[float]) -> None:
        if call.rule is MEETS:
            self.adopted.compute(call.first)
            deque(islice(numbers, call.numbers()), maxlen=0)  # it has its value
            return
        args = arguments(call.args, self.tensors, numbers)
        kwargs = dict(zip(call.kwargs, arguments(list(call.kwargs.values()), self.tensors, numbers), strict=True))
        out = call.func(*args, **kwargs)
        for i, x in zip(call.returns, out if isinstance(out, (list, tuple)) else [out], strict=False):
            # An operation may return its argument itself (`lift_fresh`), whose object keeps its own inside.
            give(self.tensors[i], x.detach() if any(x is y for y in args) else x)


def _geometry(t: torch.Tensor) -> tuple[Any, ...]:
    return t.shape, t.stride(), t.storage_offset(), t.dtype
