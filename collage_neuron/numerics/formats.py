"""Storage formats: how an optimizer's fp32 value is stored in memory between two steps.

A format lists its components and converts them to and from fp32, in the operations of `collage_neuron.numerics.eft`,
so that the same definition encodes tensors and writes graphs. A new format is a new
entry of `FORMATS`; no pass knows any of them by name. What a new one must be is checked when it is entered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from collage_neuron.numerics.block_formats import BLOCK, ROOTS, RootWords
from collage_neuron.numerics.eft import (
    ON_BITS,
    OPERATIONS,
    STORAGE_TYPES,
    StorageType,
    Value,
    half_a_place,
    is_rounded,
    narrow,
    round_to,
    split,
    split_capped,
    stochastic_round,
    storage_named,
    widen,
)
from collage_neuron.numerics.integer_words import INT8, INT16, IntegerWord
from collage_neuron.numerics.registration import Table

BY_ELEMENT = "elementwise"
"""The layout of one word for each element."""

MASTER = "_master"
"""The suffix of a word that is the fp32 value itself, so that it is read without its format."""


FORMATS_KEPT = "collage_formats"
"""Key of the formats of the states of a group, where their keys do not tell them (`states/format_record.py`)."""


@dataclass(frozen=True)
class Component:
    """One stored tensor of a format: its key is the state's name plus `suffix`; parameter-shaped."""

    suffix: str
    storage: str
    """The name of its storage type."""
    layout: str = BY_ELEMENT
    """The layout of its words: `elementwise` is one word per element of the parameter, in the same order.

    `block:128` is one word for 128 consecutive elements of a row, the last dimension of the parameter (of its local
    shard): blocks never cross a row, and the last one of a row may be shorter. Conversions and graphs have one word for
    each element all the same, and give each element of a block the same one. A backend without support for a layout
    says so in `supports`.
    """

    @cached_property
    def type(self) -> StorageType:
        """The storage type of one word."""
        return storage_named(self.storage)

    @cached_property
    def block(self) -> int | None:
        """The number of elements that share a word; None if each has its own."""
        return int(self.layout.removeprefix("block:")) if self.layout.startswith("block:") else None

    @property
    def bytes(self) -> int:
        """Bytes per word."""
        return self.type.bytes


@dataclass(frozen=True, eq=False)  # compared and hashed as the object that it is: what is cached by it asks each step
class Format:
    """A storage format: components, and the conversions between them and one fp32 value."""

    name: str
    components: tuple[Component, ...]
    encode: Callable[[Value], Sequence[Value]]
    """fp32 value -> components (narrowed)."""
    decode: Callable[[Sequence[Value]], Value]
    """components -> fp32 value."""
    draw: Callable[..., Sequence[Value]] | None = None
    """fp32 value, int32 uniform in 0 to 65535 -> components: the stochastic store of an update, or None.

    Formats of blocks take another such number, for elements between two powers of two; without it, the same.

    `encode` then is only for single conversions, and rounds to nearest.
    """
    encode_state: Callable[[Value], Sequence[Value]] | None = None
    """The same for a state, where that differs: a state may be infinite while the weights are not."""
    decode_param: Callable[[Sequence[Value]], Value] | None = None
    """The same for the parameter, whose first word may have been written since through `p.data`, where nobody notices:
    what `decode` gives for words that were stored together, and for others within half of the first word's last place
    of that. None: words that a write made stale are looked for before each step."""
    error: Callable[[torch.Tensor], torch.Tensor] | None = None
    """The largest error of storing values of such magnitudes, in their blocks; None if it is a part of each value."""
    signed: bool = True
    """False if it has no negative numbers: for states that cannot become negative."""

    @property
    def bytes(self) -> int:
        """Bytes per parameter; words that blocks share (0.03 bytes) are not counted."""
        return sum(component.bytes for component in self.components if not component.block)

    @cached_property
    def is_coded(self) -> bool:
        """Returns True if the first word is a code, to be read with words that blocks share, and not a number."""
        return any(component.block for component in self.components)

    def reads_as(self, other: Format) -> bool:
        """Returns True if components have the same meaning in both formats, so that no conversion is needed."""
        return self is other or (self.components == other.components and self.decode is other.decode)

    def store(self, name: str, x: Value, random: Callable[[], Value]) -> Sequence[Value]:
        """The components that an update stores for the fp32 value `name`; `random` gives random bits if needed."""
        if self.draw is None:
            return self.encoder(name)(x)
        # The second number is for elements between two powers of two of their block.
        return self.draw(x, random(), random()) if self.is_coded else self.draw(x, random())

    def encoder(self, name: str) -> Callable[[Value], Sequence[Value]]:
        """The function that converts the fp32 value of `name`, a state or `param`, to components."""
        return self.encode if name == "param" or self.encode_state is None else self.encode_state

    def decoder(self, name: str) -> Callable[[Sequence[Value]], Value]:
        """The function that converts components of `name`, a state or `param`, to its fp32 value."""
        return self.decode if name != "param" or self.decode_param is None else self.decode_param

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


