"""Words that the elements of a block share, as HLO: expanded when they are read, sliced when they are stored.

A block is k consecutive elements of a row, the last dimension; the last block of a row may be shorter.
"""

from __future__ import annotations

from collage_neuron.passes.backends.xla.bits import lower_bits_of, lower_from_bits
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction

_MAGNITUDE = 0x7FFFFFFF
"""The mask of all bits of an fp32 number but its sign."""


def words_of(dims: tuple[int, ...], k: int) -> tuple[int, ...]:
    """The dimensions of the words of blocks of `k` elements, for a parameter of shape `dims`."""
    return (*dims[:-1], -(-dims[-1] // k))


def spread(hlo: Computation, words: Instruction, dims: tuple[int, ...], k: int) -> Instruction:
    """Gives each element the word of its block."""
    shape = words.array
    repeated = hlo.repeat(words, k)
    return hlo.first(hlo.reshape(repeated, (*shape.dims[:-1], shape.dims[-1] * k)), dims[-1])


def gather(hlo: Computation, x: Instruction, k: int) -> Instruction:
    """The first element of each block."""
    return hlo.first(x, x.array.dims[-1], stride=k)


def lower_block_max(hlo: Computation, x: Instruction, k: int) -> Instruction:
    """`eft.block_max`: as bits, magnitudes are ordered like numbers and NaN is the largest; XLA's maximum loses NaN."""
    dims = x.array.dims
    words = words_of(dims, k)
    mask = hlo.broadcast(hlo.constant(_MAGNITUDE, "s32"), dims)
    bits = hlo.add("and", mask.shape, [lower_bits_of(hlo, x), mask])
    rows = hlo.reshape(hlo.pad(bits, words[-1] * k - dims[-1]), (*words, k))
    return lower_from_bits(hlo, spread(hlo, hlo.largest(rows), dims, k))
