"""The random bits of an update: a counter-based generator, written into its graph.

Every element of every stored value gets its own 16 bits. They depend on the seed and the step number (the key), and on
the index of the parameter in the optimizer, the index of the element and the index of the draw (the counter), and on
nothing else: not on the backend, the device, the pieces in which a parameter is processed, or its shards, if these are
rows. In shards along another dimension, elements are numbered consecutively from the first one.

Draws are independent of each other, over the steps too. Draws that are spread evenly over the steps of an element (a
sequence with low discrepancy instead of a counter) have the right chance in each step, but a chance depends on the code
that earlier draws of the same sequence left, so averages would move at another rate than their gradients say:
`tests/numerics/test_averages.py` shows it.
"""

from __future__ import annotations

from collections.abc import Callable

from collage_neuron.numerics.eft import Value, whole
from collage_neuron.numerics.threefry import Words, halves, threefry
from collage_neuron.passes.ir.scalars import DRAWING, Scalar

SEED, STEP, PARAMETER, FIRST = (Scalar(name, ()) for name in DRAWING)
"""Numbers of a step that the optimizer does not have; the caller of an update passes them with its slots.

`first` is the index of the first element: 0 unless this is a shard. All except `parameter` are modulo 2**32.
"""

CALLS = 6
"""Bits of the counter for the index of a call of the generator; each call gives four draws."""


class Randomness:
    """The source of random bits for all draws of an update. `index` gives the indices of the elements."""

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
        """A 32-bit integer, assembled from two halves, since entries of the scalar vector are fp32."""
        return (whole(self._scalar("upper16", number)) << 16) | whole(self._scalar("lower16", number))
