"""Where the random bits of an update come from: a counter-based generator, written into its graph.

Every element of every stored value gets 16 bits of its own. They depend on the seed and the number of the step (the
key), and on the number of the parameter in the optimizer, the number of the element in it and which of the update's
draws it is (the counter), and on nothing else: not on the backend, the device, the pieces a parameter is taken in, or
its shards, as long as these are rows. Shards along another dimension count on from their first element.
"""

from __future__ import annotations

from collections.abc import Callable

from collage_neuron.numerics.eft import Value, whole
from collage_neuron.numerics.threefry import Words, halves, threefry
from collage_neuron.passes.ir.scalars import DRAWING, Scalar

SEED, STEP, PARAMETER, FIRST = (Scalar(name, ()) for name in DRAWING)
"""Numbers of a step that no optimizer knows; whoever runs an update gives them beside its slots.

`first` is the number of the first element: 0 unless this is a shard. All but that of the parameter are modulo 2**32.
"""

CALLS = 6
"""Bits of the counter that number the calls of the generator: four draws each."""


class Randomness:
    """Fresh random bits, for as many draws as an update has. `index` gives the numbers of the elements."""

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
        """A whole number of 32 bits; fp32 entries of the scalar vector bring it in halves."""
        return (whole(self._scalar("upper16", number)) << 16) | whole(self._scalar("lower16", number))
