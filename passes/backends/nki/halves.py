"""Numbers as two halves of bits: how `places`, `limit_places` and `beyond` become values of a kernel.

An fp32 number next to a bf16 one is that one's bits and a signed count of fp32's last places below them. Engines read
and write both halves as int16, in every second element of a view of the tile, so that no instruction adds 32-bit
integers, which GpSimd alone does as such.

Given: `x1 = beyond(hi, lo * 256.0);  y = limit_places(x, 32512);  n = places(y)`
Result: `lower(x1) = int16(lo * 256.0);  upper(x1) = int16(bits(hi) - (lo < 0.0));  y = x;
lower(y) = int16(maximum(lower(y), -32512.0))`, and what reads n reads lower(y)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics import eft
from collage_neuron.passes.backends.nki.ir import Operand, Value, View

New = Callable[[str, tuple[Operand, ...], str, str], Value]
"""Makes the value of an operation, with these operands, type and name."""


def _places(new: New, args: Sequence[Any], name: str) -> View:
    return View(_tile(args[0], name), half=0)


def _limit_places(new: New, args: Sequence[Any], name: str) -> Value:
    own = new("own_copy", (_tile(args[0], name),), "float32", f"{name}_own")
    return new("limit_places", (own, -float(args[1])), "float32", name)


def _beyond(new: New, args: Sequence[Any], name: str) -> Value:
    """The lower halves are the places; the upper ones are a bf16 number's bits, less 1 where the places are negative.

    Both are int16, of which fp32 adds any two exactly.
    """
    upper, count = (_tile(x, name) for x in args)
    if upper.dtype != "bfloat16":
        upper = new("copy", (upper,), "bfloat16", f"{name}_upper")  # exact: it is a bf16 number
    factors, scale = _factors(count)
    base = factors[0]
    for factor in factors[1:]:
        base = _masked(new, base, factor, f"{name}_places")
    scaled = base if scale == 1 else new("multiply", (base, scale), "float32", f"{name}_scaled")
    lower = new("lower", (scaled,), "float32", name)
    return new("upper", (lower, View(upper), base), "float32", name)


def _tile(x: Any, name: str) -> Value:
    if isinstance(x, Value):
        return x
    raise UnsupportedUpdate(
        f"the update takes the bits of a number of the step apart (node {name}), which no kernel does yet; use "
        "backend='xla'"
    )


def _factors(x: Value) -> tuple[list[Value], float]:
    """The tiles and the power of two of which x is the product, in any order: such a power changes no rounding.

    The sign of x is that of the tiles alone, so that the power is multiplied in where ScalarE does it on the way.
    """
    if x.op != "multiply" or x.dtype != "float32":
        return [x], 1.0
    factors: list[Value] = []
    scale = 1.0
    for a in x.args:
        if isinstance(a, float) and a >= 1 and math.frexp(a)[0] == 0.5:
            scale *= a
        elif isinstance(a, Value):
            inner, more = _factors(a)
            factors, scale = [*factors, *inner], scale * more
        else:
            return [x], 1.0
    return factors, scale


def _masked(new: New, x: Value, mask: Value, name: str) -> Value:
    """x * mask; where the mask says what is not 0, with two ways to make it, of which an instruction reads one.

    As bf16 VectorE makes it four times faster from v3 on; the square of the sign ScalarE makes, which has time on v2.
    """
    if mask.op != "not_equal" or mask.args[1] != 0.0:
        return new("multiply", (x, mask), "float32", name)
    fast = new(mask.op, mask.args, "bfloat16", f"{name}_mask")
    sign = new("sign", mask.args[:1], "float32", f"{name}_sign")
    return new("masked", (x, fast, new("multiply", (sign, sign), "float32", f"{name}_square")), "float32", name)


OPERATIONS: Mapping[Any, Callable[[New, Sequence[Any], str], Operand]] = {
    eft.places: _places,
    eft.limit_places: _limit_places,
    eft.beyond: _beyond,
}
