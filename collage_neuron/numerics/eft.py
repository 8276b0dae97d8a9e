"""Error-free transforms in explicit-rounding form: values are fp32, and every rounding is a `round_to`.

The functions work on fp32 tensors and, unchanged, on `torch.fx.Proxy`: the same lines are the eager
arithmetic, the body of the rewritten graph, and what every backend lowers. An fp32 operation on bf16
operands followed by one `round_to(., "bf16")` is the correctly rounded bf16 operation, because
24 >= 2 * 8 + 2 makes the double rounding innocuous (Figueroa, "When is double rounding innocuous?", 1995).

Names and algorithms: Dekker 1971 (fast_two_sum), Knuth TAOCP 4.2.2 (two_sum), Shewchuk 1997 (expansions);
grow and scale: Yu et al., "Collage", ICML 2024, section 3.

Storage types, the kinds of words in memory that a `round_to` names, are data: every backend reads from `STORAGE_TYPES`
the width of a word and its name in HLO, NKI and LLVM. A new kind of word is a new entry.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, fx
from torch.overrides import handle_torch_function, has_torch_function


@dataclass(frozen=True)
class StorageType:
    """One kind of word."""

    name: str
    """Its name in graphs: `round_to(x, name)`, `narrow(x, name)`."""
    dtype: torch.dtype
    hlo: str
    """Its element type in HLO."""
    nki: str
    """Its name in `nki.language`."""
    precision: tuple[int, int] | None
    """(exponent bits, explicit mantissa bits) of a floating-point word, as XLA's reduce-precision counts them."""
    largest: float | None = None
    """The number that larger ones are rounded to, of a floating-point word; None if they may become infinite."""

    @property
    def bytes(self) -> int:
        """Bytes per word."""
        return self.dtype.itemsize

    @property
    def bits(self) -> int:
        """Bits per word."""
        return 8 * self.bytes

    @property
    def is_floating(self) -> bool:
        """Returns True for floating-point words, False for integers."""
        return self.precision is not None

    @property
    def digits(self) -> int:
        """Significant bits that a floating-point type needs to hold this type in one binade: 8 for bf16 and int8."""
        return self.bits if self.precision is None else self.precision[1] + 1

    @property
    def limits(self) -> tuple[int, int]:
        """The smallest and the largest number of an integer word."""
        info = torch.iinfo(self.dtype)
        return info.min, info.max

    def round(self, x: Tensor) -> Tensor:
        """The fp32 tensor `x` rounded to this type, to nearest even, as fp32.

        An integer word saturates, and a narrow floating-point one does. What they hold of a NaN is not defined.
        """
        if self.largest is not None:
            limited = x.clamp(-self.largest, self.largest)
            # On XLA a clamp makes the smallest number of a NaN.
            x = torch.where(x == x, limited, x) if _on_xla(x) else limited
        if self.is_floating:
            return x.to(self.dtype).to(torch.float32)
        return x.round().clamp(*self.limits)


def _on_xla(x: object) -> bool:
    """Returns True for a tensor on XLA; what writes a graph passes through here too, and is none."""
    return isinstance(x, Tensor) and x.device.type == "xla"


STORAGE_TYPES: dict[str, StorageType] = {
    t.name: t
    for t in (
        StorageType("bf16", torch.bfloat16, hlo="bf16", nki="bfloat16", precision=(8, 7)),
        StorageType("fp32", torch.float32, hlo="f32", nki="float32", precision=(8, 23)),
        StorageType("int8", torch.int8, hlo="s8", nki="int8", precision=None),
        StorageType("int16", torch.int16, hlo="s16", nki="int16", precision=None),
        StorageType("uint8", torch.uint8, hlo="u8", nki="uint8", precision=None),
        # Only rounded to: torch has few operations on its words, which are stored as those of an int16.
        StorageType("uint16", torch.uint16, hlo="u16", nki="uint16", precision=None),
        StorageType("fp16", torch.float16, hlo="f16", nki="float16", precision=(5, 10), largest=65504.0),
        # OCP's e4m3 has numbers up to 448, IEEE's has infinities from 256 on: up to 240 their bytes are the same.
        StorageType("e4m3", torch.float8_e4m3fn, hlo="f8e4m3fn", nki="float8_e4m3", precision=(4, 3), largest=240.0),
        StorageType("e5m2", torch.float8_e5m2, hlo="f8e5m2", nki="float8_e5m2", precision=(5, 2), largest=57344.0),
    )
}
"""Every known storage type by name. Integers are whole numbers of fp32, which holds all of them up to 24 bits."""


