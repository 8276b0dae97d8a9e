"""Tensors that a step on copies shares with the optimizer, since they are not stored in words: undone if it fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

import torch

from collage_neuron import torch_privates
from collage_neuron.passes.capture.visits import are_atoms

SMALL = 4096
"""Up to so many elements a tensor is copied before a step; of larger ones it is only noticed that they were written."""


class Kept:
    """The tensors in nested containers as they are now, other than those with `known` ids."""

    def __init__(self, holders: Iterable[Any], known: Iterable[int]) -> None:
        left = set(known)
        tensors = {id(x): x for holder in holders for x in tensors_in(holder) if id(x) not in left and not x.is_meta}
        self._small = [(x, x.detach().clone()) for x in tensors.values() if x.numel() <= SMALL]
        self._large = [(x, torch_privates.version(x)) for x in tensors.values() if x.numel() > SMALL]

    def has_lost(self) -> bool:
        """Returns True if a large tensor was written: what it was is not known any more."""
        return any(torch_privates.version(x) != version for x, version in self._large)

    @torch.no_grad()
    def restore(self) -> None:
        """Writes back the small ones that have changed."""
        for x, before in self._small:
            if x.shape == before.shape and not torch.equal(_bytes(x), _bytes(before)):
                x.copy_(before)


_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)


def tensors_in(x: Any, path: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """The tensors in nested containers: of dictionaries, what is not a key."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, _CONTAINERS) and id(x) not in path:
        inner = dict.values(x) if isinstance(x, dict) else x.values() if isinstance(x, MappingProxyType) else x
        for y in () if are_atoms(inner) else inner:
            yield from tensors_in(y, (*path, id(x)))


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """To compare NaN with itself."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
