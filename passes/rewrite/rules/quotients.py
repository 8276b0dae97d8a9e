"""Rules of remainders and of divisions whose result is a whole number (`collage_neuron/numerics/division.py`).

NKI rejects them: its division is a product with a reciprocal, and no remainder of it is documented to be exact.
"""

from __future__ import annotations

from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics import division, eft
from collage_neuron.passes.rewrite.arithmetic import Arithmetic, computed
from collage_neuron.passes.rewrite.rules.registry import rule, rule_for

aten = torch.ops.aten


@rule(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(a: Arithmetic, x: Any, y: Any) -> Any:
    """x - y * trunc(x / y), with the sign of x: exact for every quotient."""
    return a.round(eft.fmod(computed(a, x), computed(a, y)))


@rule(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(a: Arithmetic, x: Any, y: Any) -> Any:
    """x - y * floor(x / y), with the sign of y: exact for every quotient, rounded once."""
    return a.round(division.remainder(computed(a, x), computed(a, y)))


@rule(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(a: Arithmetic, x: Any, y: Any) -> Any:
    """floor(x / y), of the exact quotient."""
    return a.round(division.floor_quotient(computed(a, x), computed(a, y)))


@rule(aten.div.Tensor_mode, aten.div.Scalar_mode)
def divide(a: Arithmetic, x: Any, y: Any, *, rounding_mode: Any = None) -> Any:
    """x / y; with a mode `trunc(x / y)`, of the rounded quotient, or `floor_divide`."""
    if rounding_mode is None:
        return rule_for(aten.div.Tensor, "div")(a, x, y)
    if rounding_mode == "floor":
        return floor_divide(a, x, y)
    if rounding_mode != "trunc":
        raise UnsupportedUpdate(f"the update divides with rounding_mode={rounding_mode!r}; there are 'floor', 'trunc'")
    return a.round(division.truncated_quotient(computed(a, x), computed(a, y)))
