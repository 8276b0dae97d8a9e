"""bf16 and an integer word: the further word is the lower half of fp32's bits, or the upper part of that half.

A second bf16 word repeats the exponent of the first one. An integer needs none: it counts fp32's own last places from
the first word on, so that all its bits are significant.

    value = the fp32 number lo * unit places beyond hi

`unit` is 1 with an int16, 256 with an int8. hi is the value rounded to bf16, to nearest; a value halfway between two
bf16 numbers is moved away from zero first, by as little as makes it nearer to one (`limit_places`). So `lo` never says
half a last place of hi, and encoding what was decoded gives the same words.

* int16, 4 bytes: fp32 itself; a value halfway between two bf16 numbers is off by one place, 2**-23 of its power of two.
* int8, 3 bytes: half of 2**-8 of hi's last place, 2**-16 of the value's power of two, and up to one where the value is
  nearly halfway.

-0, infinities and NaN are stored as hi, with 0 places. Below half of bf16's smallest subnormal a value becomes 0: a hi
of 0 is 0 whatever `lo` is, since a weight that was set to 0 behind the optimizer's back keeps its `lo`, and places
below 0 would be NaN.

The idea of the int16 is that of "split SGD" (Kalamkar et al., "Optimizing deep learning recommender systems training on
CPU cluster architectures", SC 2020), where hi is truncated; of the int8, FlashOptim's split weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from collage_neuron.numerics.eft import Value, beyond, bf16, limit_places, narrow, places, round_to, widen


@dataclass(frozen=True)
class IntegerWord:
    """An integer word beside a bf16 one: its storage type, and the places of fp32 that one unit of it is."""

    storage: str
    unit: float
    most: int
    """The largest number of places that it can say: towards zero a value is limited to them."""

    def encode(self, x: Value) -> Sequence[Value]:
        """The words of an fp32 value."""
        near = limit_places(x, self.most)
        count = places(near) if self.unit == 1 else places(near) * (1 / self.unit)
        return [narrow(bf16(near), "bf16"), narrow(round_to(count, self.storage), self.storage)]

    def decode(self, words: Sequence[Value]) -> Value:
        """The fp32 value of two words: exact."""
        hi, lo = map(widen, words)
        count = lo if self.unit == 1 else lo * self.unit
        # A weight that was set to 0 behind the optimizer's back keeps its `lo`, and places below 0 would be NaN.
        return beyond(hi, count * widen(hi != 0.0))


INT16 = IntegerWord("int16", unit=1.0, most=2**15 - 1)
INT8 = IntegerWord("int8", unit=256.0, most=127 * 256)
