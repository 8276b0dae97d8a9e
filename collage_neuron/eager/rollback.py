"""What a step can change beside the values that are presented: containers, and tensors that are kept as they were made.

Both are restored if the step raises. Other Python objects stay as the step left them, as in plain torch.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, compress, islice
from types import MappingProxyType
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager.memory import are_alone, bits, is_alone
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states import step_inventory
from collage_neuron.states.inner_optimizers import Inner
from collage_neuron.states.sharding import ORDINARY, local, some_bits, version
from collage_neuron.states.shared_memory import is_given_back
from collage_neuron.states.store import States
from collage_neuron.trace.reachable_code import ATOMS

SMALL = 4096
"""Up to so many elements a tensor is copied before a step; of larger ones it is only noticed that they were written."""

OURS = "_collage_"
"""How the names of attributes begin that are not the optimizer's own."""


class Held:
    """The attributes, groups and states of an optimizer, and of those `inside` it, as they are now.

    Containers and tensors in them are among these, but for tensors with `known` ids.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        params: Iterable[torch.Tensor],
        known: set[int],
        inside: Iterable[Inner] = (),
        seen: step_inventory.Seen | None = None,
    ) -> None:
        """Looks at all; with what the step has `seen`, it is known which values of states are tensors."""
        own = [vars(x) for x in (optimizer, *(each.optimizer for each in inside))]
        self._attributes = [(x, {k: v for k, v in x.items() if not k.startswith(OURS)}) for x in own]
        states = {} if seen is None else dict(zip(map(id, seen.states), seen.states, strict=True))
        containers, tensors = dict[int, Any](states), dict[int, torch.Tensor]()  # states are not looked into
        if seen is not None:
            _collect_states(seen, known, containers, tensors)
        for _, attributes in self._attributes:
            _collect(attributes, containers, tensors)
            containers.pop(id(attributes))
        for holder in filter(None, map(torch_privates.attributes, filter(vars, params))):
            _collect(holder, containers, tensors)
        others = islice(containers.values(), len(states), None)
        self._containers = [(x, _COPY.get(type(x), _copied)(x)) for x in others]
        self._containers += zip(states.values(), map(dict.copy, states.values()), strict=True)
        self.tensors = [x for key, x in tensors.items() if key not in known and not (x.is_meta or _is_given_back(x))]
        self._before, self._words = Before(self.tensors), Before(())

    @property
    def has_large(self) -> bool:
        """Returns True if there are tensors that could not be restored."""
        return bool(self._before.large)

    def has_lost(self) -> bool:
        """Returns True if a large tensor was written: what it was is not known any more."""
        return self._before.has_lost() or self._words.has_lost()

    def watch(self, words: Sequence[torch.Tensor]) -> None:
        """Notes what is in those of `words` whose memory something else has too: a step is not to write there."""
        seen = [] if are_alone(words) else [local(x).detach() for x in words if not is_alone(x)]
        # On XLA to look at one would wait for it. Elsewhere versions are also those of what lies beside it in a buffer.
        self._words = Before(seen, SMALL, _sums) if all(x.is_cpu for x in seen) else Before(seen, 0, version)

    def check_words(self) -> None:
        """Raises UnsupportedUpdate if the step has written to one of them, by a name that has no fp32 value."""
        # What the optimizer holds of that memory presents fp32 too. What only somebody else holds of it does not.
        if self._words.has_lost() or self._words.restore():
            raise UnsupportedUpdate(
                "step() writes to the memory of a parameter or a state by a name that has no fp32 value (p.data, or a "
                "view, that another object holds); write to it itself, or let an attribute of the optimizer hold that"
            )

    def restore(self) -> None:
        """Restores attributes and containers, in place, and the small tensors that have changed."""
        # In place: code may hold the dictionaries and lists themselves.
        for own, attributes in self._attributes:
            for gone in [k for k in own if k not in attributes and not k.startswith(OURS)]:
                del own[gone]
            own.update(attributes)
        for x, before in self._containers:
            kind: Any = _kind(x)
            kind.clear(x)
            if kind is not OrderedDict:
                (kind.extend if kind in (list, deque) else kind.update)(x, before)
            for k, v in before if kind is OrderedDict else ():  # its `update` calls methods of the user's
                kind.__setitem__(x, k, v)
        self._before.restore()
        self._words.restore()


class Before:
    """What tensors were: all of those of up to `most` elements; of others signs that show that they were written."""

    def __init__(
        self, tensors: Sequence[torch.Tensor], most: int = SMALL, signs: Callable[[torch.Tensor], object] | None = None
    ) -> None:
        self._small, self._signs = _copies([x for x in tensors if x.numel() <= most]), signs or _version_and_bits
        self.large = [(x, self._signs(x)) for x in tensors if x.numel() > most]

    def has_lost(self) -> bool:
        """Returns True if a large tensor was written: what it was is not known any more."""
        return any(self._signs(x) != before for x, before in self.large)

    @torch.no_grad()
    def restore(self) -> bool:
        """Restores the small tensors that have changed, if there are any."""
        some = [copies for copies in self._small if not _are_unchanged(*copies)]
        pairs = chain.from_iterable(zip(copies[0], _apart(*copies), strict=True) for copies in some)
        changed = [_is_restored(t, value) for t, value in pairs]
        return any(changed)


def _are_unchanged(tensors: list[torch.Tensor], shapes: list[torch.Size], values: torch.Tensor) -> bool:
    """Returns True if all are as they were; False is no answer. In one operation, since there may be hundreds."""
    if len(tensors) == 1 or [(x.shape, x.dtype) for x in tensors] != [(shape, values.dtype) for shape in shapes]:
        return False
    return torch.equal(bits(torch_privates.flattened(tensors)), bits(values))


def _version_and_bits(x: torch.Tensor) -> tuple[int, bytes]:
    return version(x), some_bits(x)


def _sums(x: torch.Tensor) -> bytes:
    """The sums of the bits of each row."""
    numbers = x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])
    return numbers.sum(-1, dtype=torch.int64).numpy().tobytes()


def _is_restored(t: torch.Tensor, value: torch.Tensor) -> bool:
    """Returns True if `t` had changed."""
    own, before = torch_privates.part(t), torch_privates.part(value)
    if own.shape == before.shape and own.dtype == before.dtype:
        if torch.equal(bits(own), bits(before)):
            return False
        own.copy_(before)
    else:
        own.data = before.clone()
    return True


def _is_given_back(x: torch.Tensor) -> bool:
    return bool(x.dim()) and is_given_back(x)  # a number is no shard


def _copies(tensors: list[torch.Tensor]) -> list[_Copies]:
    """Copies of tensors; those of one type are copied together, since an optimizer may have a thousand."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for x in tensors:
        is_usual = type(x) in ORDINARY and x.is_cpu and x.layout is torch.strided and not x.is_quantized
        alike.setdefault(x.dtype if is_usual else id(x), []).append(x)
    joined = torch_privates.flattened
    # Of one alone that may be a view. They are taken apart when they are needed: most steps do not raise.
    return [
        (same, [x.shape for x in same], (joined(same) if len(same) > 1 else same[0].clone()).detach())
        for same in alike.values()
    ]


