"""The tensors of a step by their places: the numbers that they have in the order in which the step meets them.

Two steps that do the same give the same places to what they do it with, whatever the objects are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from operator import add, ge, gt
from typing import TYPE_CHECKING

import torch

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate

if TYPE_CHECKING:
    from collage_neuron.trace.calls import Call
    from collage_neuron.trace.structure_guard import CallSequence


SHARED = (
    "something else than a state keeps a value, a gradient or a state that was replaced: keep each in "
    "optimizer.state[p], under a name of its own, or a copy (clone())"
)
"""Why a step is computed that leaves values which nobody could compute later."""


class Exchanged(UnsupportedUpdate):
    """Code has exchanged what is inside tensors, and nobody saw when."""


class TensorPlaces:
    """The tensors of one step.

    The `values` with which it begins are the first ones. `same` are the places of further objects, by their ids.
    `spare` are placeholders that an earlier step has made, and nobody holds any more: the calls of this one will make
    them once more. `inside` says what is inside the first values, as far as it is known.
    """

    def __init__(
        self,
        values: Sequence[torch.Tensor],
        same: Mapping[int, int],
        spare: Sequence[torch.Tensor],
        inside: Sequence[int],
        course: CallSequence,
    ) -> None:
        self.tensors = [*values, *spare]
        """By their places."""
        self.first, self.has_spare = len(values), bool(spare)
        self._course = course
        self._same = dict(same)
        """Places by ids: also of tensors that have been given other data."""
        self.inside = [*inside, *map(torch_privates.inside, self.tensors[len(inside) :])]
        """What is inside them, so that it is known if somebody exchanges that."""
        self._users = list(map(torch_privates.users, values))
        self._own = dict[int, int]()
        """The first places of tensors that have been given other data."""
        self._by_id: dict[int, int] = {}
        self.of = self._by_id.get
        """The place of a tensor by its id, or None."""
        self._find()

    def _find(self) -> None:
        self._by_id.clear()
        self._by_id.update(zip(map(id, self.tensors), range(len(self.tensors)), strict=True))
        self._by_id.update(self._same)

    def of_each(self, objects: Iterable[object]) -> list[int | None]:
        """The places of objects; None for what does not wait."""
        return list(map(self.of, map(id, objects)))

    def next(self) -> int:
        """The place of what the next call makes."""
        if not self.has_spare:
            return len(self.tensors)
        expected = self._course.expected
        if expected is None:  # there may be more placeholders than the calls so far have made
            return self.first + sum(len(call.makes or ()) for call in self._course.calls)
        return expected.first

    def note(self, call: Call, numbers: Sequence[float]) -> None:
        """Adds a call with its numbers."""
        if not self._course.goes_on(call, numbers) and self.has_spare:  # what calls make is new from here on
            self.has_spare = False
            del self.tensors[call.first :], self.inside[call.first :]
            self._find()

    def put(self, first: int, made: Sequence[torch.Tensor]) -> None:
        """Gives tensors the places from `first` on."""
        end = first + len(made)
        # Spare placeholders that nobody was given are replaced: their ids may be used again.
        for t in self.tensors[first:end] if self.has_spare else ():
            self._by_id.pop(id(t), None)
        self.tensors[first:end] = made
        self.inside[first:end] = map(torch_privates.inside, made)
        self._by_id.update(zip(map(id, made), range(first, end), strict=True))

    def replace(self, first: int, others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same with others that have inside what those had which are there; these."""
        replaced = self.tensors[first : first + len(others)]
        for t in replaced:
            del self._by_id[id(t)]
        self.tensors[first : first + len(others)] = others
        self._by_id.update(zip(map(id, others), range(first, first + len(others)), strict=True))
        return replaced

    def is_given(self, t: torch.Tensor, there: int, new: int) -> int:
        """A tensor at a place is given the data of what is at a `new` one, which is its place from now on.

        Returns the place that it had first.
        """
        own = self._own.setdefault(id(t), there)
        self._by_id[id(t)] = self._same[id(t)] = new
        return own

    def let_go(self, first: int) -> list[torch.Tensor]:
        """The placeholders from a place on, which this has no more."""
        made = self.tensors[first:]
        del self.tensors[first:]
        return made

    def clear(self) -> None:
        """Lets go of all tensors; further objects keep their places."""
        self.tensors.clear()
        self._find()

    def check_inside(self, places: Sequence[int] | None = None) -> None:
        """Raises Exchanged if something else is inside tensors than what was there: all, or those at `places`."""
        if places is None:
            tensors, expected = self.tensors, self.inside
        else:
            tensors, expected = [self.tensors[i] for i in places], [self.inside[i] for i in places]
        if list(map(torch_privates.inside, tensors)) != expected:
            raise Exchanged("step() exchanges what is inside tensors (torch.utils.swap_tensors)")

    def are_shared(self, first: int, users: Sequence[int]) -> bool:
        """Returns True if something in C++ has a placeholder, or something that is not known one from a place on.

        `users` are those that the calls make (`users_of`).
        """
        self.check_inside()
        now = list(map(torch_privates.users, self.tensors))
        # Both the count before and that which calls add have the tensor itself once.
        more = any(map(ge, now, map(add, users, self._users)))
        return (
            more or any(map(gt, now[first:], users[first:])) or any(map(weakref.getweakrefcount, self.tensors[first:]))
        )
