"""Instructions on integers: bit patterns on the Vector Engine, 32-bit arithmetic on the GpSimd Engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from nki_standin.dtypes import DTYPES, Array
from nki_standin.errors import require
from nki_standin.operators import Operator
from nki_standin.tensors import NkiTensor

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