def _decode_bf16x2_param(components: Sequence[Value]) -> Value:
    hi, lo = map(widen, components)
    return hi + half_a_place(hi, lo)


def _encode_master(x: Value) -> Sequence[Value]:
    return [narrow(round_to(x, "bf16"), "bf16"), narrow(x, "fp32")]


def _decode_master(components: Sequence[Value]) -> Value:
    # Weights that were loaded into the model since the last step count, not the master they replaced.
    word, master = map(widen, components)
    return torch.where(round_to(master, "bf16") == word, master, word)


def _decode_word(components: Sequence[Value]) -> Value:
    return widen(components[0])


_WORD = Component("", "bf16")
_MASTER = Component(MASTER, "fp32")  # what mixed precision calls a master weight
_SCALE = Component("_scale", "fp32", f"block:{BLOCK}")


def _counted(words: IntegerWord) -> Format:
    components = _WORD, Component("_lo", words.storage)
    return Format(f"bf16+{words.storage}", components, words.encode, words.decode, decode_param=words.decode)


def _coded(name: str, words: RootWords) -> Format:
    """A format of codes, and a power of two that a block shares."""
    code = Component("", "int16" if words.storage == "uint16" else words.storage)
    if words.is_nearest:
        return Format(name, (code, _SCALE), words.encode, words.decode, error=words.error)
    return Format(name, (code, _SCALE), words.encode, words.decode, words.draw, error=words.error, signed=words.signed)


BUILT_IN: Mapping[str, Format] = MappingProxyType(
    {
        f.name: f
        for f in (
            Format("bf16", (_WORD,), _encode_bf16, _decode_word),
            Format("bf16_stochastic", (_WORD,), _encode_bf16, _decode_word, _draw_bf16),
            Format(
                "bf16x2",
                (_WORD, Component("_lo", "bf16")),
                _encode_bf16x2,
                lambda c: widen(c[0]) + widen(c[1]),
                encode_state=lambda x: [narrow(word, "bf16") for word in split_capped(x)],
                decode_param=_decode_bf16x2_param,
            ),
            Format("fp32", (Component("", "fp32"),), lambda x: [narrow(x, "fp32")], _decode_word),
            Format("bf16+fp32", (_WORD, _MASTER), _encode_master, _decode_master, decode_param=_decode_master),
            # Formats that are told by their record alone come after those with the same keys (`told_by_keys`).
            *map(_counted, (INT16, INT8)),
            *(_coded(name, words) for name, words in ROOTS.items()),
        )
    }
)
"""The formats that are known in every process."""


# --- formats of users -----------------------------------------------------------------------------------------------


def _check(name: str, fmt: Format) -> None:
    """Raises for an entry of `FORMATS` that could not be used."""
    if not isinstance(fmt, Format):
        raise TypeError(f"FORMATS[{name!r}] would be a {type(fmt).__name__}; register a collage_neuron.Format")
    if name != fmt.name:
        raise ValueError(f"FORMATS[{name!r}] would be a format called {fmt.name!r}: register it under its own name")
    for reason in (*_unusable_words(fmt), *_unusable_suffixes(fmt)):
        raise ValueError(f"the format {name!r} cannot be registered: {reason}")
    for conversion in ("encode", "encode_state", "draw"):
        if getattr(fmt, conversion) is not None:
            _check_conversion(fmt, conversion)


