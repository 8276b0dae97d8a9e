"""Words in memory: how a pair of vectors is loaded from, and stored to, tensors of each dtype.

A pair holds the elements with even and with odd numbers of a piece of memory. In a 32-bit word two bf16 lie beside each
other: a shift gives the first as fp32, a mask the second. To take the first and the second half of the piece instead
would need shuffles, which cost a fifth of the whole update.

A word of 16 bits that is an integer is read as a float, multiplied by 1 or 0, and added to the bits of another one: in
the update three operations on floats. All that this needs is the integer, masked. So what is computed of floats that
are whole numbers, or known fractions of such, has two forms, the float and a `Fixed`; whoever uses it takes one, and
what nobody takes is dropped from the text (`llvm_builder.live`). An integer to be stored is rounded by adding
1.5 * 2**23: its bits are the last ones of the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import frexp
from types import MappingProxyType
from typing import Any

import torch

from collage_neuron.passes.backends.native.llvm_builder import FLOAT, INT, MASK, Code, Fixed, Value

UPPER_HALF = -0x10000

DIGITS = 24
"""Of an fp32 number."""

ROUNDER, ROUNDER_BITS = 1.5 * 2.0**23, 0x4B400000
"""Its last place is 1, and that of its sums with numbers below 2**22 too."""


def at_top(number: Value, bits: int) -> Fixed:
    """Of a number of `bits` bits, with its sign, in the first bits of an integer; all others are 0."""
    return Fixed(number, 32 - bits, 32 - bits, -(2.0 ** (bits - 1)), 2.0 ** (bits - 1) - 1)


def float_of(code: Code, fixed: Fixed) -> Value:
    """The float: a whole number, exactly."""
    return code.cast("sitofp", integer_of(code, fixed), FLOAT)._replace(fixed=fixed)


def integer_of(code: Code, fixed: Fixed) -> Value:
    """The integer that a whole number is."""
    if fixed.places > 0:
        return code.binary("ashr", INT, fixed.number, fixed.places)
    return code.binary("shl", INT, fixed.number, -fixed.places) if fixed.places else fixed.number


def product(code: Code, plain: Value, x: Any, y: Any) -> Value:
    """What is known of the product `plain` of x and y: of a fixed number and a power of two, or a mask, it is fixed."""
    for one, other in ((x, y), (y, x)):
        if isinstance(one, Value) and one.kind == MASK and isinstance(other, (int, float)) and 0.0 < other < 2.0**127:
            # A mask is 1 or 0, and the number is positive: to choose it or 0 has the bits of the product.
            return code.select(one, other, 0.0, FLOAT)
        if isinstance(one, Value) and one.fixed is not None:
            return plain._replace(fixed=_fixed_product(code, one.fixed, other))
    return plain


def _fixed_product(code: Code, fixed: Fixed, y: Any) -> Fixed | None:
    if isinstance(y, Value):
        if y.kind != MASK:
            return None
        least, most = min(fixed.least, 0.0), max(fixed.most, 0.0)
        number = code.select(y, fixed.number, 0, INT)
        return fixed._replace(number=number, least=least, most=most)
    mantissa, exponent = frexp(y)
    places = fixed.places - (exponent - 1)
    if mantissa != 0.5 or not -8 <= places <= 32 or max(-fixed.least, fixed.most) * y > 2.0**DIGITS:
        return None
    return fixed._replace(places=places, least=fixed.least * y, most=fixed.most * y)


def limit_places(code: Code, x: Any, most: int) -> Value:
    """Moves numbers off those that lie halfway between two bf16 numbers, or near that."""
    bits = code.bits(x)
    low = code.binary("ashr", INT, code.binary("shl", INT, bits, 16), 16)
    missing = code.call("smax", INT, code.binary("sub", INT, -most, low), 0)
    moved = code.float_of(code.binary("add", INT, bits, missing))
    return moved._replace(limited=(x, most)) if isinstance(x, Value) and 0 < most < 0x8000 else moved


def places(code: Code, x: Any) -> Value:
    """The lower half of the bits, as a number with a sign."""
    # Of a number that `limit_places` moved, these are the limited places of the one before, which need not move.
    before, most = (x.limited if isinstance(x, Value) else None) or (x, 0x8000)
    low = code.binary("shl", INT, code.bits(before), 16)
    if most < 0x8000:
        low = code.call("smax", INT, low, -(most << 16))
    return float_of(code, at_top(low, 16)._replace(least=-float(most)))


def beyond(code: Code, x: Any, n: Any) -> Value:
    """Adds n to the bits of x."""
    is_known = isinstance(n, Value) and n.fixed is not None and n.fixed.is_whole
    added = integer_of(code, n.fixed) if is_known else to_int32(code, n)
    return code.float_of(code.binary("add", INT, code.bits(x), added))


def limited(code: Code, x: Any, comparison: str, limit: float) -> Value:
    """`limit` where x is beyond it; NaN stays."""
    return code.select(code.compare(f"fcmp {comparison}", FLOAT, x, limit), limit, x, FLOAT)


def to_integer(code: Code, x: Any, limits: tuple[int, int]) -> Value:
    """Rounds to a whole number, to nearest even, within limits."""
    low, high = limits
    fixed = x.fixed if isinstance(x, Value) else None
    if fixed is not None and fixed.is_whole and low <= fixed.least and fixed.most <= high:
        # A whole number within the limits is rounded already, and keeps what is known of it.
        return x  # type: ignore[no-any-return]
    rounded = limited(code, limited(code, code.call("roundeven", FLOAT, x), "olt", low), "ogt", high)
    word = _rounded_word(code, x, limits)
    if fixed is None:  # it may be NaN
        return rounded._replace(word=word)
    number = code.binary("sub", INT, word, ROUNDER_BITS)
    return rounded._replace(word=word, fixed=Fixed(number, 0, 0, low, high))


def _rounded_word(code: Code, x: Any, limits: tuple[int, int]) -> Value:
    """The same as the last bits of an integer; 0 for NaN."""
    low, high = limits
    fixed = x.fixed if isinstance(x, Value) else None
    # An integer of at most 24 bits is an fp32 number exactly, and the power of two rounds nothing.
    if fixed is not None and 32 - fixed.zeros <= DIGITS:
        number = code.binary("fmul", FLOAT, code.cast("sitofp", fixed.number, FLOAT), 2.0**-fixed.places)
    else:
        fixed, number = None, x
    if fixed is None or fixed.most > high:
        number = limited(code, number, "ogt", high)
    if fixed is None or fixed.least < low:
        number = limited(code, number, "olt", low)
    rounded = code.binary("fadd", FLOAT, number, ROUNDER)
    if fixed is None:
        # The bits of a NaN are no number at all; those of 0.0 are stored as 0.
        rounded = code.select(code.compare("fcmp ord", FLOAT, x, x), rounded, 0.0, FLOAT)
    return code.bits(rounded)


def to_int32(code: Code, x: Any) -> Value:
    """A whole number of int32 as an integer; 0 for NaN."""
    # The conversion of a NaN is not defined. LLVM's saturating one is, as 0, but takes vectors apart: it made whole
    # updates three times slower.
    is_number = code.compare("fcmp ord", FLOAT, x, x)
    return code.cast("fptosi", code.select(is_number, x, 0.0, FLOAT), INT)


def word_of(code: Code, x: Value) -> Fixed:
    """A whole number as it is to be stored: an integer, of whose first bits nothing is known."""
    if x.word is None and x.fixed is not None and x.fixed.is_whole:
        return x.fixed
    return Fixed(to_int32(code, x) if x.word is None else x.word, 0, 0, 0.0, 0.0)


Pair = tuple[Value, Value]


@dataclass(frozen=True)
class Word:
    """The words of one dtype."""

    piece: str
    """The type in which a pair of words is loaded and stored."""
    split: Callable[[Code, Value, int], Value]
    """The floats with even (0) or odd (1) numbers in a vector of pieces."""
    join: Callable[[Code, Value, Value], Value]
    """The pieces of two vectors of floats, which are numbers of the type."""
    widened: str | None = None
    """How pieces of 16 bits become such of 32 once they are loaded."""


def _split_bf16(code: Code, pieces: Value, part: int) -> Value:
    bits = code.binary("and", INT, pieces, UPPER_HALF) if part else code.binary("shl", INT, pieces, 16)
    return code.float_of(bits)


def _join_bf16(code: Code, even: Value, odd: Value) -> Value:
    first = code.binary("lshr", INT, code.bits(even), 16)
    return code.binary("or", INT, first, code.binary("and", INT, code.bits(odd), UPPER_HALF))


def _split_fp32(code: Code, pieces: Value, part: int) -> Value:
    """A piece is a number of 64 bits, so a vector of pieces is one of twice as many floats."""
    both = code.op(FLOAT, f"bitcast {code.type_of('i64')} {pieces.text} to {code.type_of(FLOAT, 2)}").text
    return code.shuffle(both, "poison", FLOAT, 2 * code.width, list(range(part, 2 * code.width, 2)))


def _join_fp32(code: Code, even: Value, odd: Value) -> Value:
    lanes = [lane for j in range(code.width) for lane in (j, code.width + j)]
    both = code.shuffle(even.text, odd.text, FLOAT, code.width, lanes).text
    return code.op("i64", f"bitcast {code.type_of(FLOAT, 2)} {both} to {code.type_of('i64')}")


def _split_int16(code: Code, pieces: Value, part: int) -> Value:
    top = code.binary("and", INT, pieces, UPPER_HALF) if part else code.binary("shl", INT, pieces, 16)
    return float_of(code, at_top(top, 16))


def _split_int8(code: Code, pieces: Value, part: int) -> Value:
    if not part:
        return float_of(code, at_top(code.binary("shl", INT, pieces, 24), 8))
    # Pieces had their sign extended when they were loaded: with the lower byte masked, it is 256 times the number.
    return float_of(code, Fixed(code.binary("and", INT, pieces, -0x100), 8, 8, -128.0, 127.0))


def _split_uint8(code: Code, pieces: Value, part: int) -> Value:
    number = code.binary("lshr", INT, pieces, 8) if part else code.binary("and", INT, pieces, 0xFF)
    return float_of(code, Fixed(number, 0, 0, 0.0, 255.0))


def _join_int16(code: Code, even: Value, odd: Value) -> Value:
    first, second = word_of(code, even), word_of(code, odd)
    # Integers at the top of their words need no masks: all bits below them are 0.
    if first.places == second.places == 16:
        return code.binary("or", INT, code.binary("lshr", INT, first.number, 16), second.number)
    low = code.binary("and", INT, integer_of(code, first), 0xFFFF)
    return code.binary("or", INT, low, code.binary("shl", INT, integer_of(code, second), 16))


def _join_bytes(code: Code, even: Value, odd: Value) -> Value:
    first, second = (integer_of(code, word_of(code, x)) for x in (even, odd))
    low = code.binary("and", INT, first, 0xFF)
    return code.cast("trunc", code.binary("or", INT, low, code.binary("shl", INT, second, 8)), "i16")


def _split_fp16(code: Code, pieces: Value, part: int) -> Value:
    first = code.binary("lshr", INT, pieces, 16) if part else pieces
    return code.cast("fpext", code.cast("bitcast", code.cast("trunc", first, "i16"), "half"), FLOAT)


def _join_fp16(code: Code, even: Value, odd: Value) -> Value:
    words = (code.cast("bitcast", code.cast("fptrunc", x, "half"), "i16") for x in (even, odd))
    first, second = (code.cast("zext", word, INT) for word in words)
    return code.binary("or", INT, first, code.binary("shl", INT, second, 16))


WORDS: Mapping[torch.dtype, Word] = MappingProxyType(
    {
        torch.bfloat16: Word(INT, _split_bf16, _join_bf16),
        torch.float16: Word(INT, _split_fp16, _join_fp16),  # of gradients: no update stores such words
        torch.float32: Word("i64", _split_fp32, _join_fp32),
        torch.int8: Word("i16", _split_int8, _join_bytes, "sext"),
        torch.int16: Word(INT, _split_int16, _join_int16),
        torch.uint8: Word("i16", _split_uint8, _join_bytes, "zext"),
    }
)
"""The dtypes of tensors that a kernel reads and writes."""


def load(code: Code, dtype: torch.dtype, pointer: str, at: str, far: str | None = None) -> Value:
    """The pieces in memory from the element number `at` on: twice as many words as a vector has elements.

    Memory is asked for some elements ahead, or from the element number `far` on; of `at` itself, nothing is.
    """
    word = WORDS[dtype]
    place = address(code, pointer, at, dtype)
    if far != at:
        _fetch(code, address(code, pointer, at if far is None else far, dtype), dtype, AHEAD if far is None else 0)
    # A tensor may be a view that begins at any element, so a vector is aligned to one word only.
    pieces = code.op(word.piece, f"load {code.type_of(word.piece)}, ptr {place}, align {dtype.itemsize}")
    return pieces if word.widened is None else code.cast(word.widened, pieces, INT)


AHEAD, LINE = 512, 64
"""How many elements ahead memory is asked for; bytes of a line of the cache."""


def _fetch(code: Code, place: str, dtype: torch.dtype, ahead: int) -> None:
    """Asks for what a later step loads."""
    # By itself a CPU follows fewer streams than an update has, and none into another page. A step of `plus` takes an
    # eighth to a fifth less time out of cache for it, and no more in cache.
    for line in range(0, 2 * code.width * dtype.itemsize, LINE):
        far = code.op("ptr", f"getelementptr i8, ptr {place}, i64 {ahead * dtype.itemsize + line}").text
        code.put(f"call void @llvm.prefetch.p0(ptr {far}, i32 0, i32 3, i32 1)")


def store(code: Code, dtype: torch.dtype, pointer: str, at: str, pair: Pair) -> None:
    """Stores the elements of a pair from the number `at` on."""
    pieces = WORDS[dtype].join(code, *pair)
    place = address(code, pointer, at, dtype)
    code.put(f"store {code.type_of(pieces.kind)} {pieces.text}, ptr {place}, align {dtype.itemsize}")


def address(code: Code, pointer: str, at: str, dtype: torch.dtype) -> str:
    """The address of an element."""
    return code.op("ptr", f"getelementptr inbounds i{8 * dtype.itemsize}, ptr {pointer}, i64 {at}").text
