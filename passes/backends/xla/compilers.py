"""What the compilers of XLA devices support, and computations that are written within that, with the same bits.

neuronx-cc lists the operators that it takes (release notes of the compiler, SDK 2.32): `reduce-precision` and
`round-nearest-even` are not among them; Neuron's known issues of JAX say that `reduce-precision` and reductions of
several arrays are not supported. The vector engine of a trn1 computes sums and maxima of 32-bit integers in fp32, which
has whole numbers up to 2**24 only, while operations on bits are exact. So here every sum is one that fp32 has exactly:

* of small numbers, below 2**24;
* of two multiples of 2**d up to 2**31, with d of 7 or more: at most 24 bits of them are significant.

Nothing of this has run on a device: the rounding probe compares its bits there before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from collage_neuron.passes.backends.xla.hlo import Computation, Instruction

HALF = 0xFFFF
"""The mask of the lower 16 bits."""
SIGN = -(1 << 31)
"""The mask of the sign of an fp32 number, as int32."""


class ForNeuron(Computation):
    """A computation that writes what neuronx-cc does not have in other instructions."""

    def reduce_precision(self, x: Instruction, exponent_bits: int, mantissa_bits: int) -> Instruction:
        """The same but for numbers below the format's smallest normal one, which are rounded as if there were more."""
        if (gone := 23 - mantissa_bits) == 0:
            return x
        low, bits = (1 << gone) - 1, self.bits(x)
        # To nearest even: half of the last place less 1 is added, and 1 more where the last bit that stays is odd. The
        # lower bits are added up alone, and their carry to the upper ones, so that fp32 has both sums exactly.
        odd = self.on("and", self._right(bits, gone), 1)
        lower = self.on("add", self.on("add", self.on("and", bits, low), odd), low >> 1)
        rounded = self.from_bits(self.on("add", self.on("and", bits, ~low), self.on("and", lower, 1 << gone)))
        if exponent_bits < 8:
            # Too large for the format: a product with infinity is one, and keeps the sign.
            is_large = self.compare("GE", self.on("abs", rounded), 2.0 ** (2 ** (exponent_bits - 1)))
            rounded = self.select(is_large, self.on("multiply", rounded, math.inf), rounded)
        # A carry may make an infinity or a zero of the bits of a NaN.
        return self.select(self.compare("NE", x, x), x, rounded)

    def round_nearest_even(self, x: Instruction) -> Instruction:
        """The same, of the whole numbers around x: `floor` and its distance, which fp32 has or rounds harmlessly."""
        below = self.on("floor", x)
        over, halved = self.on("subtract", x, below), self.on("multiply", below, 0.5)
        is_odd = self.compare("NE", halved, self.on("floor", halved))
        is_up = self.select(is_odd, self.compare("GE", over, 0.5), self.compare("GT", over, 0.5))
        whole = self.select(is_up, self.on("add", below, 1.0), below)
        signed = self.from_bits(self.on("and", self.bits(x), SIGN))  # -0 for what rounds to it
        return self.select(self.compare("EQ", whole, 0.0), signed, whole)

    def wrapping_sum(self, x: Instruction, y: Instruction) -> Instruction:
        """The same, in halves of 16 bits."""
        low = self.on("add", self.on("and", x, HALF), self.on("and", y, HALF))
        high = self.on("add", self.on("add", self._right(x, 16), self._right(y, 16)), self._right(low, 16))
        return self._joined(high, self.on("and", low, HALF))

    def largest(self, x: Instruction) -> Instruction:
        """The same: the largest upper half, and the largest lower one of those that have it."""
        upper = self._right(x, 16)
        high = super().largest(upper)
        is_less = self.compare("NE", upper, self.repeat(high, x.array.dims[-1]))
        return self._joined(high, super().largest(self.select(is_less, 0, self.on("and", x, HALF))))

    def sums(self, xs: Sequence[Instruction]) -> list[Instruction]:
        """One after another. Counts are exact below 2**16 rows of fewer than 2**24 elements (`lower.rows`)."""
        return [self._counted(x) if x.array.element == "s32" else Computation.sums(self, [x])[0] for x in xs]

    def _counted(self, x: Instruction) -> Instruction:
        """The sum of whole numbers below 2**24, in pieces of 8 bits."""
        # A sum of up to 2**16 pieces of 8 bits stays below 2**24, as fp32 needs it.
        pieces = (self.on("and", self._right(x, k), 0xFF) for k in (0, 8, 16))
        low, middle, high = (Computation.sums(self, [piece])[0] for piece in pieces)
        return self.wrapping_sum(self.wrapping_sum(low, self._left(middle, 8)), self._left(high, 16))

    def _joined(self, high: Instruction, low: Instruction) -> Instruction:
        return self.on("or", self._left(high, 16), low)

    def _left(self, x: Instruction, count: int) -> Instruction:
        return self.on("shift-left", x, count)

    def _right(self, x: Instruction, count: int) -> Instruction:
        return self.on("shift-right-logical", x, count)


BY_KIND: Mapping[str, type[Computation]] = {"NEURON": ForNeuron}
"""The computations for devices whose compiler does not have everything, by `torch_xla.runtime.device_type()`."""
