"""What a step can change beside the values that are presented: dictionaries, and tensors that are kept as they were made.

Both are restored if the step raises. Other Python objects stay as the step left them, as in plain torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Set
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.passes.capture.visits import are_atoms

SMALL = 4096
"""Up to so many elements a tensor is copied before a step; of larger ones it is only noticed that they were written."""

OURS = "_collage_"
"""How the names of attributes begin that are not the optimizer's own."""


class Held:
    """The attributes, groups and states of an optimizer as they are now, and the tensors in them but for `known` ones."""

    def __init__(self, optimizer: Optimizer, params: Iterable[torch.Tensor], known: Set[int]) -> None:
        self._optimizer, self._state, self._groups = optimizer, optimizer.state, optimizer.param_groups
        states = [s for s in optimizer.state.values() if type(s) is dict]
        of_params = [vars(p) for p in params if vars(p)]
        self._dicts = [(x, dict(x)) for x in (*optimizer.param_groups, *states, *of_params)]
        self._attributes = {k: v for k, v in vars(optimizer).items() if not k.startswith(OURS)}
        self._members, self._order = dict(optimizer.state), list(optimizer.param_groups)
        tensors = {id(x): x for x in held_tensors(optimizer, of_params) if id(x) not in known and not x.is_meta}
        self.tensors = list(tensors.values())
        self._small = [(x, x.detach().clone()) for x in self.tensors if x.numel() <= SMALL]
        self._large = [(x, torch_privates.version(x)) for x in self.tensors if x.numel() > SMALL]

    def has_lost(self) -> bool:
        """Returns True if a large tensor was written: what it was is not known any more."""
        return any(torch_privates.version(x) != version for x, version in self._large)

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the dictionaries, in place, and the small tensors that have changed."""
        own = vars(self._optimizer)
        for gone in [k for k in own if k not in self._attributes and not k.startswith(OURS)]:
            del own[gone]
        own.update(self._attributes)
        self._groups[:] = self._order
        pairs = [*self._dicts, (self._state, self._members)]
        for x, before in pairs:
            x.clear()
            x.update(before)
        for t, value in self._small:
            if t.shape == value.shape and not torch.equal(bits(t), bits(value)):
                t.copy_(value)


def held_tensors(optimizer: Optimizer, of_params: Iterable[dict[str, Any]] = ()) -> Iterator[torch.Tensor]:
    """The tensors in attributes, groups and states, and in attributes of parameters."""
    own = {k: v for k, v in vars(optimizer).items() if k != "param_groups" and not k.startswith(OURS)}
    return tensors_in([own, optimizer.param_groups, *of_params])


_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)


def tensors_in(x: Any, path: tuple[int, ...] = ()) -> Iterator[torch.Tensor]:
    """The tensors in nested containers: of dictionaries, what is not a key."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, _CONTAINERS) and id(x) not in path:
        inner = dict.values(x) if isinstance(x, dict) else x.values() if isinstance(x, MappingProxyType) else x
        for y in () if are_atoms(inner) else inner:
            yield from tensors_in(y, (*path, id(x)))


def bits(x: torch.Tensor) -> torch.Tensor:
    """To compare NaN with itself."""
    return x.detach().contiguous().reshape(-1).view(torch.uint8)
