"""Marks: how parameters with low words, and states with such words, were when those words were found to be theirs.

The further words of parameters are noted with them: code may clear the states in which they are (`restore_words`).

After a step of which the structure is known (`step_inventory`), the marks are lists, one for all parameters, which the
next step compares as a whole. They become dictionaries, by parameter, where something asks for those or has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.states.sharding import ORDINARY, local

Mark = tuple[int, int]

STEPPED = "stepped"


def mark_of(p: torch.Tensor) -> Mark:
    """Changes when `p` is written: in place by its version, exchanged (`p.data = ...`) by its address."""
    shard = p if type(p) in ORDINARY else local(p)
    # A parameter of another type may be a wrapper without an address; on XLA the address is always 0.
    return torch_privates.version(shard), shard.data_ptr() if type(shard) in ORDINARY else 0


class Split(NamedTuple):
    """Where in a step's parameters and states there are low words; it depends on the structure alone."""

    owners: Sequence[torch.Tensor]
    """The parameters with states."""
    params: Sequence[torch.Tensor]
    """Those with low words."""
    highs: Sequence[tuple[int, str]]
    """The states with low words: the place of the owner, and the name."""
    words: Sequence[tuple[int, str]]
    """The further words of the owners themselves: the place, and the key."""


class _Columns(NamedTuple):
    """The marks of all that is in a `Split`, in its order."""

    split: Split
    versions: list[int]
    addresses: list[int]
    highs: list[torch.Tensor]
    high_versions: list[int]
    words: list[torch.Tensor]


def _columns(split: Split, highs: list[torch.Tensor], words: list[torch.Tensor]) -> _Columns:
    """The marks as they are now; all tensors are of torch's own types."""
    versions, addresses = map(torch_privates.version, split.params), map(torch.Tensor.data_ptr, split.params)
    return _Columns(split, [*versions], [*addresses], highs, [*map(torch_privates.version, highs)], words)


class Marks:
    """The marks of an optimizer's parameters and states; those made by copy.copy share them."""

    def __init__(self) -> None:
        self._params: dict[torch.Tensor, tuple[str, Mark | None]] = {}
        self._states: dict[torch.Tensor, dict[str, tuple[torch.Tensor, int]]] = {}
        self._words: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._all: _Columns | None = None

    @property
    def params(self) -> dict[torch.Tensor, tuple[str, Mark | None]]:
        """Parameters with low words: what happened to them last, and their mark then."""
        self._spread()
        return self._params

    @property
    def states(self) -> dict[torch.Tensor, dict[str, tuple[torch.Tensor, int]]]:
        """The first words of states with low words, and their versions when those were found to be theirs."""
        self._spread()
        return self._states

    @property
    def words(self) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
        """The further words of each parameter, the tensors that its state holds too, by key."""
        self._spread()
        return self._words

    def held(self) -> set[int]:
        """The ids of the states that this refers to."""
        found = [high for names in self._states.values() for high, _ in names.values()]
        return set(map(id, found if self._all is None else self._all.highs))

    def mark_all(self, split: Split, highs: list[torch.Tensor], words: list[torch.Tensor]) -> None:
        """Marks everything in `split`, of which `highs` are the states, and nothing else, after a step."""
        for of_param in (self._params, self._states, self._words):
            of_param.clear()
        self._all = _columns(split, highs, words)

    def are_those_of(self, split: Split, highs: list[torch.Tensor]) -> bool:
        """Returns True if `mark_all` would mark the same again: nothing was written or exchanged."""
        noted = self._all
        if noted is None or noted.split is not split:
            return False
        now = _columns(split, highs, [])
        # Tensors are compared by identity: == of lists would compare the values of those that differ.
        same = [*map(id, now.highs)] == [*map(id, noted.highs)]
        return same and (now[1:3], now.high_versions) == (noted[1:3], noted.high_versions)

    def _spread(self) -> None:
        """Makes dictionaries of lists."""
        if self._all is None:
            return
        noted, self._all = self._all, None
        marks = zip(noted.versions, noted.addresses, strict=True)
        self._params.update({p: (STEPPED, mark) for p, mark in zip(noted.split.params, marks, strict=True)})
        owners = noted.split.owners
        for (i, name), high, version in zip(noted.split.highs, noted.highs, noted.high_versions, strict=True):
            self._states.setdefault(owners[i], {})[name] = high, version
        for (i, key), word in zip(noted.split.words, noted.words, strict=True):
            self._words.setdefault(owners[i], {})[key] = word