def storage_named(name: object) -> StorageType:
    """The storage type called `name`; ValueError with the known names otherwise."""
    if not isinstance(name, str) or name not in STORAGE_TYPES:
        raise ValueError(f"unknown storage type {name!r}; known types: {', '.join(STORAGE_TYPES)}")
    return STORAGE_TYPES[name]


def storage_of(dtype: torch.dtype) -> StorageType:
    """The storage type whose words are of `dtype`; ValueError if there is none."""
    for storage in STORAGE_TYPES.values():
        if storage.dtype == dtype:
            return storage
    raise ValueError(f"no storage type has words of {dtype}; known types: {', '.join(STORAGE_TYPES)}")


# --- operations --------------------------------------------------------------------------------------------


# A value of the arithmetic: an fp32 tensor, or the fx.Proxy of one while a graph is being written.
Value = Any

Operation = TypeVar("Operation", bound=Callable[..., Any])


def traceable(f: Operation) -> Operation:
    """Makes a function of tensors one node of a graph, where a `torch.fx.Proxy` is among what it is given."""

    @wraps(f)
    def computed_or_written(*args: Any) -> Any:
        if has_torch_function(args):
            return handle_torch_function(computed_or_written, args, *args)
        return f(*args)

    return cast(Operation, computed_or_written)


@traceable
def round_to(x: Value, fmt: str) -> Value:
    """Rounds an fp32 value to a storage type, to nearest even, and returns it as fp32. The only rounding below fp32.

    To an integer it saturates, and the value must not be NaN.
    """
    return storage_named(fmt).round(x)


@traceable
def widen(x: Value) -> Value:
    """Reads a stored component (bf16, fp32, an integer of up to 24 bits) as fp32: exact."""
    return x.to(torch.float32)


@traceable
def narrow(x: Value, fmt: str) -> Value:
    """Stores an fp32 value that the storage type `fmt` can represent as a component of that dtype: exact."""
    return x.to(storage_named(fmt).dtype)


@traceable
def sqrt(x: Value) -> Value:
    """The square root, correctly rounded to fp32."""
    # Not torch's own, which on the CPU is an ulp off in one case in six.
    return x.to(torch.float64).sqrt().to(torch.float32)  # 53 >= 2 * 24 + 2: the second rounding is innocuous


LARGEST = 2.0**127 * (2 - 2**-7)
"""The largest bf16. Values from half an ulp above it on round to infinity."""


@traceable
def capped(x: Value) -> Value:
    """x, or the largest bf16 where x is larger: keeps the difference of a word that overflowed from being inf - inf."""
    # One side is enough: what overflows in a run whose weights stay finite is a second moment, which is not negative.
    return x.clamp(max=LARGEST)


EXPONENT = 0x7F800000
"""The mask of the exponent bits of an fp32 number."""


@traceable
def power_of_two(x: Value) -> Value:
    """2**e of an fp32 number m * 2**e, 1 <= |m| < 2: its exponent bits alone. 0 below 2**-126, inf for Inf and NaN."""
    return (x.view(torch.int32) & EXPONENT).view(torch.float32)


@traceable
def inverse_power_of_two(x: Value) -> Value:
    """2**(1 - e) of an fp32 number m * 2**e: its exponent bits inverted. Inf below 2**-126, 0 for Inf and NaN."""
    # Twice the reciprocal of `power_of_two(x)`, so that it is a normal number wherever that is one. No division is
    # exact on every backend, and no integer addition is cheap on all of them; masks on bits are both.
    return ((x.view(torch.int32) & EXPONENT) ^ EXPONENT).view(torch.float32)


@traceable
def places(x: Value) -> Value:
    """How many of fp32's last places x lies beyond the bf16 number next to it: the lower half of its bits, signed.

    A whole number, -32768 to 32767; negative where the magnitude of x is the smaller one. That bf16 number is
    `bf16(x)`, unless x lies halfway between two (-32768 places): `limit_places` moves it off.
    """
    return _places(x).to(torch.float32)


