"""Remainders and whole quotients in explicit-rounding form, made of one operation of their own, `fmod`.

They have the bits of torch's on fp32 where torch's own `fmod` is exact: where the quotient overflows, from 2**128 on,
it is not (torch 2.9 on x86-64).
"""

from __future__ import annotations

import torch

from collage_neuron.numerics.eft import Value, bits_of, fmod, from_bits
from collage_neuron.numerics.functions import floor, truncated


def remainder(x: Value, y: Value) -> Value:
    """x - y * floor(x / y), with the sign of y: the exact result, rounded once."""
    rest = fmod(x, y)
    return torch.where(_opposite(rest, y), rest + y, rest)


def floor_quotient(x: Value, y: Value) -> Value:
    """floor(x / y), exact below 2**22 and within three roundings beyond; infinite or NaN where y is 0."""
    rest, quotient = fmod(x, y), x / y
    exact = (x - rest) / y
    exact = torch.where(_opposite(rest, y), exact - 1.0, exact)
    below = floor(exact)
    whole = torch.where(exact - below > 0.5, below + 1.0, below)  # exact was rounded
    whole = torch.where(exact == 0.0, quotient * 0.0, whole)  # with the quotient's sign
    return torch.where(y == 0.0, quotient, whole)


def truncated_quotient(x: Value, y: Value) -> Value:
    """x / y, rounded to fp32, without its fraction.

    NKI's division is a product with a reciprocal, whose error would make 2 of 3 / 1. So the quotient is read by its
    bits, which changes nothing elsewhere, and which a kernel cannot do.
    """
    return truncated(from_bits(bits_of(x / y)))


def _opposite(x: Value, y: Value) -> Value:
    """The mask of numbers other than 0 with different signs."""
    falls, rises = torch.logical_and(x < 0.0, y > 0.0), torch.logical_and(x > 0.0, y < 0.0)
    return torch.logical_or(falls, rises)
