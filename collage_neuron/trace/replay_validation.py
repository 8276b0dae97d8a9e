"""Validates steps: what is launched, against the step's own calls, run once more by torch in fp32 on a sample.

The calls are those that the user's code has made. Nothing that made updates of them has a part in it: neither lanes nor
graphs, passes or backends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.passes.functionalize.recorded_ops import ALL_REDUCE, WAIT
from collage_neuron.states.sharding import local
from collage_neuron.torch_privates import schema
from collage_neuron.trace import adopted_tensors
from collage_neuron.trace.calls import arguments, memories_of
from collage_neuron.trace.placeholders import set_data
from collage_neuron.trace.step_kinds import StepKind
from collage_neuron.validation import sample
from collage_neuron.validation.perturbed_replay import InFp32, NoSample
from collage_neuron.validation.sample import SEEN, Plan, Sample, block, indices

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job

aten = torch.ops.aten


class Place(int):
    """The place of a tensor among arguments."""


class _Places(dict[int, Any]):
    """Stands for the tensors of a step: each is its place, or, if its shape and number are here, a new one of these."""

    def __getitem__(self, place: int) -> Place | Tensor:
        if place not in self:
            return Place(place)
        shape, value = super().__getitem__(place)
        return torch.full(shape, value, dtype=torch.float32, device="cpu")  # a call may write it


class Bound(NamedTuple):
    """A call with its numbers."""

    func: Any
    args: list[Any]
    kwargs: dict[str, Any]
    returns: list[int]
    """The places of what it returns."""
    is_view: bool


@dataclass(frozen=True)
class Calls:
    """The calls of one step, with its numbers."""

    kind: StepKind
    numbers: Sequence[float]
    params: Sequence[Tensor] | None
    """Those of the step; None if the calls are about one parameter, and are the same for all."""

    def plan(self, job: Job, p: torch.nn.Parameter, flat: Tensor) -> Plan | None:
        """The elements of `p` to take: those in `flat`, if shapes do not matter; None if there is no sample."""
        part = self._about(p)
        if part is None:
            return None
        asked = part.asked
        if self._is_flat(job, part):
            return Plan(flat, job.recording)
        own = local(p)
        if "stride" in asked and not own.is_contiguous():  # as a sample is
            return None
        if own.numel() <= SEEN:
            return Plan(indices(own.numel()).reshape(own.shape), job.recording)
        return Plan(block(own.shape), job.recording) if asked == {"dim"} and own.dim() else None

    def states(
        self, job: Job, p: torch.nn.Parameter, param: Tensor, names: list[str], g: torch.Generator
    ) -> Mapping[str, Any]:
        """States after a few such steps, from positive numbers."""
        shapes = {k: job.recording.captured.shape_of(k, param.shape) for k in names}
        values = {"param": param, **{k: sample.gradient(shape, g).abs() for k, shape in shapes.items()}}
        part = self._about(p)
        for _ in range(sample.WARM if part is not None else 0):
            assert part is not None
            try:
                values = part.run({**values, "grad": sample.gradient(param.shape, g)})
            except NoSample:
                break
        return values

    def in_fp32(self, p: torch.nn.Parameter, taken: Sample, g: torch.Generator) -> InFp32:
        """What runs the calls about `p`."""
        part = self._about(p)
        assert part is not None
        by_element = taken.plan.index.dim() == 1 and self._is_flat(taken.job, part)
        return InFp32(taken, g, part.before, part.run, by_element and not taken.job.recording.captured.reduces)

    def _is_flat(self, job: Job, part: Part) -> bool:
        """Returns True if the shape of the parameter does not matter."""
        return not part.asked and job.recording.captured.seen_as is None and not job.update.by_rows

    def _about(self, p: Tensor) -> Part | None:
        i = 0 if self.params is None else next(i for i, q in enumerate(self.params) if q is p)
        return part_of(self.kind, i, self._bound)

    @cached_property
    def _bound(self) -> list[Bound]:
        numbers, found, places, reads = iter(self.numbers), list[Bound](), _Places(), self._reads()
        for i, call in enumerate(self.kind.calls):
            while reads and reads[-1][0] <= i:
                _, place, number = reads.pop()
                places[place] = number
            args = arguments(call.args, places, numbers)
            named = dict(zip(call.kwargs, arguments(list(call.kwargs.values()), places, numbers), strict=True))
            func = call.func
            if func in (ALL_REDUCE, WAIT):  # a sample has no parts in other processes
                func, args, named = aten.clone.default, args[:1], {}
            found.append(Bound(func, args, named, list(call.returns), call.rule.kind == "view"))
        return found

    def _reads(self) -> list[tuple[int, int, tuple[Any, float]]]:
        """The numbers of several parameters: after how many calls, the last first, at which place, shape and number."""
        reads = self.kind.reads
        values = self.numbers[len(self.numbers) - len(reads) :]
        shapes = {
            place: x.shape for call in self.kind.calls for place, x in zip(call.returns, call.makes or (), strict=True)
        }
        each = sorted(zip(reads, values, strict=True), key=lambda x: x[0].before, reverse=True)
        return [(before, place, (shapes[place], value)) for (place, before), value in each]


def of_recording(job: Job) -> Calls:
    """The calls of a recorded step."""
    return Calls(job.recording.kind, job.recording.numbers, None)


@dataclass(frozen=True)
class Part:
    """The calls about one parameter, and the places of its values before and after them, by name."""

    calls: list[Bound]
    before: Mapping[str, int]
    after: Mapping[str, int]

    @cached_property
    def asked(self) -> set[str]:
        """What the calls say about shapes: "dim", where they name dimensions or exchange them, and "size"."""
        return {kind for call in self.calls for kind in _asked(call)}

    def run(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the calls leave of `values`, to which they write."""
        tensors = {place: values[name] for name, place in self.before.items() if name in values}

        def given(x: Any) -> Any:
            if type(x) is Place:
                return tensors[x] if x in tensors else _any_number(x)
            if isinstance(x, torch.device):
                return torch.device("cpu")
            return list(map(given, x)) if isinstance(x, list) else x

        try:
            for call in self.calls:
                out = call.func(*map(given, call.args), **{k: given(x) for k, x in call.kwargs.items()})
                tensors.update(zip(call.returns, out if isinstance(out, (list, tuple)) else [out], strict=False))
        except Exception as error:  # a sample may have another shape
            raise NoSample from error
        return {name: tensors[place] for name, place in self.after.items() if place in tensors}  # no update has others


