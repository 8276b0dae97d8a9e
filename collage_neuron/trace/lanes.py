"""The calls of a step, taken apart: for each parameter a recording of its update, as if it were alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from collage_neuron.passes.capture.recorder import Op, Recorder, Ref, Slot
from collage_neuron.torch_privates import schema, storage_id
from collage_neuron.trace.calls import NUMBER, Call, Uncompiled, set_data


@dataclass(eq=False)
class Lane:
    """The calls about one parameter, its gradient and its states."""

    recorder: Recorder = field(default_factory=Recorder)
    numbers: list[int] = field(default_factory=list)
    """Which numbers of the step its slots are."""


class Lanes:
    """The lanes of a step. `values` are for each parameter the places of its tensors before the step, by name."""

    def __init__(self, tensors: Sequence[torch.Tensor], values: Sequence[Mapping[str, int]]) -> None:
        self._tensors = tensors
        self._refs: dict[int, Ref] = {}
        self._lane_of: dict[int, int] = {}
        """By storage."""
        self.lanes = [Lane() for _ in values]
        for i, names in enumerate(values):
            for place in names.values():
                self._join(place, i)

    def ref(self, place: int) -> Ref:
        """How recordings name a tensor."""
        if place not in self._refs:
            t = self._tensors[place]
            storage = storage_id(torch.Tensor.untyped_storage(t))  # not its own, which computes the values first
            self._refs[place] = Ref(storage, int(t.storage_offset()), tuple(t.shape), tuple(t.stride()))
        return self._refs[place]

    def refs(self, names: Mapping[str, int]) -> dict[str, Ref]:
        """How they name several."""
        return {name: self.ref(place) for name, place in names.items()}

    def _join(self, place: int, lane: int) -> None:
        if self._lane_of.setdefault(self.ref(place).storage, lane) != lane:
            raise Uncompiled("two parameters, gradients or states share memory")

    def add(self, calls: Sequence[Call]) -> None:
        """Adds the calls of a step to their lanes; Uncompiled if one is about several parameters."""
        at = 0
        for call in calls:
            if call.func is set_data:  # what is at which place is known by now
                continue
            count = _numbers_in([*call.args, *call.kwargs.values()])
            for part, numbers, outs in self._parts(call, range(at, at + count)):
                self._add(part, numbers, outs)
            at += count

    def _parts(self, call: Call, numbers: Sequence[int]) -> Iterator[tuple[Call, list[int], list[int]]]:
        outs = list(range(call.first, call.first + (0 if call.rule.kind == "writes" else len(call.makes or [None]))))
        if not str(schema(call.func).name).startswith("aten::_foreach_"):
            yield call, list(numbers), outs
            return
        lists = [x for x in call.args if type(x) is list]
        left, args = iter(numbers), []
        for x in call.args:
            args.append(
                [next(left) if y is NUMBER else None for y in x]
                if type(x) is list
                else next(left)
                if x is NUMBER
                else None
            )
        for i in range(len(lists[0])):
            one = [[x[i]] if type(x) is list else x for x in call.args]
            own = [n[i] if type(n) is list else n for n in args]
            yield call._replace(args=one), [n for n in own if n is not None], outs[i : i + 1]

    def _add(self, call: Call, numbers: list[int], outs: list[int]) -> None:
        lanes = {
            self._lane_of.get(self.ref(place).storage) for place in _places_in([*call.args, *call.kwargs.values()])
        }
        if len(lanes) != 1 or None in lanes:
            raise Uncompiled(f"{call.func} computes with tensors of several parameters")
        (number,) = lanes
        lane = self.lanes[number]  # type: ignore[index]  # it is not None
        for place in outs:
            self._join(place, number)  # type: ignore[arg-type]
        left = iter(numbers)
        args = tuple(self._argument(x, lane, left) for x in call.args)
        kwargs = tuple((k, self._argument(x, lane, left)) for k, x in call.kwargs.items())
        refs = tuple(map(self.ref, outs)) if call.rule.kind != "writes" else _written(args)
        lane.recorder.ops.append(Op(call.func, args, kwargs, refs))

    def _argument(self, x: Any, lane: Lane, numbers: Iterator[int]) -> Any:
        if type(x) is int:
            return self.ref(x)
        if x is NUMBER:
            lane.numbers.append(next(numbers))
            return Slot(len(lane.numbers) - 1)
        return tuple(self._argument(y, lane, numbers) for y in x) if type(x) is list else x[1]


def _written(args: tuple[Any, ...]) -> tuple[Ref | None, ...]:
    return (None,) if not isinstance(args[0], Ref) else args[:1]


def _numbers_in(written: Sequence[Any]) -> int:
    return sum(_numbers_in(x) if type(x) is list else x is NUMBER for x in written)


def _places_in(written: Sequence[Any]) -> Iterator[int]:
    for x in written:
        if type(x) is int:
            yield x
        elif type(x) is list:
            yield from _places_in(x)