def _unusable_words(fmt: Format) -> Iterator[str]:
    """Reasons why the components cannot be used."""
    unknown = [c.storage for c in fmt.components if c.storage not in STORAGE_TYPES]
    if unknown:
        yield f"{unknown[0]!r} is not a storage type; known types: {', '.join(STORAGE_TYPES)}"
    elif not fmt.components:
        yield "it has no components"
    else:
        first, is_code = fmt.components[0], any(c.block for c in fmt.components)
        if first.suffix or first.block or not (first.type.is_floating or is_code):
            yield (
                f"its first component is {first}: the first word has no suffix, is one for each element, and is a "
                "floating-point number, as the update of an optimizer reads and writes states, or a code beside a word "
                "that blocks share"
            )


def _unusable_suffixes(fmt: Format) -> Iterator[str]:
    """Reasons why the keys cannot be used."""
    suffixes = [c.suffix for c in fmt.components]
    yield from (f"two components have the suffix {x!r}" for x in suffixes[1:] if suffixes.count(x) > 1)
    masters = [c.storage for c in fmt.components if c.suffix == MASTER]
    if masters and masters[0] != "fp32":
        yield f"a word with the suffix {MASTER!r} is the fp32 value itself, and here it is {masters[0]}"


NUMBERS = (0.0, *(m * 2.0**e for e in range(-100, 101, 20) for m in (1.0, 1.1, 1.7)))
"""Numbers on which a new format is tried, with both signs if it has signs. States begin at zero."""


def _check_conversion(fmt: Format, conversion: str) -> None:
    """Raises ValueError unless the conversion makes the words of the components, and `decode` reads them."""
    try:
        reasons = [*_wrong(fmt, conversion)] or [*_not_in_graphs(fmt, conversion)]
    except Exception as error:
        raise ValueError(
            f"the format {fmt.name!r} cannot be registered: its {conversion}, or decode, raises for fp32 numbers: "
            f"{type(error).__name__}: {error}"
        ) from error
    if reasons:
        raise ValueError(f"the format {fmt.name!r} cannot be registered: {reasons[0]}")


def _decoders(fmt: Format) -> list[Callable[[Sequence[Value]], Value]]:
    return [fmt.decode] if fmt.decode_param is None else [fmt.decode, fmt.decode_param]


def _draws(fmt: Format, conversion: str) -> int:
    # A code takes a second random number, for elements between two powers of two of their block.
    return 0 if conversion != "draw" else 1 + fmt.is_coded


