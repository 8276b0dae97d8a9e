"""A counter-based random generator: Threefry-2x32 with 20 rounds, in integer operations that every backend has.

A counter-based generator has no state: number i is a function of a key and of i, so the bits do not depend on the
order, the pieces or the device of the computation. Algorithm, constants and test vectors: Salmon, Moraes, Dror and
Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011, and its library Random123. It needs additions, exclusive
ors and rotations of 32-bit words: no multiplications and no 64-bit words.

The functions work on int32 tensors, whose sums wrap around, and on `torch.fx.Proxy`, like those of `eft`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from collage_neuron.numerics.eft import Value, shift_right

# Threefry-2x32 as in Random123: its rotation distances, and the parity constant of its key schedule.
ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
PARITY = 0x1BD11BDA
ROUNDS = 20


class Words(NamedTuple):
    """Two 32-bit words, as int32."""

    first: Value
    second: Value


def rotate_left(x: Value, k: int) -> Value:
    """x rotated left by k bits."""
    return (x << k) | shift_right(x, 32 - k)


def threefry(key: Words, counter: Words) -> Words:
    """64 random bits: a bijection of the counter, a different one for each key."""
    keys = (*key, key.first ^ key.second ^ PARITY)
    x, y = counter.first + keys[0], counter.second + keys[1]
    for i in range(ROUNDS):
        x = x + y
        y = rotate_left(y, ROTATIONS[i % 8]) ^ x
        if i % 4 == 3:  # a part of the key after every fourth round
            n = i // 4 + 1
            x, y = x + keys[n % 3], y + keys[(n + 1) % 3] + n
    return Words(x, y)


def halves(words: Words) -> tuple[Any, ...]:
    """Four int32 numbers from 0 to 65535, with 16 random bits each."""
    return tuple(half for word in words for half in (word & 0xFFFF, shift_right(word, 16)))
