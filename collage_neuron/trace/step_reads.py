"""What a step reads of values that wait: each is computed by the calls that it depends on; the rest goes on waiting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.trace.adopted_tensors import copied
from collage_neuron.trace.materialize import Cones, Values
from collage_neuron.trace.read_ahead import Beginning

if TYPE_CHECKING:
    from collage_neuron.trace.adopted_tensors import Adopted
    from collage_neuron.trace.structure_guard import CallSequence
    from collage_neuron.trace.tensor_places import TensorPlaces

_NUMBER = torch.ops.aten._local_scalar_dense.default


class Sources(NamedTuple):
    """Where a step has the values from that it begins with."""

    copy_of: Callable[[torch.Tensor], torch.Tensor]
    """A copy of the value of a tensor."""
    copy_into: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], None] | None = None
    """Copies values into tensors, if those that will be read may be computed ahead."""
    reading: Callable[[list[tuple[int, int]]], AbstractContextManager[object]] = nullcontext
    """The context in which values are read before updates are launched."""
    decide: Callable[[], None] = lambda: None
    """Called before anything is computed: it may end the step."""

    def reads(
        self, places: TensorPlaces, course: CallSequence, adopted: Adopted, earlier: Sequence[Cones]
    ) -> StepReads:
        """The values that a step reads of these."""
        return StepReads(places, course, adopted, earlier, self)


class StepReads:
    """The values that one step reads."""

    def __init__(
        self,
        places: TensorPlaces,
        course: CallSequence,
        adopted: Adopted,
        earlier: Sequence[Cones],
        sources: Sources,
    ) -> None:
        self._places, self._course, self._adopted = places, course, adopted
        self._earlier, self._sources, self._values = list(earlier), sources, Values()
        on_xla = bool(places.tensors) and places.tensors[0].device.type == "xla"
        self.computing = torch_privates.unobserved_on_xla if on_xla else torch_privates.unobserved
        """A context in which torch computes, and nothing else."""

    @property
    def cones(self) -> Cones:
        """The cones of the values of this step, at its end."""
        calls = self._course.calls
        return self._so_far if self._so_far.calls is calls else Cones(calls)  # the one it has followed may have gone on

    @property
    def _so_far(self) -> Cones:
        """The cones of the values so far: of an earlier step, if that has made the same calls."""
        calls = self._course.whole
        found = next((each for each in self._earlier if each.calls is calls), None)
        if found is None:
            found = Cones(calls)
            self._earlier.append(found)
        return found

    def value(self, place: int, before: int | None = None, is_number: bool = False) -> torch.Tensor:
        """The value that a tensor has now, or had after so many calls, for reading; a number may be on the host.

        Raises:
            Uncompiled: it cannot be computed alone.
        """
        before = self._course.at if before is None else before
        found = self._values.ahead(self._course.whole, (place, before), self._course.numbers, is_number)
        if found is not None:
            return found
        self._sources.decide()
        device = self._places.tensors[0].device
        began = Beginning(self._copied, self._copied_into if self._sources.copy_into else None, self._like, device)
        with self.computing():
            return self._values.value(self._so_far, (place, before), self._course.numbers, began, is_number)

    def told(self, func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """What an operation tells of values."""
        with self.computing():
            places, is_number = self._places.of_each(args), func is _NUMBER
            given = (x if i is None else self.value(i, None, is_number) for i, x in zip(places, args, strict=True))
            return func(*given, **kwargs)

    def add_numbers(self, reads: Iterable[tuple[int, int]]) -> None:
        """Adds the values of tensors of one element to the numbers: their places, and after how many calls."""
        asked = list(reads)
        with torch_privates.unobserved(), self._sources.reading(asked) if asked else nullcontext():
            for place, before in asked:
                self._course.numbers.append(float(self.value(place, before, is_number=True)))

    def _copied(self, place: int) -> torch.Tensor:
        self._places.check_inside([place])
        others = self._adopted.others
        return copied(others[place]) if place in others else self._sources.copy_of(self._places.tensors[place])

    def _like(self, place: int) -> torch.Tensor | None:
        is_there = place < self._places.first or place in self._adopted.others
        return self._places.tensors[place] if is_there else None

    def _copied_into(self, places: Sequence[int], into: Sequence[torch.Tensor]) -> bool:
        if self._sources.copy_into is None or any(self._like(i) is None for i in places):
            return False
        self._places.check_inside(places)
        others, given = self._adopted.others, dict(zip(places, into, strict=True))
        self._adopted.copy_into({i: given.pop(i) for i in places if i in others})
        self._sources.copy_into([self._places.tensors[i] for i in given], [*given.values()])
        return True
