"""The second moment as the released Collage code computes it: wrong, and re-created here as a must-fail case.

Its multiplication of two expansions works in place, so that names which the algorithm keeps apart are one tensor:

* the rounded product overwrites the high word before the rounding error is taken, so that the "error" is
  p * b_hi - p, and the cross term reads p where v was meant;
* the closing Fast2Sum subtracts the sum from itself, so that the low word is added to the high word and kept too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Words(NamedTuple):
    """A second moment as the pair (v, dv)."""

    v: Tensor
    dv: Tensor


def released_second_moment(s: Words, g: Tensor, beta2_hi: Tensor, beta2_lo: Tensor, one_minus_beta2: Tensor) -> Words:
    """beta2 * (v, dv) + (1 - beta2) * g * g with the defect; bf16 tensors, 1 - beta2 in fp32."""
    v = s.v * beta2_hi
    error = (v.double() * beta2_hi.double() - v.double()).to(torch.bfloat16)  # should read s.v
    error = error + (v * beta2_lo + s.dv * beta2_hi)  # should read s.v
    v = v + error
    dv = error - (v - v)  # should subtract the product from the sum
    x = (g.float() * g.float() * one_minus_beta2).to(torch.bfloat16)
    u = v + x
    w = x - (u - v)
    w = dv + w
    total = u + w
    return Words(total, w - (total - u))
