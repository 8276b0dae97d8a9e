"""Rules that compare and select: comparisons, logic, maximum and minimum, `where` and operations built from it."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.eft import LARGEST
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.values import Fp32, lift
from collage_neuron.passes.rewrite.arithmetic import Arithmetic, Mask
from collage_neuron.passes.rewrite.rules.table import Rule, rule

aten = torch.ops.aten


@rule(aten.maximum.default, aten.clamp_min.default, aten.clamp_min.Tensor)
def maximum(a: Arithmetic, x: Any, y: Any) -> Any:
    """The larger: exact. Of expansions the larger pair."""
    return torch.maximum(a.choice(x), a.choice(y))


@rule(aten.minimum.default, aten.clamp_max.default, aten.clamp_max.Tensor)
def minimum(a: Arithmetic, x: Any, y: Any) -> Any:
    """The smaller: exact. Of expansions the smaller pair."""
    return torch.minimum(a.choice(x), a.choice(y))


@rule(aten.clamp.default, aten.clamp.Tensor)
def clamp(a: Arithmetic, x: Any, min: Any = None, max: Any = None) -> Any:
    """minimum(maximum(x, min), max)."""
    # First from below, as torch does: where min is larger than max, the result is max.
    x = x if min is None else maximum(a, x, min)
    return x if max is None else minimum(a, x, max)


FINITE = torch.finfo(torch.float32).max
"""The largest number: only infinity is above."""


def _comparison(compare: Callable[[Fp32, Fp32], Fp32]) -> Rule:
    def compares(a: Arithmetic, x: Any, y: Any) -> Any:
        return Mask(compare(a.read(x), a.read(y)))

    compares.__doc__ = str(compare.__doc__).replace("Same as", "The mask")  # "The mask a < b."
    return compares


for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _packet: Any = getattr(aten, _name)
    rule(_packet.Tensor, _packet.Scalar)(_comparison(getattr(operator, _name)))


@rule(aten.logical_and.default, aten.bitwise_and.Tensor)
def logical_and(a: Arithmetic, x: Any, y: Any) -> Any:
    """Both masks."""
    return Mask(torch.logical_and(a.truth(x), a.truth(y)))


@rule(aten.logical_or.default, aten.bitwise_or.Tensor)
def logical_or(a: Arithmetic, x: Any, y: Any) -> Any:
    """Either mask."""
    return Mask(torch.logical_or(a.truth(x), a.truth(y)))


@rule(aten.logical_not.default, aten.bitwise_not.default)
def logical_not(a: Arithmetic, x: Any) -> Any:
    """Not the mask."""
    return Mask(torch.logical_not(a.truth(x)))


@rule(aten.isnan.default)
def isnan(a: Arithmetic, x: Any) -> Any:
    """The mask of NaN."""
    value = a.read(x)
    return Mask(value != value)  # no backend needs an operation for it


@rule(aten.isinf.default)
def isinf(a: Arithmetic, x: Any) -> Any:
    """The mask of both infinities."""
    # No backend needs an operation for it: only infinity is above the largest number.
    return Mask(torch.abs(a.read(x)) > FINITE)


@rule(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(a: Arithmetic, mask: Any, x: Any, y: Any) -> Any:
    """x where the mask is true, else y: exact. Of expansions whole pairs. A mask that the host knows chooses one."""
    truth = a.truth(mask)
    if isinstance(truth, bool):  # of two numbers of the host
        return a.choice(x if truth else y)
    return torch.where(truth, a.choice(x), a.choice(y))


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(a: Arithmetic, x: Any, mask: Any, value: Any) -> Any:
    """The value where the mask is true, else x."""
    return where(a, mask, value, x)


@rule(aten.index_put.default)
def index_put(a: Arithmetic, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    """x[mask] = value, the one form that is elementwise."""
    if len(indices) != 1 or lift(indices[0]).mask is None or accumulate or lift(values).host is None:
        raise UnsupportedUpdate("the update writes to some elements by index; only x[mask] = number is elementwise")
    return where(a, indices[0], values, x)


@rule(aten.nan_to_num.default)
def nan_to_num(a: Arithmetic, x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    """x, with numbers in the place of NaN and infinity: 0 and the largest numbers of the arithmetic, unless given."""
    largest = LARGEST if a.name == "bf16" else FINITE
    high, low = _number(largest if posinf is None else posinf), _number(-largest if neginf is None else neginf)
    value = a.read(x)
    finite = where(a, Mask(value < -FINITE), low, where(a, Mask(value > FINITE), high, x))
    return where(a, isnan(a, x), _number(0.0 if nan is None else nan), finite)


def _number(x: Any) -> Scalar:
    """A number of an operation as one that the host knows: its words are those of its value."""
    return lift(x).host or Scalar.constant(float(x))
