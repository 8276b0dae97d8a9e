"""Storage formats: how an optimizer's fp32 value is stored in memory between two steps.

A format lists its components and converts them to and from fp32, in the operations of `collage_neuron.numerics.eft`,
so that the same definition encodes tensors and writes graphs. A new format is a new
entry of `FORMATS`; no pass knows any of them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from collage_neuron.numerics.eft import Value, narrow, round_to, split, split_capped, stochastic_round, widen
from collage_neuron.numerics.storage import StorageType, storage_named

BY_ELEMENT = "elementwise"
"""The only layout so far."""


@dataclass(frozen=True)
class Component:
    """One stored tensor of a format: its key is the state's name plus `suffix`; parameter-shaped."""

    suffix: str
    storage: str
    """The name of its storage type."""
    layout: str = BY_ELEMENT
    """The layout of its words: `elementwise` is one word per element of the parameter, in the same order.

    A component that a block of elements shares will name its block here. A backend without support for a layout says
    so in `supports`.
    """

    @cached_property
    def type(self) -> StorageType:
        """The storage type of one word."""
        return storage_named(self.storage)

    @property
    def bytes(self) -> int:
        """Bytes per element."""
        return self.type.bytes


@dataclass(frozen=True)
class Format:
    """A storage format: components, and the conversions between them and one fp32 value."""

    name: str
    components: tuple[Component, ...]
    encode: Callable[[Value], Sequence[Value]]
    """fp32 value -> components (narrowed)."""
    decode: Callable[[Sequence[Value]], Value]
    """components -> fp32 value."""
    draw: Callable[[Value, Value], Sequence[Value]] | None = None
    """fp32 value, int32 uniform in 0 to 65535 -> components: the stochastic store of an update, or None.

    `encode` then is only for single conversions, and rounds to nearest.
    """
    encode_state: Callable[[Value], Sequence[Value]] | None = None
    """The same for a state, where that differs: a state may be infinite while the weights are not."""

    @property
    def bytes(self) -> int:
        """Bytes per parameter."""
        return sum(component.bytes for component in self.components)

    def reads_as(self, other: Format) -> bool:
        """Returns True if components have the same meaning in both formats, so that no conversion is needed."""
        return self is other or (self.components == other.components and self.decode is other.decode)

    def store(self, name: str, x: Value, random: Callable[[], Value]) -> Sequence[Value]:
        """The components that an update stores for the fp32 value `name`; `random` gives random bits if needed."""
        return self.encoder(name)(x) if self.draw is None else self.draw(x, random())

    def encoder(self, name: str) -> Callable[[Value], Sequence[Value]]:
        """The function that converts the fp32 value of `name`, a state or `param`, to components."""
        return self.encode if name == "param" or self.encode_state is None else self.encode_state

    def keys(self, name: str) -> list[str]:
        """State keys of the components of the state called `name`."""
        return [name + component.suffix for component in self.components]


def _encode_bf16(x: Value) -> Sequence[Value]:
    return [narrow(round_to(x, "bf16"), "bf16")]


def _draw_bf16(x: Value, random: Value) -> Sequence[Value]:
    return [narrow(stochastic_round(x, random), "bf16")]


def _encode_bf16x2(x: Value) -> Sequence[Value]:
    # Two roundings and no third: where x - hi rounds to exactly half an ulp of an odd hi, hi is not round(hi + lo), and
    # storing the same sum again would split it the other way. Renormalizing would cost three more operations a step.
    return [narrow(word, "bf16") for word in split(x)]


def _encode_bf16x2_state(x: Value) -> Sequence[Value]:
    return [narrow(word, "bf16") for word in split_capped(x)]


def _encode_master(x: Value) -> Sequence[Value]:
    return [narrow(round_to(x, "bf16"), "bf16"), narrow(x, "fp32")]


def _decode_master(components: Sequence[Value]) -> Value:
    # Weights that were loaded into the model since the last step count, not the master they replaced.
    word, master = map(widen, components)
    return torch.where(round_to(master, "bf16") == word, master, word)


def _decode_word(components: Sequence[Value]) -> Value:
    return widen(components[0])


_WORD = Component("", "bf16")

FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        Format("bf16", (_WORD,), _encode_bf16, _decode_word),
        Format("bf16_stochastic", (_WORD,), _encode_bf16, _decode_word, _draw_bf16),
        Format(
            "bf16x2",
            (_WORD, Component("_lo", "bf16")),
            _encode_bf16x2,
            lambda c: widen(c[0]) + widen(c[1]),
            encode_state=_encode_bf16x2_state,
        ),
        Format("fp32", (Component("", "fp32"),), lambda x: [narrow(x, "fp32")], _decode_word),
        # What mixed precision calls a master weight: the fp32 value is kept beside its rounding to bf16.
        Format("bf16+fp32", (_WORD, Component("_master", "fp32")), _encode_master, _decode_master),
    )
}
"""Every known storage format by name."""


def format_named(name: object) -> Format:
    """The format called `name`; ValueError with the known names otherwise."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"unknown storage format {name!r}; known formats: {', '.join(FORMATS)}")
    return FORMATS[name]
