"""Operations of explicit-rounding form, and the operators of `nki.language` that compute them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from collage_neuron.numerics.eft import inverse_power_of_two, power_of_two

BINARY: Mapping[Any, str] = {
    operator.add: "add", operator.sub: "subtract", operator.mul: "multiply",
    torch.maximum: "maximum", torch.minimum: "minimum", torch.pow: "power",
    operator.lt: "less", operator.le: "less_equal", operator.gt: "greater", operator.ge: "greater_equal",
    operator.eq: "equal", operator.ne: "not_equal",
    torch.logical_or: "logical_or", torch.logical_and: "logical_and",
}  # fmt: skip
UNARY: Mapping[Any, str] = {torch.abs: "abs", torch.sign: "sign", torch.exp: "exp"}

MASKS = frozenset({"less", "less_equal", "greater", "greater_equal", "equal", "not_equal", "logical_or", "logical_and"})
"""Operators whose result is 0 or 1, stored as uint8, as required of predicates."""

POWERS = {power_of_two: "power_of_two", inverse_power_of_two: "inverse_power_of_two"}
"""Operations on the bits of the exponent. That of a bf16 number is a bf16 number, so that its tile stays narrow."""

MIRRORED = {
    **{op: op for op in ("add", "multiply", "maximum", "minimum", "equal", "not_equal", "logical_or", "logical_and")},
    "less": "greater", "less_equal": "greater_equal", "greater": "less", "greater_equal": "less_equal",
}  # fmt: skip
"""The operator that gives the same result with its operands exchanged."""
