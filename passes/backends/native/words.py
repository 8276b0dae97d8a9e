"""Words in memory: how a pair of vectors is loaded from, and stored to, tensors of each dtype.

A pair holds the elements with even and with odd numbers of a piece of memory. In a 32-bit word two bf16 lie beside each
other: a shift gives the first as fp32, a mask the second. To take the first and the second half of the piece instead
would need shuffles, which cost a fifth of the whole update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch

from collage_neuron.passes.backends.native.code import FLOAT, INT, Code, Value
from collage_neuron.passes.backends.native.rules import UPPER_HALF, to_int32

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


def _split_integers(code: Code, pieces: Value, part: int, bits: int, back: str) -> Value:
    """Shifts each word to the top of 32 bits, and back: with its sign, if it has one."""
    wide = pieces if pieces.kind == INT else code.cast("zext", pieces, INT)
    top = code.binary("shl", INT, wide, 32 - bits * (1 + part))
    return code.cast("sitofp", code.binary(back, INT, top, 32 - bits), FLOAT)


def _join_integers(code: Code, even: Value, odd: Value, bits: int) -> Value:
    """A NaN becomes 0."""
    first, second = (to_int32(code, x) for x in (even, odd))
    low = code.binary("and", INT, first, (1 << bits) - 1)
    both = code.binary("or", INT, low, code.binary("shl", INT, second, bits))
    return both if bits == 16 else code.cast("trunc", both, "i16")


def _split_fp16(code: Code, pieces: Value, part: int) -> Value:
    first = code.binary("lshr", INT, pieces, 16) if part else pieces
    return code.cast("fpext", code.cast("bitcast", code.cast("trunc", first, "i16"), "half"), FLOAT)


def _join_fp16(code: Code, even: Value, odd: Value) -> Value:
    words = (code.cast("bitcast", code.cast("fptrunc", x, "half"), "i16") for x in (even, odd))
    first, second = (code.cast("zext", word, INT) for word in words)
    return code.binary("or", INT, first, code.binary("shl", INT, second, 16))


def _integer(bits: int, signed: bool = True) -> Word:
    kind, back = INT if bits == 16 else "i16", "ashr" if signed else "lshr"
    return Word(kind, partial(_split_integers, bits=bits, back=back), partial(_join_integers, bits=bits))


WORDS: Mapping[torch.dtype, Word] = MappingProxyType(
    {
        torch.bfloat16: Word(INT, _split_bf16, _join_bf16),
        torch.float16: Word(INT, _split_fp16, _join_fp16),
        torch.float32: Word("i64", _split_fp32, _join_fp32),
        torch.int8: _integer(8),
        torch.int16: _integer(16),
        torch.uint8: _integer(8, signed=False),
    }
)
"""The dtypes of tensors that a kernel reads and writes."""


def load(code: Code, dtype: torch.dtype, pointer: str, at: str) -> Value:
    """The pieces in memory from the element number `at` on: twice as many words as a vector has elements."""
    word = WORDS[dtype]
    place = address(code, pointer, at, dtype)
    return code.op(word.piece, f"load {code.type_of(word.piece)}, ptr {place}, align {dtype.itemsize}")


def store(code: Code, dtype: torch.dtype, pointer: str, at: str, pair: Pair) -> None:
    """Stores the elements of a pair from the number `at` on."""
    pieces = WORDS[dtype].join(code, *pair)
    place = address(code, pointer, at, dtype)
    code.put(f"store {code.type_of(pieces.kind)} {pieces.text}, ptr {place}, align {dtype.itemsize}")


def address(code: Code, pointer: str, at: str, dtype: torch.dtype) -> str:
    """The address of an element."""
    return code.op("ptr", f"getelementptr inbounds i{8 * dtype.itemsize}, ptr {pointer}, i64 {at}").text