def _not_in_graphs(fmt: Format, conversion: str) -> Iterator[str]:
    """What a graph cannot have, and methods of tensors: backends need not know them, and may skip their roundings."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    x, *random = (fx.Proxy(graph.placeholder(f"x{i}"), tracer) for i in range(1 + _draws(fmt, conversion)))
    try:
        words = tuple(getattr(fmt, conversion)(x, *random))
        for decode in _decoders(fmt):
            decode(words)
    except Exception as error:
        yield f"its {conversion}, or decode, cannot be written as a graph: {type(error).__name__}: {error}"
    for node in graph.nodes:
        if any(isinstance(x, torch.Tensor) for x in node.args):
            yield f"its {conversion}, or decode, has a tensor of its own: write it as a number"
        elif node.op == "call_method" or (node.op == "call_function" and node.target not in OPERATIONS | ON_BITS):
            name = f"the method {node.target}" if node.op == "call_method" else getattr(node.target, "__name__", "?")
            yield (
                f"its {conversion}, or decode, calls {name}(), which may round unseen: use operators, functions of "
                "collage_neuron.extend (narrow, widen, round_to, split), or torch.where, abs, sign, maximum and minimum"
            )
        elif node.target is narrow and not is_rounded(node.args[0], storage_named(node.args[1])):
            w = node.args[1]
            yield f"its {conversion} stores a {w} that was not rounded: write narrow(round_to(x, {w!r}), {w!r})"


def _wrong(fmt: Format, conversion: str) -> Iterator[str]:
    """Reasons why the words and values that are made of some numbers cannot be right."""
    x = torch.tensor([*NUMBERS, *(-n for n in NUMBERS if fmt.signed)], dtype=torch.float32, device="cpu")
    random = [torch.zeros(len(x), dtype=torch.int32, device="cpu")] * _draws(fmt, conversion)
    words: Sequence[Any] = getattr(fmt, conversion)(x, *random)
    dtypes, wanted = [getattr(word, "dtype", type(word)) for word in words], [c.type.dtype for c in fmt.components]
    if dtypes != wanted:
        yield f"its {conversion} returns words of {dtypes}, and its components are {wanted}"
        return
    values: list[Any] = [decode(words) for decode in _decoders(fmt)]
    if any(getattr(value, "dtype", None) != torch.float32 or value.shape != x.shape for value in values):
        yield "its decode does not return one fp32 number for each"
    elif conversion == "encode" and not _is_value(fmt, words, x):
        yield f"a word with the suffix {MASTER!r} is the fp32 value itself, and here it has another value"
    elif len(values) > 1 and not torch.equal(*values):
        yield "its decode_param reads other values than its decode from words that were stored together"
    elif conversion != "draw" and not fmt.is_coded:
        yield from _errors(x, values[0], fmt.decode(getattr(fmt, conversion)(values[0])))


def _errors(x: torch.Tensor, once: torch.Tensor, again: torch.Tensor) -> Iterator[str]:
    """Values that come back further off than bf16 alone would round them, or that change when they are stored again."""
    for i in (~((once - x).abs() <= 2.0**-8 * x.abs())).nonzero()[:1].flatten().tolist():
        yield f"{x[i]:.6g} comes back as {once[i]:.6g}, which is further off than bf16 alone would round it"
    for i in (again != once).nonzero()[:1].flatten().tolist():
        yield f"{once[i]:.9g}, a value that it has stored, comes back as {again[i]:.9g} when it is stored again"


def reads_alike(fmt: Format) -> bool:
    """Returns True if the first word of a parameter, which the model reads, is its value but for bf16's rounding."""
    x = torch.tensor([*NUMBERS, *(-n for n in NUMBERS)], dtype=torch.float32, device="cpu")
    return bool(((widen(fmt.encode(x)[0]) - x).abs() <= 2.0**-8 * x.abs()).all())


def _is_value(fmt: Format, words: Sequence[Value], x: torch.Tensor) -> bool:
    masters = (w for w, c in zip(words, fmt.components, strict=True) if c.suffix == MASTER)
    return all(torch.equal(word, x) for word in masters)


FORMATS: dict[str, Format] = Table(BUILT_IN, _check)
"""Every known storage format by name. A name keeps its meaning: states are stored under it."""


def format_named(name: object) -> Format:
    """The format called `name`; ValueError with the known names otherwise."""
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"unknown storage format {name!r}; known formats: {', '.join(FORMATS)}. {_REGISTER}")
    return FORMATS[name]


def require_known(name: str, what: str) -> None:
    """Raises ValueError if `what` was stored in a format that is not registered: its keys do not tell what it is."""
    if name not in FORMATS:
        raise ValueError(
            f"{what} stored as {name!r}, a format that is not known here; known formats: {', '.join(FORMATS)}. "
            f"{_REGISTER}"
        )


_REGISTER = "Register a format of your own (collage_neuron.FORMATS) before you compile an optimizer or load a state"


# --- the keys of their words ------------------------------------------------------------------------------------------


@lru_cache(1)  # computed again only if a format was added or replaced
def _endings(formats: tuple[Format, ...]) -> tuple[frozenset[str], frozenset[str]]:
    further = [c for f in formats for c in f.components if c.suffix]
    return frozenset(c.suffix for c in further), frozenset(c.suffix for c in further if c.block)


def suffixes() -> frozenset[str]:
    """The endings of our keys."""
    return _endings(tuple(FORMATS.values()))[0]


def shared_suffixes() -> frozenset[str]:
    """The endings of the words that blocks of elements share."""
    return _endings(tuple(FORMATS.values()))[1]


def is_component(key: Any, state: Iterable[Any]) -> bool:
    """Returns True if `key` of a state is that of a further component of another one, or of the parameter.

    A key that is not text is a state's own.
    """
    if not isinstance(key, str):
        return False
    return any(key.endswith(s) and (key[: -len(s)] == "param" or key[: -len(s)] in state) for s in suffixes())
