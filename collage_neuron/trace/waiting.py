"""The mode in which operations wait: a list of calls, which is compared with an earlier step's, and can be run.

Each placeholder has a number, its place, in the order in which the step meets it. So two steps do the same if their
calls are equal, whatever their numbers are. Whatever has to be known before the step's end (`.item()`, an operation
that is not torch's own, memory) makes `fill` run all calls, in order, on real memory: from there the step runs as
written, with the tensor objects that it has already.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import gt
from typing import Any

import torch

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.sharding import ORDINARY
from collage_neuron.torch_privates import DispatchMode, without_modes
from collage_neuron.trace.calls import (
    NUMBER,
    SETS,
    Call,
    HostNumber,
    Quick,
    Rule,
    Uncompiled,
    Written,
    geometries,
    rule_of,
)
from collage_neuron.trace.placeholders import has_value, placeholder, set_data, wait

SHARED = "something else than a state keeps a value, a gradient or a state that was replaced"
"""Why a step is computed that leaves values which nobody could compute later."""


class Exchanged(UnsupportedUpdate):
    """Code has exchanged what is inside tensors, and nobody saw when."""


class Waiting(DispatchMode):
    """The calls of one step.

    `values` are its first placeholders; `compute` gives them memory, and values. `spare` are the placeholders that the
    first of the earlier steps has made, which nobody holds any more: they are made once more, and `quick` is for it.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        earlier: Sequence[list[Call]],
        spare: Sequence[torch.Tensor],
        quick: Sequence[Quick],
        compute: Callable[[], None],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self.tensors = [*values, *spare]
        """By their places."""
        self.numbers: list[float] = []
        self.is_filled = False
        self.why = ""
        """Why values were computed."""
        self._set: dict[int, int] = {}
        """By their ids, the places of tensors that have been given other data."""
        self.moved: dict[int, torch.Tensor] = {}
        """What was in tensors before they were given other data, by their places."""
        self._calls: list[Call] = []
        """Those of this step, once it does what no earlier one did."""
        self._earlier, self._expected = earlier, earlier[0] if earlier else None
        self._at = 0
        """How many calls there were."""
        self._quick, self._compute, self._spare = quick if spare else (), compute, bool(spare)
        self._memory = _memories_of(values)
        self._set_places()

    def _set_places(self) -> None:
        self._places = dict(zip(map(id, self.tensors), range(len(self.tensors)), strict=True))
        self._places.update(self._set)
        self._place = self._places.get

    # --- one operation ----------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Of each operation of each step: a steady one is compared without a further call.
        if self._at < len(self._quick):
            expected, places, number, returns = self._quick[self._at]
            if func is expected and list(map(self._place, map(id, args))) == places:
                x: Any = None
                if isinstance(number, int):
                    x = None if kwargs else args[number]
                elif number is not None and kwargs and len(kwargs) == 1:
                    x = kwargs.get(number)
                if type(x) is float or (number is None and not kwargs):
                    if number is not None:
                        self.numbers.append(x)
                    self._at += 1
                    return args[0] if returns < 0 else self.tensors[returns]
        return self._compared(func, args, kwargs or {})

    def _compared(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_filled or not self._touches((*args, *kwargs.values())):
            return func(*args, **kwargs)
        rule = rule_of(func)
        if rule is None or torch.is_grad_enabled():
            return self._now(f"{func} cannot wait", func, args, kwargs)
        found: list[float] = []
        try:
            written = self._written(args, found, rule.is_constant)
            named = dict(zip(kwargs, self._written(list(kwargs.values()), found, rule.is_constant), strict=True))
            _check_written(func, rule, written)
            call = self._known(func, written, named) or self._new(func, rule, (written, named), args, kwargs)
        except Uncompiled as error:
            return self._now(str(error), func, args, kwargs)
        self._note(call, found)
        return self._result(call, args, kwargs)

    def _touches(self, given: Sequence[Any]) -> bool:
        return any(self._touches(x) if isinstance(x, (list, tuple)) else id(x) in self._places for x in given)

    def _known(self, func: Any, written: Written, named: dict[str, Any]) -> Call | None:
        """The call of an earlier step, if this is the same one."""
        expected = self._expected
        if expected is None:
            return None
        for calls in (expected, *self._earlier):
            if self._at < len(calls):
                call = calls[self._at]
                is_same = call.func is func and call.args == written and call.kwargs == named
                if is_same and (calls is expected or calls[: self._at] == expected[: self._at]):
                    self._follow(calls, call.first)
                    return call
        return None

    def _follow(self, calls: list[Call], count: int) -> None:
        """Compares with another earlier step, which began as this one did."""
        if calls is not self._expected:
            self._expected = calls
            self._make_new(count)

    def _new(self, func: Any, rule: Rule, written: tuple[Written, dict[str, Any]], args: Any, kwargs: Any) -> Call:
        makes = geometries(func, args, kwargs) if rule.kind == "new" else None
        return Call(func, rule, *written, makes, self._count())

    def _note(self, call: Call, numbers: Sequence[float]) -> None:
        expected = self._expected
        if expected is not None and not (self._at < len(expected) and call is expected[self._at]):
            self._calls, self._expected = expected[: self._at], None
            self._make_new(call.first)
        self.numbers += numbers
        self._at += 1
        if self._expected is None:
            self._calls.append(call)

    def _result(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call returns."""
        if call.rule.kind == "writes":
            return None if call.rule.is_list else args[0]
        if call.makes is None or not self._spare:
            self._add(call, args, kwargs)
        made = [self.tensors[i] for i in call.returns]
        return made if call.rule.is_list else made[0]

    def _add(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if call.makes is not None:
            made = [placeholder(*each) for each in call.makes]
        else:
            made = [call.func(*args, **kwargs)]
            wait(made[0])
            if self._spare:
                self._places.pop(id(self.tensors[call.first]), None)
        self.tensors[call.first : call.first + len(made)] = made
        self._places.update(zip(map(id, made), call.returns, strict=True))

    def _make_new(self, count: int) -> None:
        """From the place `count` on, what calls make is new."""
        self._quick = ()
        if self._spare:
            self._spare = False
            del self.tensors[count:]
            self._set_places()

    def _count(self) -> int:
        """How many placeholders there are so far."""
        expected = self._expected
        if self._spare and expected is not None and self._at < len(expected):
            return expected[self._at].first
        return len(self.tensors)

    def _written(self, given: Sequence[Any], numbers: list[float], is_constant: bool) -> Written:
        """How a call has these arguments; its numbers are added to `numbers`."""
        return [self._one(x, numbers, is_constant) for x in given]

    def _one(self, x: Any, numbers: list[float], is_constant: bool) -> Any:
        place = self._place(id(x))
        if place is not None:
            return place
        if isinstance(x, (list, tuple)):
            return self._written(x, numbers, is_constant)
        how: Any = NUMBER
        if isinstance(x, torch.Tensor):
            if x.dim() or x.requires_grad or not x.is_cpu or is_constant or x.dtype == torch.bool:
                raise Uncompiled(f"a tensor of shape {list(x.shape)} is neither a parameter, a gradient nor a state")
            how, x = HostNumber(x.dtype), x.item()
        if is_constant or type(x) not in (int, float):
            if type(x) is float and x == 0.0 and math.copysign(1.0, x) < 0.0:  # it equals 0.0
                raise Uncompiled("a constant is -0.0")
            return type(x), x
        numbers.append(x)
        return how

    def _now(self, why: str, func: Any, args: Any, kwargs: Any) -> Any:
        self.fill(why)
        return func(*args, **kwargs)

    def set_data(self, t: torch.Tensor, value: torch.Tensor) -> bool:
        """`t.data = value`, a call too; False if the value does not wait, or is of another shape or type."""
        there, new = self._place(id(t)), self._place(id(value))
        if self.is_filled or there is None or new is None or not isinstance(t, torch.nn.Parameter):
            return False
        if (t.shape, t.dtype) != (value.shape, value.dtype):
            return False
        self._note(
            self._known(set_data, [there, new], {}) or Call(set_data, SETS, [there, new], {}, None, self._count()), []
        )
        self.moved.setdefault(there, t.detach())
        set_data(t, value)
        self._places[id(t)] = self._set[id(t)] = new
        return True

    # --- what the step has done -------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[Call]:
        """The calls of this step: the list of an earlier one, if it has made the same."""
        if self._expected is None:
            return self._calls
        return self._expected if self._at == len(self._expected) else self._expected[: self._at]

    def places_of(self, objects: Iterable[object]) -> list[int | None]:
        """The places of objects; None for what does not wait."""
        return list(map(self._place, map(id, objects)))

    def let_go(self, first: int) -> list[torch.Tensor]:
        """The placeholders from a place on, which this has no more."""
        made = self.tensors[first:]
        del self.tensors[first:]
        return made

    def is_shared(self, first: int) -> bool:
        """Returns True if something that is not known has the memory of a placeholder, or, from a place on, itself."""
        memory, made = _memories_of(self.tensors), self.tensors[first:]
        for i, (before, now) in enumerate(zip(self._memory, memory, strict=False)):
            if now != before and i not in self.moved:
                raise Exchanged("step() exchanges what is inside tensors (torch.utils.swap_tensors)")
        known = Counter([*memory, *_memories_of(self.moved.values())])
        own = list(map(known.__getitem__, memory))
        return (
            any(map(gt, map(torch_privates.holders_of, memory), own))
            or any(map(gt, map(torch_privates.users, made), own[first:]))
            or any(map(weakref.getweakrefcount, made))
        )

    def fill(self, why: str = "its memory is read") -> None:
        """Computes all that waits, in the order of the calls; the rest of the step runs as written."""
        if self.is_filled:
            return
        calls, numbers = self.calls, iter(self.numbers)
        self.is_filled, self.why, self._quick = True, why, ()
        with without_modes(), torch.no_grad():
            strangers = self._strangers() if why == SHARED else []
            for t in self.tensors:
                has_value(t)
            self._compute()
            for call in calls:
                self._run(call, numbers)
            for t, place in strangers:
                base = self.tensors[place]
                t.data = base.as_strided(t.shape, t.stride(), base.storage_offset() + t.storage_offset())
        self.tensors.clear()  # they may be alone with their memory
        self._set_places()

    def _strangers(self) -> list[tuple[torch.Tensor, int]]:
        """Tensors of Python's that have the memory of a placeholder, and are not known (`x.data = p.data.clone()`)."""
        memories = _memories_of(self.tensors)
        places = {memory: i for i, memory in reversed(list(enumerate(memories)))}
        others = [t for t in gc.get_objects() if type(t) in ORDINARY and id(t) not in self._places]
        there = [t for t in others if t.is_cpu and t.layout is torch.strided]
        return [(t, places[memory]) for t, memory in zip(there, _memories_of(there), strict=True) if memory in places]

    def _run(self, call: Call, numbers: Iterator[float]) -> None:
        args = self._read(call.args, numbers)
        out = call.func(*args, **dict(zip(call.kwargs, self._read(list(call.kwargs.values()), numbers), strict=True)))
        for i, x in zip(call.returns, out if isinstance(out, (list, tuple)) else [out], strict=False):
            self.tensors[i].data = x

    def _read(self, written: Written, numbers: Iterator[float]) -> list[Any]:
        """The arguments of a call."""
        return [
            self.tensors[x]
            if type(x) is int
            else next(numbers)
            if x is NUMBER
            else torch.tensor(next(numbers), dtype=x.dtype, device="cpu")
            if type(x) is HostNumber
            else self._read(x, numbers)
            if type(x) is list
            else x[1]
            for x in written
        ]


def _memories_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The identities of the memory of tensors."""
    return list(map(torch_privates.storage_id, map(torch.Tensor.untyped_storage, tensors)))


def _check_written(func: Any, rule: Rule, written: Written) -> None:
    """Raises Uncompiled if an operation writes to what does not wait."""
    into = written[0] if type(written[0]) is list else written[:1]
    if rule.kind == "writes" and not all(type(x) is int for x in into):
        raise Uncompiled(f"{func} writes to a tensor that is neither a parameter, a gradient nor a state")
