"""The operators (`nl.add`, ...) as data: arity, kind, which engine has them since when, and their fp32 meaning.

Sources: the table of math operators and the table of activation functions of the NKI ISA documentation; the column of
engines from its SDK 2.26 edition. There is no divide, and no square root outside the Scalar Engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nki_standin.dtypes import F32, Array
from nki_standin.errors import fail

INF = float("inf")


@dataclass(frozen=True)
class Operator:
    """An operator token. Called on tiles it raises: kernels here use instructions of `nki.isa` only."""

    name: str
    arity: int
    apply: Callable[..., Array]
    engines: dict[str, int] = field(default_factory=dict)
    """As an ALU operator: engine -> first NeuronCore generation."""
    domain: tuple[float, float] | None = None
    """As an activation function: the documented valid range of the input (of its magnitude, if `odd`)."""
    odd: bool = False
    bitvec: bool = False
    approximated: bool = False
    """Computed by piecewise polynomials or the like: its last bits are unknown."""

    def __call__(self, *_: Any, **__: Any) -> None:
        fail(f"nl.{self.name}(...) on tiles is several instructions or one, undocumented which: use nki.isa")

    def __repr__(self) -> str:
        return f"nl.{self.name}"

    def __hash__(self) -> int:
        return hash(self.name)


VECTOR = {"vector": 2}
ANYWHERE = (-INF, INF)


def _truth(f: Callable[..., Any]) -> Callable[..., Array]:
    def compare(a: Array, b: Array) -> Array:
        result: Array = np.asarray(f(a, b)).astype(F32)
        return result

    return compare


def _double(f: Callable[..., Any]) -> Callable[..., Array]:
    """Computed in fp64 and rounded, so that NumPy's own fp32 polynomials play no part."""
    return lambda *x: np.asarray(f(*(v.astype(np.float64) for v in x)), F32)


def _shift(a: Array, b: Array) -> Array:
    if (np.asarray(b) >= a.dtype.itemsize * 8).any():
        fail(f"a shift of {a.dtype.itemsize * 8}-bit elements by {np.max(b)} bits")
    result: Array = np.right_shift(a, b)
    return result


_ALL = [
    Operator("add", 2, np.add, {"vector": 2, "gpsimd": 2}),
    Operator("multiply", 2, np.multiply, {"vector": 2, "gpsimd": 2}),
    Operator("subtract", 2, np.subtract, VECTOR),
    Operator("maximum", 2, np.maximum, VECTOR),
    Operator("minimum", 2, np.minimum, VECTOR),
    Operator("power", 2, _double(np.power), {"gpsimd": 2}, approximated=True),
    *(
        Operator(n, 2, _truth(getattr(np, n)), VECTOR)
        for n in ("equal", "not_equal", "less", "less_equal", "greater", "greater_equal")
    ),
    *(Operator(n, 2, _truth(getattr(np, n)), VECTOR) for n in ("logical_and", "logical_or")),
    *(Operator(n, 2, getattr(np, n), VECTOR, bitvec=True) for n in ("bitwise_and", "bitwise_xor")),
    Operator("right_shift", 2, _shift, VECTOR, bitvec=True),
    Operator("abs", 1, np.abs, {"vector": 2}, ANYWHERE),
    Operator("square", 1, lambda x: x * x, {}, ANYWHERE),
    Operator("relu", 1, lambda x: np.maximum(x, F32.type(0)), {}, ANYWHERE),
    Operator("copy", 1, lambda x: x, {}, ANYWHERE),
    Operator("sign", 1, np.sign, {}, ANYWHERE),
    Operator("exp", 1, _double(np.exp), {}, ANYWHERE, approximated=True),
    Operator("log", 1, _double(np.log), {}, (2.0**-64, 2.0**64), approximated=True),
    Operator("sqrt", 1, np.sqrt, {}, (2.0**-116, 2.0**118), approximated=True),
    Operator("rsqrt", 1, _double(lambda x: 1 / np.sqrt(x)), {"gpsimd": 2}, (2.0**-87, 2.0**97), approximated=True),
    Operator("reciprocal", 1, _double(lambda x: 1 / x), {}, (2.0**-42, 2.0**42), odd=True, approximated=True),
]
OPERATORS = {op.name: op for op in _ALL}


def operator(x: object, what: str) -> Operator:
    """`x` if it is an operator token of nki.language."""
    if not isinstance(x, Operator):
        fail(f"{what}: {x!r} is not an operator of nki.language (there is no divide; use reciprocal and multiply)")
    return x