def _places(x: Value) -> Value:
    # To the left and back: the lower half, with its own sign.
    return (x.view(torch.int32) << 16) >> 16


@traceable
def limit_places(x: Value, most: int) -> Value:
    """Moves x away from zero where it is more than `most` places short of the bf16 number next to it, to be `most`."""
    missing = (-most - _places(x)).clamp(min=0)
    # One more in the bits is a place further from zero, whatever the sign.
    return (x.view(torch.int32) + missing).view(torch.float32)


@traceable
def beyond(x: Value, n: Value) -> Value:
    """The fp32 number n places beyond the bf16 number x; n is whole, -32768 to 32767. Where n is 0 it is x.

    The inverse of `places`: `beyond(bf16(y), places(y))` is y, bit for bit, unless y lies halfway.
    """
    # The bits of a bf16 number end in 16 zeros, so n changes its upper half by at most a borrow, by the sign of n: no
    # backend needs 32-bit additions, of which NKI has slow ones.
    return (x.view(torch.int32) + n.to(torch.int32)).view(torch.float32)


@traceable
def block_max(x: Value, k: int) -> Value:
    """The largest magnitude in the block of each element: k consecutive elements of a row, the last dimension. Exact.

    The last block of a row may be shorter. NaN if one of a block is NaN.
    """
    n = x.shape[-1]
    # With 0, which is no larger than any magnitude.
    padded = torch.nn.functional.pad(x.abs(), (0, -n % k))
    return padded.unflatten(-1, (-1, k)).amax(-1).repeat_interleave(k, dim=-1)[..., :n]


def power_of_block(largest: Value, least: float) -> Value:
    """The power of two of a block: that of its largest magnitude, at least `least`."""
    power = power_of_two(largest)
    return torch.where(power > least, power, least)


def magnitudes(x: Value) -> Value:
    """x, with infinity in the place of what is negative or NaN: codes without a sign have no number for it."""
    return torch.where(x >= 0.0, x, float("inf"))


def fp32(x: float) -> float:
    """The fp32 number nearest to x: a literal that every backend reads alike."""
    # Not by a tensor, whose dtype and device are settings of the process.
    (nearest,) = struct.unpack("f", struct.pack("f", x))
    return float(nearest)


@traceable
def bits_of(x: Value) -> Value:
    """The bits of an fp32 value, as int32."""
    return x.view(torch.int32)


@traceable
def whole(x: Value) -> Value:
    """Converts an fp32 value that is an integer below 2**24 to int32: exact."""
    return x.to(torch.int32)


@traceable
def shift_right(n: Value, k: int) -> Value:
    """The int32 n shifted right by k bits, 1 to 31, filled with zeros (a logical shift)."""
    return (n >> k) & ((1 << (32 - k)) - 1)


@traceable
def stochastic_round(x: Value, random: Value) -> Value:
    """Rounds an fp32 value stochastically to bf16, and returns it as fp32; `random` (int32) decides up or down.

    With `random` uniform in 0 to 65535 the expectation is exactly x: fp32 has 16 bits more than bf16, so the
    probability of rounding up in magnitude, the distance from the bf16 below in ulps, is a multiple of 2**-16. Beyond
    the largest bf16 a value may become infinite, as with rounding to nearest; infinities and NaN stay.
    """
    # Added below bf16's last bit, the random bits carry into it as often as they should; the mask drops the rest.
    carried = (x.view(torch.int32) + random) & -0x10000
    # A carry may turn a NaN into another number, so NaN takes the other way.
    return torch.where(x == x, carried.view(torch.float32), round_to(x, "bf16"))


class Expansion(NamedTuple):
    """The unevaluated sum hi + lo of two bf16 values with hi = round(hi + lo)."""

    hi: Value
    lo: Value


def bf16(x: Value) -> Value:
    """round_to(x, "bf16"), abbreviated for use inside algorithms."""
    return round_to(x, "bf16")


def fast_two_sum(a: Value, b: Value) -> Expansion:
    """a + b = hi + lo exactly, if |a| >= |b| or a = 0. Three operations (Dekker).

    Where the sum overflows both words are infinite, or the low one finite; neither is NaN (`capped`).
    """
    s = bf16(a + b)
    z = bf16(capped(s) - a)  # of a sum that overflowed too: neither word is NaN
    return Expansion(s, bf16(b - z))


