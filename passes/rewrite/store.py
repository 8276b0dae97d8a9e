"""The pass `store`: rounds each new value to its storage format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from collage_neuron.numerics.eft import Value, narrow
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.rewrite.random_bits import Randomness
from collage_neuron.passes.rewrite.writer import Writer


@dataclass(frozen=True)
class Store:
    """Rounds each new value to its storage format, by nearest or with random bits, and splits it into components.

    Given: `param`, stored as bf16x2, whose new value is `add_1`::

        add_1 = add(add, mul_1)
        return (add_1) as (param)

    Result::

        add_1 = add(add, mul_1)
        round_to = round_to(add_1, bf16)
        sub = sub(add_1, round_to)
        round_to_1 = round_to(sub, bf16)
        narrow = narrow(round_to, bf16)
        narrow_1 = narrow(round_to_1, bf16)
        return (narrow, narrow_1) as (param, param_lo)

    The words of a value (`param[0]`, `param[1]`) are numbers of the components already: they are only narrowed.
    """

    name: ClassVar[str] = "store"

    def __call__(self, update: Update) -> Update:
        """`update` with components as its outputs; its wanted values stay as they are."""
        writer, results = Writer.after(update)
        random = Randomness(writer.scalar, lambda: writer.index)
        values = dict(zip(update.outputs, results, strict=False))
        components: dict[str, Value] = {}
        for name, fmt in update.formats.items():
            writer.begin(f"store {name}")
            components |= dict(zip(fmt.keys(name), _components(name, fmt, values, random), strict=True))
        writer.begin("store grad")
        if "grad" in values:  # the step writes to it: stored as the parameter's first word is, which has its dtype
            stored = format_named(update.formats["param"].components[0].storage)
            components["grad"] = stored.encode(values["grad"])[0]
        return update.with_body(
            writer.finish([*components.values(), *results[len(values) :]]),
            outputs=tuple(components), scalars=writer.scalars, draws=writer.draws, stored=True,
        )  # fmt: skip


def _components(name: str, fmt: Format, values: Mapping[str, Value], random: Randomness) -> Sequence[Value]:
    if name in values:  # else its words are outputs: those of an expansion, which are rounded
        return fmt.store(name, values[name], random)
    words = [values[key] for key in word_keys(name, fmt)]
    return [narrow(word, component.storage) for word, component in zip(words, fmt.components, strict=True)]


def word_keys(name: str, fmt: Format) -> list[str]:
    """The names of a value's words before they are stored, one for each component of its format."""
    return [f"{name}[{i}]" for i in range(len(fmt.components))]
