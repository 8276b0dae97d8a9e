"""The calls of a step, taken apart: for each parameter the operations of its update, as if it were alone."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch

from collage_neuron.passes.capture.recorder import Op, Recorder, Ref, Slot
from collage_neuron.torch_privates import schema
from collage_neuron.trace import met
from collage_neuron.trace.calls import Call, Uncompiled, Written, is_number, memories_of, needed_for
from collage_neuron.trace.placeholders import set_data

aten = torch.ops.aten

Part = tuple[Call, list[int], list[int]]
"""A call about one parameter, the positions of its numbers in the vector of the step, and the places it returns."""


@dataclass(eq=False)
class Lane:
    """The operations about one parameter, its gradient and its states."""

    recorder: Recorder = field(default_factory=Recorder)
    numbers: list[int] = field(default_factory=list)
    """Which numbers of the step its slots are."""


class Lanes:
    """The lanes of the calls of a step.

    `values` are for each parameter the places of its tensors before the step, by name, and `after` those after it.

    Raises:
        Uncompiled: a call is about several parameters.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        values: Sequence[Mapping[str, int]],
        after: Sequence[Mapping[str, int]],
        calls: Sequence[Call],
    ) -> None:
        self._tensors, self._memories = tensors, memories_of(calls, len(tensors))
        self._refs: dict[int, Ref] = {}
        self._loose: dict[int, Op] = {}
        """What fills memory that is about no parameter yet, by storage."""
        self._lane_of: dict[int, int] = {}
        """By storage: views are about the parameter that their memory is."""
        self._stacks: dict[int, list[int]] = {}
        """Of stacks with one number of each of several parameters (`torch.stack(norms)`), the places of the numbers."""
        self.lanes = [Lane() for _ in values]
        for i, names in enumerate(values):
            for place in names.values():
                self._join(place, i)
        left = [*chain.from_iterable(names.values() for names in (*values, *after))]
        self._add_all(calls, needed_for(left, calls, self._memories))

    def refs(self, names: Mapping[str, int]) -> dict[str, Ref]:
        """How recordings name tensors."""
        return {name: self._ref(place) for name, place in names.items()}

    def _ref(self, place: int) -> Ref:
        if place not in self._refs:
            t = self._tensors[place]
            self._refs[place] = Ref(self._memories[place], int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))
        return self._refs[place]

    def _join(self, place: int, lane: int) -> None:
        if self._lane_of.setdefault(self._ref(place).storage, lane) != lane:
            raise Uncompiled("two parameters, gradients or states share memory")

    def _add_all(self, calls: Sequence[Call], needed: Container[int]) -> None:
        at = 0
        for i, call in enumerate(calls):
            count = call.numbers()
            if i not in needed:
                at += count
                continue
            if call.func is aten.full.default:
                ref = self._ref(call.first)
                self._loose[ref.storage] = Op(call.func, tuple(map(_constant, call.args)), (), (ref,))
            elif call.func not in (set_data, met.state):  # what a tensor is afterwards is its place
                for part in _parts(call, list(range(at, at + count))):
                    self._add_stack(*part) if self._is_about_stacks(call) else self._add(*part)
            at += count

    def _is_about_stacks(self, call: Call) -> bool:
        makes_one = call.func is aten.stack.default and all(not self._ref(place).shape for place in call.places())
        return makes_one or any(place in self._stacks for place in call.places())

    def _add_stack(self, call: Call, numbers: list[int], returns: list[int]) -> None:
        """A call about stacks: one about each number of them."""
        first = call.args[0]
        if call.func is aten.stack.default and call.args[1:] in ([], [(int, 0)]):
            self._stacks[returns[0]] = [self._each(aten.clone.default, call, [place], []) for place in first]
        elif call.func is aten.unbind.int and call.args[1:] in ([], [(int, 0)]):
            self._refs.update(zip(returns, map(self._ref, self._stacks[first]), strict=True))
        elif torch.Tag.pointwise in call.func.tags:
            stacks = [self._stacks[place] for place in call.places() if place in self._stacks]
            made = [self._each(call.func, call, self._numbers_at(call.args, i), numbers) for i in range(len(stacks[0]))]
            if returns:
                self._stacks[returns[0]] = made
        else:
            raise Uncompiled(f"{call.func} computes with numbers of several parameters")

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

    def _add(self, call: Call, numbers: list[int], returns: list[int]) -> None:
        number = self._lane(call)
        for place in returns:
            self._join(place, number)
        lane, left = self.lanes[number], iter(numbers)
        args = tuple(self._argument(x, lane, left) for x in call.args)
        kwargs = tuple((k, self._argument(x, lane, left)) for k, x in call.kwargs.items())
        outs = tuple(map(self._ref, returns)) or (args[0] if isinstance(args[0], Ref) else None,)
        lane.recorder.ops.append(Op(call.func, args, kwargs, outs))

    def _lane(self, call: Call) -> int:
        """The number of the lane that a call is about; memory that is about none yet is about that too."""
        memories = [self._ref(place).storage for place in call.places()]
        lanes = {self._lane_of.get(each) for each in memories if each not in self._loose}
        number = lanes.pop() if len(lanes) == 1 else None
        if number is None:
            raise Uncompiled(f"{call.func} computes with tensors of several parameters")
        for each in filter(self._loose.__contains__, memories):
            self._lane_of[each] = number
            self.lanes[number].recorder.ops.append(self._loose.pop(each))
        return number

    def _argument(self, x: Any, lane: Lane, numbers: Iterator[int]) -> Any:
        """How a recording has an argument; a number is the next of those of the call."""
        if type(x) is int:
            return self._ref(x)
        if is_number(x):
            lane.numbers.append(next(numbers))
            return Slot(len(lane.numbers) - 1)
        return tuple(self._argument(y, lane, numbers) for y in x) if type(x) is list else x[1]


def _constant(x: Any) -> Any:
    """How a recording has an argument that is neither a tensor nor a number of a step."""
    return tuple(map(_constant, x)) if type(x) is list else x[1]


def _parts(call: Call, numbers: list[int]) -> Iterator[Part]:
    """A call, or, of an operation on lists, those on lists of one tensor that it is equivalent to."""
    if not str(schema(call.func).name).startswith("aten::_foreach_"):
        yield call, numbers, list(call.returns)
        return
    left = iter(numbers)
    of_args = [_positions(x, left) for x in call.args]
    shared = list(left)  # those of keywords
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
