"""The random bits of an update: a counter-based generator, written into its graph.

Every element of every stored value gets its own 16 bits. They depend on the seed and the step number (the key), and on
the index of the parameter in the optimizer, the index of the element and the index of the draw (the counter), and on
nothing else: not on the backend, the device, the pieces in which a parameter is processed, or its shards, if these are
rows. In shards along another dimension, elements are numbered consecutively from the first one.

Codes of blocks are coarse, and their errors live on in an average, so draws of codes are spread over the steps of each
element: its bits stay for `EPOCH` steps, and the step times the golden ratio, modulo 1, is added to them. Of n steps
with the same chance, n times this chance go up, to within a few (a Kronecker sequence; no ratio gives evener ones). In
each step the sum is as uniform as the bits are. Over the steps it depends on what was stored before, and which code is
left last depends on the direction in which the sequence goes; so half of the elements, by another random bit, have
the sum with each bit inverted, which goes the other way, and no error is common to all.

Evenly spread draws of two elements keep their distance. What one of them decides for the other (the power of two of
their block, `numerics/power_gaps.py`) would come at the same thresholds of the other again and again, which it would
round the same way; so each element has a second draw, to which a number without order is added in each step.

`tests/numerics/test_spread_draws.py` compares errors with those of independent draws, also of elements that receive a
gradient only in each F-th step, with F a Fibonacci number: F times the golden ratio is nearly whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from collage_neuron.numerics.eft import Value, whole
from collage_neuron.numerics.threefry import Words, halves, threefry
from collage_neuron.passes.ir.scalars import DRAWING, Scalar

SEED, STEP, PARAMETER, FIRST = (Scalar(name, ()) for name in DRAWING)
"""Numbers of a step that the optimizer does not have; the caller of an update passes them with its slots.

`first` is the index of the first element: 0 unless this is a shard. All except `parameter` are modulo 2**32.
"""

CALLS = 6
"""Bits of the counter for the index of a call of the generator; those with the first bit are for spread draws.

A call gives four draws, or two that are spread.
"""

EPOCH = 4096
"""Steps after which elements get new bits for their spread draws: about the memory of the longest averages."""


class Randomness:
    """The source of random bits for all draws of an update. `index` gives the indices of the elements."""

    def __init__(self, scalar: Callable[[str, Scalar], Value], index: Callable[[], Value]) -> None:
        self._scalar, self._index = scalar, index
        self._fresh = self._halves(STEP, 0)
        self._kept = self._halves(Scalar("/", (STEP, EPOCH)), 1 << CALLS - 1)

    def __call__(self) -> Value:
        """16 bits for each element, as int32 from 0 to 65535."""
        return next(self._fresh)

    def spread(self) -> tuple[Value, Value]:
        """The same, evenly over the steps of each element, and others, in no order."""
        bits, way = next(self._kept), next(self._kept)
        turned = bits + whole(self._scalar("golden16", STEP))
        turned = (turned ^ ((way & 1) + 0xFFFF)) & 0xFFFF  # 0xFFFF inverts all bits, 0x10000 none of these
        return turned, (way + whole(self._scalar("mixed16", STEP))) & 0xFFFF

    def _halves(self, number: Scalar, call: int) -> Iterator[Value]:
        """16 bits for each element, again and again, by the calls of the generator from `call` on."""
        while True:
            key = Words(self._word(SEED), self._word(number))
            stream = (whole(self._scalar("fp32", PARAMETER)) << CALLS) + call
            yield from halves(threefry(key, Words(self._index() + self._word(FIRST), stream)))
            call += 1

    def _word(self, number: Scalar) -> Value:
        """A 32-bit integer, assembled from two halves, since entries of the scalar vector are fp32."""
        return (whole(self._scalar("upper16", number)) << 16) | whole(self._scalar("lower16", number))
