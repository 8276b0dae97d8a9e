"""One step of an engine: an operator on fp32 numbers, giving fp32 numbers; or on bits, or on 32-bit integers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nki_standin.device import Device
from nki_standin.dtypes import DTYPES, F32, Array
from nki_standin.errors import require
from nki_standin.operators import OPERATORS, Operator
from nki_standin.tensors import NkiTensor


def step(op: Operator, device: Device, *operands: Array) -> Array:
    """`op` in fp32, rounded to nearest even once; approximated functions are off by up to `device.ulps`."""
    operands = tuple(np.asarray(x, F32) for x in operands)
    if op.name in ("maximum", "minimum"):
        require(not any(np.isnan(x).any() for x in operands), f"nl.{op.name} of a NaN: the result is undocumented")
    with np.errstate(all="ignore"):
        result = np.asarray(op.apply(*operands), F32)
    return perturbed(result, device.ulps) if op.approximated and device.ulps else result


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


WORDS = (DTYPES["int32"], DTYPES["uint32"])


def check_bitvec(instruction: str, tiles: Sequence[NkiTensor]) -> None:
    """Bitvec operators see bit patterns: integer types of one size."""
    text = ", ".join(map(repr, tiles))
    require(
        not any(t.dtype.is_float for t in tiles), f"{instruction}: a bitvec operator needs integer types, got {text}"
    )
    require(len({t.dtype.size for t in tiles}) == 1, f"{instruction}: a bitvec operator does not cast, got {text}")


def bitvec(op: Operator, *operands: Array) -> Array:
    """`op` on the bits: shifts are logical."""
    return op.apply(*(x.view(f"u{x.dtype.itemsize}") for x in operands))


def bitvec_scalar(op: Operator, x: Array, operand: object, reverse: bool) -> Array:
    """`op` with a Python int as other operand."""
    require(
        isinstance(operand, int) and not isinstance(operand, bool), f"tensor_scalar: {op} needs an int, got {operand!r}"
    )
    assert isinstance(operand, int)
    bits = 8 * x.dtype.itemsize
    require(-(2 ** (bits - 1)) <= operand < 2**bits, f"tensor_scalar: {operand} has more than {bits} bits")
    y = np.full_like(x.view(f"u{x.dtype.itemsize}"), operand % 2**bits)
    return bitvec(op, *((y, x) if reverse else (x, y)))


def arithmetic(op: Operator, dst: NkiTensor, a: Array, b: Array) -> Array:
    """Exact 32-bit arithmetic; a result beyond 32 bits is undefined."""
    require(op.name in ("add", "subtract", "multiply"), f"tensor_tensor: {op} of integers on engine gpsimd")
    exact = op.apply(a.astype(np.int64), b.astype(np.int64))
    limits = np.iinfo(dst.dtype.storage)
    fits = ((exact >= limits.min) & (exact <= limits.max)).all()
    require(fits, f"tensor_tensor: {op} of integers is beyond {dst.dtype.name}: whether it wraps is undocumented")
    return exact.astype(dst.dtype.storage)