def _any_number(place: int) -> Tensor:
    """A number in the place of one of another parameter."""
    # It must not matter which; it follows from the place alone, so that all copies of a sample have the same.
    return torch.tensor(1.0 + 0.618 * place % 1.0, dtype=torch.float32, device="cpu")


def _asked(call: Bound) -> Iterator[str]:
    if call.is_view and call.func not in _WHOLE:
        yield "dim"
    given = dict(zip((a.name for a in schema(call.func).arguments), call.args, strict=False)) | call.kwargs
    integers = [a.name for a in schema(call.func).arguments if str(a.real_type) in _INTEGERS]
    for name in integers:
        if given.get(name) not in (None, []):  # a number's shape says nothing
            yield "dim" if name.startswith("dim") else "stride" if name == "stride" else "size"


_WHOLE = aten.detach.default, aten.alias.default  # views that say nothing of the shape
_INTEGERS = {"int", "List[int]", "Optional[int]", "Optional[List[int]]"}


def part_of(kind: StepKind, i: int, calls: Sequence[Bound]) -> Part | None:
    """The calls, or parts of them, that are about a parameter; None if they need values of another one too."""
    before, after = kind.named[i], kind.after[i]
    memories = _Memories(kind, set(before.values()))
    found = []
    for call in chain.from_iterable(map(_pieces, calls)):
        if memories.are_enough(call):
            found.append(call)
        elif memories.loses(call):
            return None
    return Part(found, before, after) if all(map(memories.has, after.values())) else None


def _pieces(call: Bound) -> Iterator[Bound]:
    """A call; of an operation on lists one for each element of these."""
    # After `t.data = x` another place is the tensor's, and a state that is met is there before: neither computes.
    if call.func in (set_data, adopted_tensors.state):
        return
    if not str(schema(call.func).name).startswith("aten::_foreach_"):
        yield call
        return
    for i in range(next(len(x) for x in call.args if isinstance(x, list))):  # a number may come first (`pow`)
        args = [[x[i]] if isinstance(x, list) else x for x in call.args]
        yield call._replace(args=args, returns=call.returns[i : i + 1])


def _places(given: Iterable[Any]) -> Iterator[int]:
    for x in given:
        if type(x) is Place:
            yield x
        elif isinstance(x, list):
            yield from _places(x)


class _Memories:
    """The memories that depend on nothing but one parameter, its gradient and its states."""

    def __init__(self, kind: StepKind, places: Iterable[int]) -> None:
        known = [0, *chain.from_iterable(named.values() for named in kind.named)]
        count = 1 + max(known + [call.returns[-1] for call in kind.calls if call.returns])
        self._of = memories_of(kind.calls, count)
        self._given = {self._of[place] for place in places}
        self._known = set(self._given)
        self._loose: set[int] = set()
        """What is made of numbers alone, and was not written yet: it is about whichever parameter writes it."""

    def has(self, place: int) -> bool:
        return self._of[place] in self._known

    def are_enough(self, call: Bound) -> bool:
        """Returns True if a call needs nothing else: what it returns or writes does not, either."""
        places = list(_places([*call.args, *call.kwargs.values()]))
        own = [self.has(place) for place in places if self._of[place] not in self._loose]
        if not (any if call.func in _JOINS else all)(own):
            return False
        written = {self._of[place] for place in call.returns or _places(call.args[:1])}
        (self._known if own else self._loose).update(written)
        self._loose -= self._known
        return True

    def loses(self, call: Bound) -> bool:
        """What a call writes that needs others depends on these too; True if the parameter itself, or a state, does."""
        written = set() if call.returns else {self._of[place] for place in _places(call.args[:1])}
        self._known -= written - self._given
        self._loose -= written
        return not written.isdisjoint(self._given)


# What may put numbers of several parameters into one tensor (`torch.stack(norms)`): those of the others may be any.
_JOINS = (aten.stack.default,)
