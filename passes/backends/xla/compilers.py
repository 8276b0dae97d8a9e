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

from collections.abc import Iterator, Mapping, Sequence

from collage_neuron.passes.backends.xla.hlo import Computation, Instruction
from collage_neuron.passes.backends.xla.nodes import lower_bits_of, lower_from_bits, number_like

HALF = 0xFFFF
"""The mask of the lower 16 bits."""
SIGN = -(1 << 31)
"""The mask of the sign of an fp32 number, as int32."""


class ForNeuron(Computation):
    """A computation that writes what neuronx-cc does not have in other instructions."""

    e4m3fn = False

    def reduce_precision(self, x: Instruction, exponent_bits: int, mantissa_bits: int) -> Instruction:
        """The same but for numbers below the smallest normal one of the format, which it rounds as if there were more.

        bits + half - 1 + (1 if the last bit that stays is odd), without the bits that go: the carry of a sum of the
        lower bits is added to the upper ones. Half of an fp32 number has the same exponent, or the next one.
        """
        if (gone := 23 - mantissa_bits) == 0:
            return x
        low, bits = (1 << gone) - 1, lower_bits_of(self, x)
        odd = self._and(self._right(bits, gone), 1)
        carry = self._and(self._plus(self._plus(self._and(bits, low), odd), low >> 1), 1 << gone)
        rounded = lower_from_bits(self, self._plus(self._and(bits, ~low), carry))
        if exponent_bits < 8:
            limit, infinity = self._constants(x, 2.0 ** (2 ** (exponent_bits - 1)), float("inf"))
            is_large = self.compare("GE", self.add("abs", x.shape, [rounded]), limit)
            rounded = self.select(is_large, self.add("multiply", x.shape, [rounded, infinity]), rounded)
        return self.select(self.compare("NE", x, x), x, rounded)

    def round_nearest_even(self, x: Instruction) -> Instruction:
        """The same, of the whole numbers around x: `floor` and its distance, which fp32 has or rounds harmlessly."""
        zero, half, one = self._constants(x, 0.0, 0.5, 1.0)
        below = self.add("floor", x.shape, [x])
        over = self.add("subtract", x.shape, [x, below])
        halved = self.add("multiply", x.shape, [below, half])
        is_odd = self.compare("NE", halved, self.add("floor", x.shape, [halved]))
        is_up = self.select(is_odd, self.compare("GE", over, half), self.compare("GT", over, half))
        whole = self.select(is_up, self.add("add", x.shape, [below, one]), below)
        signed = lower_from_bits(self, self._and(lower_bits_of(self, x), SIGN))  # -0 for what rounds to it
        return self.select(self.compare("EQ", whole, zero), signed, whole)

    def wrapping_sum(self, x: Instruction, y: Instruction) -> Instruction:
        """The same, in halves of 16 bits."""
        low = self._plus(self._and(x, HALF), self._and(y, HALF))
        high = self._plus(self._plus(self._right(x, 16), self._right(y, 16)), self._right(low, 16))
        return self._joined(high, self._and(low, HALF))

    def largest(self, x: Instruction) -> Instruction:
        """The same: the largest upper half, and the largest lower one of those that have it."""
        upper = self._right(x, 16)
        high = super().largest(upper)
        is_high = self.compare("EQ", upper, self.repeat(high, x.array.dims[-1]))
        low = super().largest(self.select(is_high, self._and(x, HALF), number_like(self, x, 0)))
        return self._joined(high, low)

    def sums(self, xs: Sequence[Instruction]) -> list[Instruction]:
        """One after another. Counts are exact below 2**16 rows of fewer than 2**24 elements (`lower.rows`)."""
        return [self._counted(x) if x.array.element == "s32" else Computation.sums(self, [x])[0] for x in xs]

    def _counted(self, x: Instruction) -> Instruction:
        """The sum of whole numbers below 2**24, in pieces of 8 bits."""
        low, middle, high = (Computation.sums(self, [self._and(self._right(x, k), 0xFF)])[0] for k in (0, 8, 16))
        return self.wrapping_sum(self.wrapping_sum(low, self._left(middle, 8)), self._left(high, 16))

    def _constants(self, like: Instruction, *numbers: float) -> Iterator[Instruction]:
        return (self.broadcast(self.constant(number), like.array.dims) for number in numbers)

    def _joined(self, high: Instruction, low: Instruction) -> Instruction:
        return self.add("or", low.shape, [self._left(high, 16), low])

    def _and(self, x: Instruction, mask: int) -> Instruction:
        return self.add("and", x.shape, [x, number_like(self, x, mask)])

    def _left(self, x: Instruction, count: int) -> Instruction:
        return self.add("shift-left", x.shape, [x, number_like(self, x, count)])

    def _right(self, x: Instruction, count: int) -> Instruction:
        return self.add("shift-right-logical", x.shape, [x, number_like(self, x, count)]) if count else x

    def _plus(self, x: Instruction, y: Instruction | int) -> Instruction:
        """A sum that fp32 has exactly."""
        return self.add("add", x.shape, [x, number_like(self, x, y) if isinstance(y, int) else y])


BY_KIND: Mapping[str, type[Computation]] = {"NEURON": ForNeuron}
"""The computations for devices whose compiler does not have everything, by `torch_xla.runtime.device_type()`."""
