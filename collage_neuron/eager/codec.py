"""Decodes and encodes whole tensors with the backends: each conversion is an update in explicit-rounding form.

So a conversion is one pass over memory where the backend has one, draws the random bits of a stochastic format as every
update does, and is exact wherever the backend is.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.eager.memory import without_graph
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.eft import narrow
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.passes.backends.protocol import Backend, Launch, check_supported
from collage_neuron.passes.backends.registry import choose
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.rewrite.graph_writer import Writer
from collage_neuron.passes.rewrite.round_and_store import Randomness
from collage_neuron.settings import Settings
from collage_neuron.states import step_inventory, word_encoding
from collage_neuron.states.sharding import local
from collage_neuron.states.shared_memory import same_part

VALUE = "value"
"""The key of the fp32 tensor; those of the words are the keys of `param` in a format."""


@lru_cache(256)
def decoding(fmt: Format, name: str) -> Update:
    """The update that reads the words of the value called `name` in a format, and writes the fp32 value."""
    keys = fmt.keys("param")
    writer = Writer(keys)
    body = writer.finish([narrow(fmt.decoder(name)([writer.inputs[key] for key in keys]), "fp32")])
    # Not verified: the words, whose layout backends have to know, are read and not stored.
    formats = {"param": fmt, VALUE: FORMATS["fp32"]}
    return Update.elementwise(body, tuple(keys), (VALUE,), writer.scalars, formats)


@lru_cache(256)
def encoding(fmt: Format, name: str, draws: bool = True) -> Update:
    """The update that reads the fp32 value called `name`, and writes the words of a format, as `words.settled` does.

    A stochastic format rounds to nearest if it is not to draw.
    """
    writer = Writer([VALUE])
    value, encode = writer.inputs[VALUE], fmt.encoder(name)
    if fmt.draw is not None and draws:
        stored = fmt.store(name, value, Randomness(writer.scalar, lambda: writer.index))
    else:
        stored = encode(fmt.decode(encode(value)))  # twice: a tie that is stored again would be split otherwise
    body, keys = writer.finish(list(stored)), tuple(fmt.keys("param"))
    return Update.elementwise(body, (VALUE,), keys, writer.scalars, {"param": fmt}, draws=writer.draws)


def role(name: str) -> str:
    """The name by which updates here tell parameters from states, so that all states share an update."""
    return name if name == "param" else "state"


def converter(choice: str, device: torch.device) -> Backend:
    """The backend that converts for parameters on `device` whose group has this choice; ValueError as of `choose`."""
    return choose(choice, device).converter(device)


class Lookup:
    """Settings of groups and the backends that convert, each looked up once."""

    def __init__(self) -> None:
        self._settings: dict[int, Settings] = {}
        self._backends: dict[tuple[str, torch.device], Backend] = {}

    def of(self, group: Mapping[str, Any], p: torch.Tensor) -> tuple[Settings, Backend]:
        """The settings of a group, and the backend for one of its parameters."""
        settings = self._settings.get(id(group))
        if settings is None:
            settings = self._settings[id(group)] = Settings.of(group)
        key = settings.backend, p.device
        if key not in self._backends:
            self._backends[key] = converter(*key)
        return settings, self._backends[key]


def check_codec(backend: Backend, formats: Sequence[Format], device: torch.device) -> None:
    """Raises UnsupportedUpdate if the backend cannot convert to the formats and back."""
    for fmt in formats:
        for name in ("param", "state"):
            check_supported(backend, decoding(fmt, name), device)
            check_supported(backend, encoding(fmt, name), device)


class LaidOut(NamedTuple):
    """What a backend has found out about tensors of these types, shapes and strides."""

    tensors: int
    guard: Callable[..., bool]
    kept: dict[Any, Any]


class Conversions:
    """Conversions that run together: those of one update are one launch, unless each has random bits of its own."""

    def __init__(self, laid: dict[Update, LaidOut] | None = None) -> None:
        """Begins without conversions; `laid` has what backends know of earlier ones, and is added to."""
        self._launches: dict[Backend, dict[tuple[Update, torch.device], list[Launch]]] = {}
        self._laid = laid

    def __bool__(self) -> bool:
        return bool(self._launches)

    def decode(
        self, backend: Backend, fmt: Format, stored: Sequence[torch.Tensor], into: torch.Tensor, name: str = "state"
    ) -> None:
        """Writes the value of words, called `name`, to the fp32 tensor `into`."""
        self.add(backend, decoding(fmt, role(name)), (), [stored], [[into]])

    def encode(
        self,
        backend: Backend,
        fmt: Format,
        name: str,
        value: torch.Tensor,
        into: Sequence[torch.Tensor],
        drawing: Sequence[float] | None = None,
    ) -> None:
        """Writes the words of the fp32 tensor `value` to `into`.

        `drawing` are the numbers on which random bits depend (`passes/rewrite/round_and_store.py`), None for none.
        """
        self.add(backend, encoding(fmt, role(name), drawing is not None), drawing or (), [[value]], [into])

    def add(
        self,
        backend: Backend,
        update: Update,
        drawing: Sequence[float],
        reads: Sequence[Sequence[torch.Tensor]],
        writes: Sequence[Sequence[torch.Tensor]],
        kept: dict[Any, Any] | None = None,
    ) -> None:
        """Adds conversions of tensors on one device; all of them have elements, or none has.

        `kept` is what backends have found out about them, if it is all there is of their update (`Launch.kept`).
        """
        if not reads[0][0].numel():
            return
        launches = self._launches.setdefault(backend, {}).setdefault((update, reads[0][0].device), [])
        if not launches or update.draws:  # random bits depend on numbers of a launch: each tensor has its own
            vector = _numbers(update, tuple(drawing) if update.draws else ())
            launches.append(Launch(update, vector, [], [], kept=kept))
        rows: Any = launches[-1]
        rows.reads.extend(reads)
        rows.writes.extend(writes)

    def run(self) -> None:
        """Runs them, in any order; those of tensors without elements have nothing to do."""
        for backend, by_update in self._launches.items():
            backend.run([self._with_layout(launch) for alike in by_update.values() for launch in alike])
        self._launches.clear()

    def _with_layout(self, launch: Launch) -> Launch:
        """The launch, with what a backend has found out about tensors that are laid out alike."""
        if self._laid is None or launch.update.draws or launch.kept is not None:
            return launch
        tensors = [*chain.from_iterable(launch.reads), *chain.from_iterable(launch.writes)]
        # The guard is one call for all tensors: properties that are read one by one cost six times as much.
        found = self._laid.get(launch.update)
        if found is None or found.tensors != len(tensors) or not found.guard(*tensors):
            found = self._laid[launch.update] = LaidOut(len(tensors), torch_privates.guard(tensors), {})
        return launch._replace(kept=found.kept)


def decoded(values: Sequence[tuple[Format, Sequence[torch.Tensor]]]) -> list[torch.Tensor]:
    """The fp32 values of parameters, new tensors, of their formats and words on the CPU: in one pass over memory."""
    filling, found = Conversions(), [torch.empty_like(words[0], dtype=torch.float32) for _, words in values]
    for (fmt, words), into in zip(values, found, strict=True):
        filling.decode(converter("auto", into.device), fmt, words, into, "param")
    filling.run()
    return found


@lru_cache(256)  # of an update that draws other ones each time, and of all others the same
def _numbers(update: Update, drawing: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(update.scalars.run((), drawing), dtype=torch.float32, device="cpu")


def empty_words(fmt: Format, p: torch.Tensor) -> list[torch.Tensor]:
    """Memory for the words of a value that is shaped and laid out like `p`."""
    return [
        torch.empty_like(p, dtype=c.type.dtype)
        if c.block is None
        else torch.empty(word_encoding.shape_of(c, p.shape), dtype=c.type.dtype, device=p.device)
        for c in fmt.components
    ]


# --- values that are presented ----------------------------------------------------------------------------------------

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

    def part_at(self, x: torch.Tensor) -> torch.Tensor:
        """The part of the fp32 tensor that lies where `x` lies in the first word.

        Raises:
            UnsupportedUpdate: `x` is more than a part of that.
        """
        shell, owner = local(self.shell).detach(), local(self.owner.detach())
        part = same_part(x, owner, shell)
        if x.dtype != owner.dtype or part is None:
            raise UnsupportedUpdate(
                f"the optimizer holds a tensor of shape {list(x.shape)} that lies in the memory of "
                f"{'a parameter' if self.name == 'param' else f'the state {self.name!r}'} and beyond it, or in another "
                "type, and during a step that value has fp32 memory of its own: hold a clone(), or the parameter "
                "itself; nothing was updated"
            )
        return part


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
        self._conversions: Callable[[], Conversions] = Conversions
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

    def begin(
        self,
        values: Iterable[Value],
        gradients: Mapping[int, torch.Tensor],
        groups: Groups,
        conversions: Callable[[], Conversions],
    ) -> None:
        """A step asks for the first one. Gradients are by ids too."""
        self._values, self._gradients = {id(v.owner): v for v in values}, gradients
        self._groups, self._conversions = groups, conversions

    def end(self) -> None:
        """Lets go of the objects of the step."""
        self._values, self._gradients, self._groups, self._conversions = {}, {}, {}, Conversions
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
        asked, filling, part = [self._values[key] for key in into], self._conversions(), torch_privates.part
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