def two_sum(a: Value, b: Value) -> Expansion:
    """a + b = hi + lo exactly, for any order of magnitudes. Six operations (Knuth)."""
    s = bf16(a + b)
    bb = bf16(s - a)
    aa = bf16(s - bb)
    db = bf16(b - bb)
    da = bf16(a - aa)
    return Expansion(s, bf16(da + db))


def two_prod(a: Value, b: Value) -> Expansion:
    """a * b = hi + lo exactly, barring underflow: the product of two bf16 values is exact in fp32 (8 + 8 <= 24)."""
    exact = a * b
    p = bf16(exact)
    return Expansion(p, bf16(exact - capped(p)))


def split(x: Value) -> Expansion:
    """An fp32 value as hi + lo; the error is below 2**-17 of x (half an ulp of lo)."""
    hi = bf16(x)
    return Expansion(hi, bf16(x - hi))


def half_a_place(hi: Value, lo: Value) -> Value:
    """lo, limited to half of hi's last place in bf16: what a pair can have. Of a pair that `split` made, lo itself.

    NaN stays NaN; below 2**-126 it is 0, where bf16 has no room for a low word.
    """
    half = power_of_two(hi) * 2.0**-8
    return torch.minimum(torch.maximum(lo, -half), half)


def split_capped(x: Value) -> Expansion:
    """`split` for states: hi is capped at the largest bf16, and lo has the rest, so that it is never inf - inf."""
    hi = bf16(capped(x))
    return Expansion(hi, bf16(x - hi))


def grow(e: Expansion, a: Value) -> Expansion:
    """e + a, rounded to an expansion. Needs |e.hi| >= |a| for its error bound (Collage, algorithm Grow)."""
    u, v = fast_two_sum(e.hi, a)
    return fast_two_sum(u, bf16(e.lo + v))


def scale(e: Expansion, c: Expansion) -> Expansion:
    """e * c, rounded to an expansion; the product of the two low words is dropped (Collage, algorithm Mul)."""
    hi = capped(e.hi)  # c.lo may be 0 or negative, and the cross terms of an infinite e NaN
    p, q = two_prod(hi, c.hi)
    cross = bf16(bf16(hi * c.lo) + bf16(e.lo * c.hi))
    return fast_two_sum(p, bf16(q + cross))


OPERATIONS = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
        operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne,
        torch.logical_or, torch.logical_and, torch.logical_not, torch.where, torch.maximum, torch.minimum,
        torch.abs, torch.sign, capped, sqrt, torch.exp, torch.log, torch.pow,
        power_of_two, inverse_power_of_two, places, limit_places, beyond, round_to, widen, narrow,
        block_max,
    }
)  # fmt: skip
"""The operations of explicit-rounding form, all fp32; only `round_to` rounds below fp32, and only `block_max` reads
other elements than its own."""

ON_BITS = frozenset(
    {
        stochastic_round, whole, bits_of, shift_right,
        operator.lshift, operator.and_, operator.or_, operator.xor,
    }
)  # fmt: skip
"""Those on int32: of random bits, and of formats; `stochastic_round` rounds below fp32 too."""


_CHOICES = frozenset({torch.where, torch.maximum, torch.minimum})
_SIGNS = frozenset({operator.neg, torch.abs})


def is_rounded(value: Any, storage: StorageType, words: frozenset[str] = frozenset()) -> bool:
    """Returns True if all that a node can be is a number of `storage`: a rounding, a stored word, a choice of such.

    Or, in a floating-point type, the sign of such: 128 is not an int8. `words` are the entries of the scalar vector
    that the host rounded to bf16.
    """
    if not isinstance(value, fx.Node):
        return bool(value == 0.0)
    if storage.dtype == torch.float32:
        return True
    if value.target is round_to:
        return value.args[1] == storage.name
    if value.target is stochastic_round:
        return storage.name == "bf16"
    if value.target in _CHOICES or (value.target in _SIGNS and storage.is_floating):
        operands = value.args[1:] if value.target is torch.where else value.args
        return all(is_rounded(v, storage, words) for v in operands)
    return storage.name == "bf16" and (value.target is widen or value.target in words)
