"""Decodes and encodes whole tensors with the backends: each conversion is an update in explicit-rounding form.

So a conversion is one pass over memory where the backend has one, draws the random bits of a stochastic format as every
update does, and is exact wherever the backend is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.numerics.eft import narrow
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.passes.backends.protocol import Backend, Launch, check_supported
from collage_neuron.passes.backends.registry import choose
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.rewrite.graph_writer import Writer
from collage_neuron.passes.rewrite.round_and_store import Randomness
from collage_neuron.settings import Settings
from collage_neuron.states import word_encoding

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
