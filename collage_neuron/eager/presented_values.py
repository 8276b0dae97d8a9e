"""The values that are presented, and copies of them while they wait."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.eager.codec import Conversions, Lookup, decoding, encoding, role
from collage_neuron.eager.memory import without_graph
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import Format
from collage_neuron.passes.backends.protocol import Backend
from collage_neuron.states import step_inventory
from collage_neuron.states.sharding import local

Groups = Mapping[int, tuple[Any, dict[str, Any]]]
"""Parameters and their groups, by the id of the parameter."""

SMALL = 4096
"""Values of up to so many elements are copied together."""


@dataclass(eq=False)
class Value:
    """A parameter or a state in words, and the fp32 tensor that it presents."""

    p: torch.Tensor
    name: str
    owner: torch.Tensor
    """The object: the parameter, or what is in its state."""
    fmt: Format
    further: list[torch.Tensor]
    """All words but the first one."""
    shell: torch.Tensor
    """The fp32 tensor; while it is presented, the first word."""
    keys: tuple[str, ...]
    """Those of the further words."""

    def words(self, is_presented: bool = False) -> list[torch.Tensor]:
        """All words, which are used without gradients."""
        first = without_graph(self.shell) if is_presented else self.owner
        return [local(first), *map(local, self.further)]


class Alike(NamedTuple):
    """Values of one format on one device, which are converted together; none is empty."""

    backend: Backend
    format: Format
    role: str
    has_shards: bool
    values: list[Value]
    kept: tuple[dict[Any, Any], dict[Any, Any]]
    """What backends have found out about their tensors, as long as these are laid out as in the last step."""

    def tensors(self) -> tuple[Sequence[Sequence[torch.Tensor]], Sequence[Sequence[torch.Tensor]]]:
        """The words, and what they present."""
        if self.has_shards:
            return [v.words() for v in self.values], [[local(v.shell)] for v in self.values]
        return [(v.owner, *v.further) for v in self.values], [(v.shell,) for v in self.values]

    def decode(self, filling: Conversions, is_as_before: bool) -> None:
        """Fills what they present."""
        words, shells = self.tensors()
        update, kept = decoding(self.format, self.role), self.kept[0] if is_as_before else None
        filling.add(self.backend, update, (), words, shells, kept)

    def encode(self, storing: Conversions, params: Container[int]) -> None:
        """Stores what those of `params`, by their ids, present, as laid out in each step; not if the format draws."""
        own = self._replace(values=[v for v in self.values if id(v.p) in params])
        if own.values and self.format.draw is None:
            (words, shells), kept = own.tensors(), self.kept[1] if len(own.values) == len(self.values) else None
            storing.add(self.backend, encoding(self.format, self.role), (), shells, words, kept)


def by_conversion(values: Iterable[Value], groups: Groups, has_shards: bool) -> list[Alike]:
    """Values, but for empty ones, by what they are converted with."""
    lookup, found = Lookup(), dict[Any, Alike]()
    for v in values:
        if local(v.owner).numel():
            backend, of = lookup.of(groups[id(v.p)][1], v.p)[1], role(v.name)
            key = id(backend), id(v.fmt), of, v.owner.device
            found.setdefault(key, Alike(backend, v.fmt, of, has_shards, [], ({}, {}))).values.append(v)
    return list(found.values())


def part_of(value: Value, x: torch.Tensor) -> torch.Tensor:
    """The part of the fp32 tensor that lies where `x` lies in the first word."""
    shell, owner = local(value.shell).detach(), local(value.owner.detach())
    first = x.storage_offset() - owner.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
    span = sum((n - 1) * s for n, s in zip(owner.shape, owner.stride(), strict=True))
    if x.dtype != owner.dtype or shell.stride() != owner.stride() or first < 0 or last > span:
        raise UnsupportedUpdate(
            f"the optimizer holds a tensor of shape {list(x.shape)} that lies in the memory of "
            f"{'a parameter' if value.name == 'param' else f'the state {value.name!r}'} and beyond it, or in another "
            "type, and during a step that value has fp32 memory of its own: hold a clone(), or the parameter itself; "
            "nothing was updated"
        )
    return shell.as_strided(x.shape, x.stride(), shell.storage_offset() + first)


class Copies:
    """Copies of values that wait, in one step after the other.

    Small ones are copied together, all parameters or all states, when the first of them is asked for: code that asks
    for one asks for more.
    """

    def __init__(self) -> None:
        self._values: dict[int, Value] = {}
        """By the ids of their objects."""
        self._gradients: Mapping[int, torch.Tensor] = {}
        self._groups: Groups = {}
        self._laid: Any = None
        self._made: dict[int, torch.Tensor] = {}
        """Those that nobody has taken yet, by the ids of the values' objects."""
        self._roles: set[str] = set()
        """Those of the values of which all small ones were copied."""
        self._last: tuple[list[Value], list[Alike]] = [], []
        """The values of which copies were made together last, and which of them are alike."""

    @property
    def has_begun(self) -> bool:
        """Returns True in a step that has asked for some."""
        return bool(self._values)

    def begin(self, values: Iterable[Value], gradients: Mapping[int, torch.Tensor], groups: Groups, laid: Any) -> None:
        """A step asks for the first one. Gradients are by ids too; what backends know of layouts is `laid`."""
        self._values, self._gradients = {id(v.owner): v for v in values}, gradients
        self._groups, self._laid = groups, laid

    def end(self) -> None:
        """Lets go of the objects of the step."""
        self._values, self._gradients, self._groups, self._laid = {}, {}, {}, None
        self._made, self._roles = {}, set()

    def of(self, owner: torch.Tensor) -> torch.Tensor:
        """A copy of the value that an object has, or its part; another one each time."""
        if (gradient := self._gradients.get(id(owner))) is not None:
            return local(gradient).to(torch.float32, copy=True)
        value = self._values[id(owner)]
        if role(value.name) not in self._roles and owner.numel() <= SMALL:
            self._roles.add(role(value.name))
            alike = (v for v in self._values.values() if role(v.name) == role(value.name))
            self._made |= self._decoded(v for v in alike if v.owner.numel() <= SMALL)
        return self._made.pop(id(owner)) if id(owner) in self._made else self._decoded([value])[id(owner)]

    def fill(self, owners: Sequence[torch.Tensor], into: Sequence[torch.Tensor]) -> None:
        """Copies the values of several objects, none of which is a DTensor, into fp32 tensors."""
        asked = dict(zip(map(id, owners), into, strict=True))
        grads = [(asked.pop(key), grad) for key, grad in self._gradients.items() if key in asked]
        torch_privates.copy_each([x for x, _ in grads], [grad for _, grad in grads])
        self._decode(asked)

    def _decoded(self, values: Iterable[Value]) -> dict[int, torch.Tensor]:
        part = torch_privates.part
        found = {id(v.owner): torch.empty_like(part(v.shell), dtype=torch.float32) for v in values}
        self._decode(found)
        return found

    def _decode(self, into: Mapping[int, torch.Tensor]) -> None:
        # The objects have placeholders inside: the first word is in the shell.
        asked, filling, part = [self._values[key] for key in into], Conversions(self._laid), torch_privates.part
        before, found = self._last
        if not step_inventory.are_same(before, asked):
            has_shards = any(part(v.shell) is not v.shell for v in asked)
            self._last = asked, found = asked, by_conversion(asked, self._groups, has_shards)
        lookup = Lookup()
        for each in found:
            backend = lookup.of(self._groups[id(each.values[0].p)][1], each.values[0].p)[1]
            words, given = [(v.shell, *v.further) for v in each.values], [(into[id(v.owner)],) for v in each.values]
            if each.has_shards:
                words = [(*map(part, own),) for own in words]
            filling.add(backend, decoding(each.format, each.role), (), words, given)
        filling.run()
