"""One step of an engine: an operator on fp32 numbers, giving fp32 numbers."""

from __future__ import annotations

import numpy as np

from nki_standin.device import Device
from nki_standin.dtypes import F32, Array, subnormals
from nki_standin.errors import require
from nki_standin.operators import OPERATORS, Operator


def step(op: Operator, device: Device, *operands: Array) -> Array:
    """`op` in fp32, rounded to nearest even once; approximated functions are off by up to `device.ulps`."""
    operands = tuple(subnormals(np.asarray(x, F32), device) for x in operands)
    if op.name in ("maximum", "minimum"):
        require(not any(np.isnan(x).any() for x in operands), f"nl.{op.name} of a NaN: the result is undocumented")
    with np.errstate(all="ignore"):
        result = np.asarray(op.apply(*operands), F32)
    if op.approximated and device.ulps:
        result = perturbed(result, device.ulps)
    return subnormals(result, device)


def activate(op: Operator, device: Device, x: Array, what: str) -> Array:
    """`op` as a function of the Scalar Engine, whose input must lie in the documented range."""
    assert op.domain is not None
    require(op.name != "relu" or not np.isnan(x).any(), f"{what}: nl.relu of a NaN: the result is undocumented")
    low, high = op.domain
    magnitude = np.abs(x) if op.odd else x
    outside = ~((magnitude >= low) & (magnitude <= high))
    if np.isinf(low):
        outside &= False
    sign = "+-" if op.odd else ""
    require(
        not outside.any(),
        f"{what}: nl.{op.name} of {x[outside][0] if outside.any() else 0} is invalid; its documented range is "
        f"{sign}[{low:.3g}, {high:.3g}]",
    )
    return step(op, device, x)


def extreme(op: Operator, device: Device, x: Array) -> Array:
    """The largest or smallest element of the last dimension, which stays with one element."""
    while (n := x.shape[-1]) > 1:
        x = step(op, device, x[..., : (n + 1) // 2], x[..., n // 2 :])
    return x


def total(device: Device, x: Array) -> Array:
    """The sum over the last dimension, which stays with one element, rounded to fp32 after each addition."""
    add, x = OPERATORS["add"], x[..., ::-1] if device.order == "backward" else x
    if device.order != "pairs":
        result = x[..., :1]
        for k in range(1, x.shape[-1]):
            result = step(add, device, result, x[..., k : k + 1])
        return result
    while (n := x.shape[-1]) > 1:
        paired = step(add, device, x[..., : n // 2], x[..., n // 2 : n // 2 * 2])
        x = np.concatenate([paired, x[..., n // 2 * 2 :]], -1)
    return x


def perturbed(x: Array, ulps: int) -> Array:
    """`x` moved by -ulps to +ulps units of the last place, each number always by the same: a device is a function."""
    bits = x.view(np.int32)
    moves = ((bits.astype(np.uint32) * np.uint32(2654435761)) >> 16) % np.uint32(2 * ulps + 1)
    moved = (bits + moves.astype(np.int32) - np.int32(ulps)).view(F32)
    return np.where(np.isfinite(x) & (np.abs(x) > 2.0**-125) & (np.abs(x) < 2.0**127), moved, x)
