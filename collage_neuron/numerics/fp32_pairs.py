"""Arithmetic with pairs of fp32 numbers, hi + lo, for devices without fp64: sums, means and roots to about 2**-38.

Written so that it has the same bits wherever fp32 operations round to nearest, whether or not a compiler contracts a
product and a sum into one operation: every product is exact, but for those whose error does not matter. Sums are error
free (`two_sum`, Knuth), and their errors are added beside them. Of n = 2**d numbers that takes d levels: the d * n
errors are at most d * 2**-24 of the sum of magnitudes in all, and adding them up loses at most 2 * d of their 2**-24:
2 * d**2 * 2**-48 of the sum of magnitudes, which is 2**-38 for 2**22 numbers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from collage_neuron.numerics.eft import fp32


class Pair(NamedTuple):
    """The unevaluated sum hi + lo of fp32 tensors, with hi = fl(hi + lo)."""

    hi: Tensor
    lo: Tensor


def two_sum(a: Tensor, b: Tensor) -> Pair:
    """a + b = hi + lo exactly, for any order of magnitudes."""
    s = a + b
    bb = s - a
    return Pair(s, (a - (s - bb)) + (b - bb))


def fast_two_sum(a: Tensor, b: Tensor) -> Pair:
    """a + b = hi + lo exactly, for |a| >= |b|."""
    s = a + b
    return Pair(s, b - (s - a))


def folded(x: Tensor) -> Pair:
    """The sums over the last dimension: the second half is added to the first, until one is left."""
    size = x.shape[-1]
    hi = torch.nn.functional.pad(x, (0, (1 << (size - 1).bit_length()) - size))
    lo = torch.zeros_like(hi)
    while (half := hi.shape[-1] // 2) > 0:
        hi, error = two_sum(hi[..., :half], hi[..., half:])
        lo = lo[..., :half] + lo[..., half:] + error
    return fast_two_sum(hi[..., 0], lo[..., 0])


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    """x = a + b, of 12 bits each, so that products of such are exact."""
    far = x * 4096.0  # the sum with it drops the last 12 bits of x (Dekker's split)
    a = (x + far) - far
    return a, x - a


def over(x: Pair, n: int) -> Pair:
    """x / n, to 2**-46: the product with 1 / n as a pair."""
    # A quotient of fp32 would round 1 / n once; as a pair it has 48 bits.
    first = fp32(1 / n)
    second = fp32(1 / n - first)
    a, b = halves(x.hi)
    c, d = (float(half) for half in halves(torch.tensor(first, dtype=torch.float32, device="cpu")))
    return folded(torch.stack([a * c, a * d, b * c, b * d, x.hi * second, x.lo * first], dim=-1))


def root(x: Pair) -> Pair:
    """The square root, to 2**-43."""
    return corrected(x.hi.sqrt(), x)


def corrected(near: Tensor, x: Pair) -> Pair:
    """The square root of x from one that is off by an ulp or two, since a device may approximate it."""
    a, b = halves(near)
    # One step of Newton's: what is left of x beside the square, whose partial products are exact.
    left = folded(torch.stack([x.hi, -(a * a), -2.0 * (a * b), -(b * b), x.lo], dim=-1)).hi
    fits = (near > 0) & (near < torch.inf)
    return fast_two_sum(near, torch.where(fits, left / (2.0 * near), torch.zeros_like(near)))


def square_root(x: Tensor) -> Tensor:
    """The square root of fp32 numbers, rounded to fp32."""
    return root(Pair(x, torch.zeros_like(x))).hi