def _apart(tensors: list[torch.Tensor], shapes: list[torch.Size], values: torch.Tensor) -> list[torch.Tensor]:
    """The copy of each tensor."""
    if len(tensors) == 1:
        return [values]
    return [x.view(shape) for x, shape in zip(values.split([*map(math.prod, shapes)]), shapes, strict=True)]


_Copies = tuple[list[torch.Tensor], list[torch.Size], torch.Tensor]
"""Tensors of one type, their shapes, and their elements, one after the other."""

_LEAVES = ATOMS | ORDINARY

_CONTAINERS = (dict, list, tuple, set, frozenset, deque, MappingProxyType)
_CHANGING = (OrderedDict, dict, list, set, deque)

# What `_copied` makes of these classes, at a tenth of its cost.
_COPY: dict[type, Callable[[Any], Any]] = {dict: dict, States: dict, list: list, set: set}


def _kind(x: Any) -> Any:
    return next(kind for kind in _CHANGING if isinstance(x, kind))


def _copied(x: Any) -> Any:
    """What is in a container, without the methods of a class of the user's: they may do more than that."""
    kind = _kind(x)
    return [*kind.items(x)] if kind is OrderedDict else [*kind.__iter__(x)] if kind is deque else kind.copy(x)


def _collect(x: Any, containers: dict[int, Any], tensors: dict[int, torch.Tensor]) -> None:
    """Adds to `containers` those that can change, and to `tensors` the tensors in them, by their ids."""
    waiting = [x]
    while waiting:  # a call for each of a thousand states takes three times as long
        x = waiting.pop()
        if isinstance(x, torch.Tensor):
            tensors[id(x)] = x
        elif isinstance(x, _CONTAINERS) and id(x) not in containers:
            if isinstance(x, _CHANGING):
                containers[id(x)] = x
            inner = _inner(x)
            if ORDINARY.issuperset(map(type, inner)):  # parameters, most often: all at once
                tensors.update(zip(map(id, inner), inner, strict=True))
            elif not ATOMS.issuperset(map(type, inner)):
                waiting += [y for y in inner if id(y) not in containers]


def _collect_states(
    seen: step_inventory.Seen, known: set[int], containers: dict[int, Any], tensors: dict[int, torch.Tensor]
) -> None:
    """The same of what is in states: most have nothing but tensors with `known` ids, and numbers."""
    if not known.issuperset(seen.ids):
        found = compress(_values(seen), seen.structure.are_tensors)
        tensors.update((id(x), x) for x in found if id(x) not in known)
    if not seen.structure.once("are leaves", lambda: _LEAVES.issuperset(map(type, _values(seen)))):
        _collect(tuple(x for x in _values(seen) if type(x) not in _LEAVES), containers, tensors)


def _values(seen: step_inventory.Seen) -> Iterator[Any]:
    return chain.from_iterable(map(dict.values, seen.states))


def _inner(x: Any) -> Any:
    return dict.values(x) if isinstance(x, dict) else x.values() if isinstance(x, MappingProxyType) else x


def tensors_in(x: Any) -> Iterator[torch.Tensor]:
    """The tensors in nested containers, each once: of dictionaries, what is not a key."""
    tensors: dict[int, torch.Tensor] = {}
    _collect(x, {}, tensors)
    yield from tensors.values()
