"""The calls of a step, taken apart: for each parameter the operations of its update, as if it were alone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from collage_neuron.passes.functionalize.graph_builder import refs_in
from collage_neuron.passes.functionalize.recorded_ops import Op, Recorder, Ref, Slot, functional_overload
from collage_neuron.torch_privates.operations import is_operation
from collage_neuron.trace.calls import Call, Uncompiled, Written, is_number, memories_of, written_by
from collage_neuron.trace.foreach import is_foreach, unrolled

aten = torch.ops.aten

Part = tuple[Call, list[int], list[int]]
"""A call about one parameter, the positions of its numbers in the vector of the step, and the places it returns."""


@dataclass(frozen=True)
class Number:
    """A number in an operation: one of the step, by its position, or what a tensor is."""

    position: int | Read


class Read(NamedTuple):
    """A value of one element that depends on several parameters, or on another one."""

    place: int
    before: int
    """How many calls were made when it was there."""


@dataclass(eq=False)
class Lane:
    """The operations about one parameter, its gradient and its states."""

    ops: dict[int, Op] = field(default_factory=dict)
    """By their order in the step, which is not that in which the lane gets them."""

    def recorder(self, after: Iterable[Ref]) -> tuple[Recorder, list[int | Read]]:
        """A recording of what has an effect on these tensors, and what its slots are."""
        recorder, numbers = Recorder(), list[int | Read]()
        for op in _needed([self.ops[i] for i in sorted(self.ops)], after):
            args, kwargs = _with_slots(op.args, numbers), _with_slots(op.kwargs, numbers)
            recorder.ops.append(op._replace(args=args, kwargs=kwargs))
        return recorder, numbers


def _with_slots(x: Any, numbers: list[int | Read]) -> Any:
    if type(x) is Number:
        numbers.append(x.position)
        return Slot(len(numbers) - 1)
    return tuple(_with_slots(y, numbers) for y in x) if type(x) is tuple else x


def _needed(ops: Sequence[Op], after: Iterable[Ref]) -> list[Op]:
    """The operations on which tensors depend, as they are afterwards: code may compute what it only reads."""
    found, used = list[Op](), set(after)
    live = {ref.storage for ref in used}
    single = [one for op in ops for one in (unrolled(op) if is_foreach(op.target) else (op,))]
    for op in reversed(single):
        out, read = [x for x in op.outs if x is not None], list(refs_in((op.args, op.kwargs)))
        # A view is needed if it is looked at itself; what writes memory is, if any tensor with that memory is.
        is_view = functional_overload(op.target)[1] is None and {x.storage for x in out} & {x.storage for x in read}
        if not used.isdisjoint(out) if is_view else any(x.storage in live for x in out):
            found.append(op)
            used.update(read)
            live.update(ref.storage for ref in read)
    return found[::-1]


class Partition:
    """The lanes of the calls of a step; `values` are for each parameter the places of its tensors before, by name.

    A value that depends on several parameters (a norm of all gradients) is about none. Where a lane has one, or a
    number of another lane, it is read: it is computed before anything is launched.

    Raises:
        Uncompiled: a parameter or a state depends on other ones by more than numbers.
    """

    def __init__(
        self, tensors: Sequence[torch.Tensor], values: Sequence[Mapping[str, int]], calls: Sequence[Call]
    ) -> None:
        self._tensors, self._memories = tensors, memories_of(calls, len(tensors))
        self._refs: dict[int, Ref] = {}
        self._order = itertools.count()
        self._loose: dict[int, dict[int, Op]] = {}
        """What fills memory that is about no parameter yet, by storage, and by its order in the step."""
        self._numbers: dict[int, int] = {}
        """The positions of numbers of the step that are tensors, by places."""
        self._lane_of: dict[int, int] = {}
        """By storage: views are about the parameter that their memory is."""
        self._shared: set[int] = set()
        """The storage of what depends on several parameters."""
        self._written: dict[int, int] = {}
        """How many calls there were when memory was last written, by storage."""
        self._made: dict[int, int] = {}
        """How many there were when a tensor was made, by places."""
        self._values = {place for names in values for place in names.values()}
        self._stacks: dict[int, list[int]] = {}
        """Of stacks with one number of each of several parameters (`torch.stack(norms)`), the places of the numbers."""
        self.lanes = [Lane() for _ in values]
        for i, names in enumerate(values):
            for place in names.values():
                self._join(place, i)
        self._add_all(calls)

    def refs(self, names: Mapping[str, int]) -> dict[str, Ref]:
        """How recordings name tensors."""
        found = {name: self._ref(place) for name, place in names.items()}
        if any(ref.storage in self._shared for ref in found.values()):
            raise Uncompiled("a parameter or a state depends on other parameters by more than numbers")
        return found

    def keep(self, places: Sequence[int], lane: int) -> None:
        """A parameter keeps these: memory that is about none yet, as a state of zeros, is about this one."""
        self._take_loose(places, lane)
        if any(self._lane_of.get(self._ref(place).storage, lane) != lane for place in places):
            raise Uncompiled("two parameters hold a state of the same memory")

    def _ref(self, place: int) -> Ref:
        if place not in self._refs:
            t = self._tensors[place]
            self._refs[place] = Ref(self._memories[place], int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))
        return self._refs[place]

    def _join(self, place: int, lane: int) -> None:
        if self._lane_of.setdefault(self._ref(place).storage, lane) != lane:
            raise Uncompiled("two parameters, gradients or states share memory")

    def _add_all(self, calls: Sequence[Call]) -> None:
        at = 0
        for i, call in enumerate(calls, start=1):
            count = call.numbers()
            if call.func is aten.full.default and count:
                self._note([call.first], i)
                self._share([call.first])  # a number of the step: where a lane has it as it was made, it is that
                self._numbers[call.first] = at
            elif call.func is aten.full.default:
                ref = self._ref(call.first)
                op = Op(call.func, tuple(map(_constant, call.args)), (), (ref,), call.line)
                self._loose[ref.storage] = {next(self._order): op}
                self._note([call.first], i)
            elif is_operation(call.func):  # and not `t.data = x`: what a tensor is afterwards is its place
                for part in _parts(call, list(range(at, at + count))):
                    self._add_part(*part, i)
            at += count

    def _add_part(self, call: Call, numbers: list[int], returns: list[int], at: int) -> None:
        if self._is_about_stacks(call):
            is_added = self._add_stack(call, numbers, returns)
        else:
            is_added = self._add(call, numbers, returns)
        changed = [*returns, *written_by(call.rule, call.args)]
        self._note(changed, at)
        if not is_added:
            self._share(changed)

    def _note(self, places: Iterable[int], at: int) -> None:
        """Notes tensors that are made, or written, by the last of so many calls."""
        for place in places:
            self._made.setdefault(place, at)
            self._written[self._ref(place).storage] = at

    def _share(self, places: Iterable[int]) -> None:
        """Notes tensors that depend on several parameters, and are in no lane."""
        for storage in [self._ref(place).storage for place in places]:
            self._shared.add(storage)
            self._loose.pop(storage, None)
            for stack in [stack for stack in self._stacks if self._ref(stack).storage == storage]:
                del self._stacks[stack]

    # --- stacks -----------------------------------------------------------------------------------------------------

    def _is_about_stacks(self, call: Call) -> bool:
        makes_one = call.func is aten.stack.default and all(not self._ref(place).shape for place in call.places())
        return makes_one or any(place in self._stacks for place in call.places())

    def _add_stack(self, call: Call, numbers: list[int], returns: list[int]) -> bool:
        """A call about stacks: one about each number of them; False if it is about them together."""
        if call.func is aten.stack.default and call.args[1:] in ([], [(int, 0)]):
            each = [(aten.clone.default, [place]) for place in call.args[0]]
        elif call.func is aten.unbind.int and call.args[1:] in ([], [(int, 0)]):
            self._refs.update(zip(returns, map(self._ref, self._stacks[call.args[0]]), strict=True))
            return True
        elif torch.Tag.pointwise in call.func.tags:
            count = next(len(self._stacks[place]) for place in call.places() if place in self._stacks)
            each = [(call.func, self._numbers_at(call.args, i)) for i in range(count)]
        else:
            return False
        if any(self._about([x for x in args if type(x) is int]) is None for _, args in each):
            return False
        made = [self._each(func, call, args, numbers) for func, args in each]
        if returns:
            self._stacks[returns[0]] = made
        return True

    def _numbers_at(self, args: Written, i: int) -> Written:
        """The arguments of a call, of stacks only the number at a place."""
        return [self._stacks[x][i] if type(x) is int and x in self._stacks else x for x in args]

    def _each(self, func: Any, call: Call, args: Written, numbers: list[int]) -> int:
        """A call about one number; the place of its result."""
        place = -1 - len(self._refs)  # of no tensor
        makes = None if call.rule.kind == "writes" else call.makes
        if makes is not None:
            self._refs[place] = Ref(place, 0, (), ())
        self._add(
            call._replace(func=func, args=args, kwargs=call.kwargs if func is call.func else {}),
            numbers,
            [place] if makes is not None else [],
        )
        return place

    # --- what is about one parameter --------------------------------------------------------------------------------

    def _add(self, call: Call, numbers: list[int], returns: list[int]) -> bool:
        """A call about one parameter; False if it is about several, or writes what is."""
        places = list(call.places())
        if self._are_loose(places):
            self._add_loose(call, numbers, returns)
            return True
        lane = self._about(places)
        if lane is None or any(self._is_other(place, lane) for place in written_by(call.rule, call.args)):
            return False
        self._take_loose(places, lane)
        for place in returns:
            self._join(place, lane)
        self.lanes[lane].ops[next(self._order)] = self._op(call, numbers, returns, lane)
        return True

    def _op(self, call: Call, numbers: list[int], returns: list[int], lane: int) -> Op:
        left = iter(numbers)
        args = tuple(self._argument(x, left, lane) for x in call.args)
        kwargs = tuple((k, self._argument(x, left, lane)) for k, x in call.kwargs.items())
        outs = tuple(map(self._ref, returns)) or (args[0] if isinstance(args[0], Ref) else None,)
        return Op(call.func, args, kwargs, outs, call.line)

    def _are_loose(self, places: Sequence[int]) -> bool:
        """Returns True for memory that is about no parameter yet."""
        return bool(places) and all(self._ref(place).storage in self._loose for place in places)

    def _add_loose(self, call: Call, numbers: list[int], returns: list[int]) -> None:
        # What an operation on loose memory alone makes is loose too, with all that it depends on: a lane takes all.
        ops = {i: op for place in call.places() for i, op in self._loose[self._ref(place).storage].items()}
        ops[next(self._order)] = self._op(call, numbers, returns, -1)
        for place in returns or written_by(call.rule, call.args):
            self._loose[self._ref(place).storage] = ops

    def _is_shared(self, place: int) -> bool:
        return self._ref(place).storage in self._shared

    def _is_other(self, place: int, lane: int) -> bool:
        """Returns True for what depends on several parameters, or on one that is not this one."""
        return self._is_shared(place) or self._lane_of.get(self._ref(place).storage, lane) != lane

    def _about(self, places: Sequence[int]) -> int | None:
        """The only parameter that tensors are about, but for numbers; None if there are several."""
        own = [place for place in places if not self._is_shared(place)]
        lanes = self._lanes_of(own)
        if len(lanes) > 1:  # a number of another parameter is read before anything is launched
            own = [place for place in own if not self._is_number(place)]
            lanes = self._lanes_of(own)
        shared = filter(self._is_shared, places)
        return next(iter(lanes)) if len(lanes) == 1 and all(map(self._is_number, shared)) else None

    def _lanes_of(self, places: Iterable[int]) -> set[int | None]:
        storages = {self._ref(place).storage for place in places}
        return {self._lane_of.get(each) for each in storages if each not in self._loose}

    def _is_number(self, place: int) -> bool:
        """Returns True for what may be read: one element that was computed."""
        if place < 0 or place in self._values:  # a number of a stack has no tensor to read (`_each`)
            return False
        t = self._tensors[place]
        return t.numel() == 1 and t.dtype == torch.float32

    def _take_loose(self, places: Iterable[int], lane: int) -> None:
        """Memory that is about no parameter yet is about this one too."""
        for storage in {self._ref(place).storage for place in places}.intersection(self._loose):
            self._lane_of[storage] = lane
            self.lanes[lane].ops |= self._loose.pop(storage)

    def _argument(self, x: Any, numbers: Iterator[int], lane: int) -> Any:
        """How a recording has an argument; a number is the next of those of the call."""
        if type(x) is int and x in self._numbers and self._made[x] == self._written[self._ref(x).storage]:
            return Number(self._numbers[x])
        if type(x) is int and self._is_other(x, lane):
            return Number(Read(x, max(self._made[x], self._written[self._ref(x).storage])))
        if type(x) is int:
            return self._ref(x)
        if is_number(x):
            return Number(next(numbers))
        return tuple(self._argument(y, numbers, lane) for y in x) if type(x) is list else x[1]


def _constant(x: Any) -> Any:
    """How a recording has an argument that is neither a tensor nor a number of a step."""
    return tuple(map(_constant, x)) if type(x) is list else x[1]


def _parts(call: Call, numbers: list[int]) -> Iterator[Part]:
    """A call, or, of an operation on lists, those on lists of one tensor that it is equivalent to."""
    if not is_foreach(call.func):
        yield call, numbers, list(call.returns)
        return
    left = iter(numbers)
    of_args = [_positions(x, left) for x in call.args]
    shared = list(left)  # those of keywords, which all tensors of the lists have
    for i in range(next(len(x) for x in call.args if type(x) is list)):
        args = [[x[i]] if type(x) is list else x for x in call.args]
        func = call.func
        if func is aten._foreach_norm.Scalar:  # the passes know norms by this name
            func, args = aten.linalg_vector_norm.default, [args[0][0], *args[1:]]
        own = [n[i] if type(n) is list else n for n in of_args]
        yield (
            call._replace(func=func, args=args),
            [*(n for n in own if n is not None), *shared],
            list(call.returns[i : i + 1]),
        )


def _positions(x: Any, numbers: Iterator[int]) -> Any:
    if type(x) is list:
        return [_positions(y, numbers) for y in x]
    return next(numbers) if is_number(x) else None
