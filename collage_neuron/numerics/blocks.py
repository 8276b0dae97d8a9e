"""Tensors of words that blocks share: one word for K consecutive elements of a row, or the word of each element.

A row is the last dimension. Blocks never cross one, and the last block of a row may be shorter.
"""

from __future__ import annotations

from torch import Tensor

BLOCK = 128
"""Elements of a block, in the formats that have blocks."""


def spread(words: Tensor, block: int, length: int) -> Tensor:
    """The word of the block of each element, in rows of `length` elements."""
    return words.repeat_interleave(block, dim=-1)[..., :length]


def first_of_each(words: Tensor, block: int) -> Tensor:
    """One word for each block, of a tensor in which the elements of a block have the same."""
    return words[..., ::block]
