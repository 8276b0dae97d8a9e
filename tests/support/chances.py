"""Threefry on Python's integers, and how far the mean of independent numbers may be from its expectation."""

from __future__ import annotations

import math

from collage_neuron.numerics.threefry import ROTATIONS

MASK = 2**32 - 1


def threefry_of_integers(key: tuple[int, int], counter: tuple[int, int]) -> tuple[int, int]:
    """The algorithm on Python's integers, from the paper."""
    ks = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x, y = (counter[0] + ks[0]) & MASK, (counter[1] + ks[1]) & MASK
    for i in range(20):
        x = (x + y) & MASK
        r = ROTATIONS[i % 8]
        y = (y << r & MASK | y >> 32 - r) ^ x
        if i % 4 == 3:
            x, y = (x + ks[(i // 4 + 1) % 3]) & MASK, (y + ks[(i // 4 + 2) % 3] + i // 4 + 1) & MASK
    return x, y


def hoeffding(n: int, chance: float = 1e-9) -> float:
    """What the mean of n independent numbers within an interval of length 1 is off by with less than this chance."""
    return math.sqrt(math.log(2 / chance) / (2 * n))
