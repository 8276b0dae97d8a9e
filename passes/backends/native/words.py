"""Words in memory: how a pair of vectors is loaded from, and stored to, tensors of each dtype.

A pair holds the elements with even and with odd numbers of a piece of memory. In a 32-bit word two bf16 lie beside each
other: a shift gives the first as fp32, a mask the second. To take the first and the second half of the piece instead
would need shuffles, which cost a fifth of the whole update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from collage_neuron.passes.backends.native.integers import UPPER_HALF, at_top, float_of, integer_of, word_of
from collage_neuron.passes.backends.native.llvm_builder import FLOAT, INT, Code, Fixed, Value

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
    return float_of(code, Fixed(code.binary("and", INT, pieces, -0x100), 8, 8, -128.0, 127.0))


def _split_uint8(code: Code, pieces: Value, part: int) -> Value:
    number = code.binary("lshr", INT, pieces, 8) if part else code.binary("and", INT, pieces, 0xFF)
    return float_of(code, Fixed(number, 0, 0, 0.0, 255.0))


def _join_int16(code: Code, even: Value, odd: Value) -> Value:
    first, second = word_of(code, even), word_of(code, odd)
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
        torch.float16: Word(INT, _split_fp16, _join_fp16),
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
    pieces = code.op(word.piece, f"load {code.type_of(word.piece)}, ptr {place}, align {dtype.itemsize}")
    return pieces if word.widened is None else code.cast(word.widened, pieces, INT)


AHEAD, LINE = 512, 64
"""How many elements ahead memory is asked for; bytes of a line of the cache."""


def _fetch(code: Code, place: str, dtype: torch.dtype, ahead: int) -> None:
    """Asks for what a later step loads, since a CPU follows fewer streams, and none into another page, by itself.

    A step of `plus` takes an eighth to a fifth less time out of cache for it, and no more in cache.
    """
    code.declared.add("declare void @llvm.prefetch.p0(ptr, i32, i32, i32)")
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
