"""The pass `store`: rounds each new value to its storage format, to nearest or with random bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from collage_neuron.numerics.eft import Value, narrow, whole
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.threefry import Words, halves, threefry
from collage_neuron.passes.ir.scalars import DRAWING, Scalar
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.rewrite.graph_writer import Writer

SEED, STEP, PARAMETER, FIRST = (Scalar(name, ()) for name in DRAWING)
"""Numbers of a step that the optimizer does not have; the caller of an update passes them with its slots.

`first` is the index of the first element: 0 unless this is a shard. All except `parameter` are modulo 2**32.
"""

CALLS = 6
"""Bits of the counter for the index of a call of the generator; each call gives four draws."""


class Randomness:
    """The source of random bits for all draws of an update: a counter-based generator, written into its graph.

    Every element of every stored value gets its own 16 bits. They depend on the seed and the step number (the key), and
    on the index of the parameter in the optimizer, the index of the element (`index`) and the index of the draw (the
    counter), and on nothing else: not on the backend, the device, the pieces in which a parameter is processed, or its
    shards, if these are rows. In shards along another dimension, elements are numbered consecutively from the first.

    Draws are independent of each other, over the steps too. Draws that are spread evenly over the steps of an element
    (a sequence with low discrepancy instead of a counter) have the right chance in each step, but a chance depends on
    the code that earlier draws of the same sequence left, so averages would move at another rate than their gradients
    say: `tests/numerics/test_averages.py` shows it.
    """

    def __init__(self, scalar: Callable[[str, Scalar], Value], index: Callable[[], Value]) -> None:
        self._scalar, self._index = scalar, index
        self._left: list[Value] = []
        self._calls = 0

    def __call__(self) -> Value:
        """16 bits for each element, as int32 from 0 to 65535."""
        if not self._left:
            key = Words(self._word(SEED), self._word(STEP))
            stream = (whole(self._scalar("fp32", PARAMETER)) << CALLS) + self._calls
            counter = Words(self._index() + self._word(FIRST), stream)
            self._left = list(halves(threefry(key, counter)))
            self._calls += 1
        return self._left.pop(0)

    def _word(self, number: Scalar) -> Value:
        """A 32-bit integer, assembled from two halves."""
        # Entries of the scalar vector are fp32, which has all whole numbers up to 2**24 only.
        return (whole(self._scalar("upper16", number)) << 16) | whole(self._scalar("lower16", number))


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
