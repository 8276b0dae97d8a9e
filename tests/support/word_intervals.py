"""What operations on words and on bits make of intervals: those of integer words, of blocks, and of random draws.

Each takes the ends of its operands, float64 or int32 tensors, and returns those of its result: for every number between
the ends of the operands the result lies between them. An operation that rises is run on both ends; `_RISES` says where
the others do, and anywhere else an interval of more than one number raises AssertionError.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from collage_neuron.numerics import eft

Ends = tuple[Tensor, Tensor]


def magnitude(x: Ends) -> Ends:
    """The ends of |x|."""
    low, high = x[0].abs(), x[1].abs()
    straddles = (x[0] < 0) & (x[1] > 0)
    return torch.where(straddles, 0.0, torch.minimum(low, high)), torch.maximum(low, high)


def _power_of_two(x: Ends) -> Ends:
    low, high = magnitude(x)
    return eft.power_of_two(low.float()).double(), eft.power_of_two(high.float()).double()


def _inverse_power_of_two(x: Ends) -> Ends:
    low, high = magnitude(x)
    return eft.inverse_power_of_two(high.float()).double(), eft.inverse_power_of_two(low.float()).double()


def _block_max(x: Ends, k: int) -> Ends:
    low, high = magnitude(x)
    return eft.block_max(low, k), eft.block_max(high, k)


def _places(x: Ends) -> Ends:
    """Between numbers whose nearest bf16 is the same one places go up or down; elsewhere they may be any."""
    low, high = (end.float() for end in x)
    nearest = [(end.view(torch.int32).long() + 0x8000) >> 16 for end in (low, high)]  # half a place is the next one's
    one = (nearest[0] == nearest[1]) | (low == high)
    found = [eft.places(end).double() for end in (low, high)]
    return torch.where(one, torch.minimum(*found), -(2.0**15)), torch.where(one, torch.maximum(*found), 2.0**15 - 1)


def _limit_places(x: Ends, most: int) -> Ends:
    """Rises: of the numbers next to one bf16 number it moves some to the first of the others."""
    low, high = (eft.limit_places(end.float(), most).double() for end in x)
    return low, high


def _beyond(x: Ends, n: Ends) -> Ends:
    """Rises with x, and with n as far as x is positive. Formats have no places beside a hi of 0 (integer_words.py)."""
    low = _numbers_beyond(x[0], torch.where(x[0] < 0, n[1], n[0]))
    return low, _numbers_beyond(x[1], torch.where(x[1] < 0, n[0], n[1]))


def _numbers_beyond(x: Tensor, n: Tensor) -> Tensor:
    return torch.where(x == 0, 0.0, eft.beyond(x.float(), n.float()).double())


def _stochastic_round(x: Ends, random: Ends) -> Ends:
    """Rises for the same random bits, since magnitudes do."""
    assert torch.equal(*random)
    low, high = (eft.stochastic_round(end.float(), random[0]).double() for end in x)
    return low, high


ON_WORDS: dict[Any, Callable[..., Ends]] = {
    eft.power_of_two: _power_of_two,
    eft.inverse_power_of_two: _inverse_power_of_two,
    eft.block_max: _block_max,
    eft.places: _places,
    eft.limit_places: _limit_places,
    eft.beyond: _beyond,
    eft.stochastic_round: _stochastic_round,
}
"""Operations of fp32 values, by their ends; other arguments as they are."""


# Operations of int32 -------------------------------------------------------------------------------------------------

ON_BITS = frozenset({eft.bits_of, eft.from_bits, eft.whole, eft.shift_right})
"""Operations of int32 that are so by name; the others by an operand."""

_RISES: dict[Any, Callable[..., Tensor]] = {
    eft.bits_of: lambda x: x[0] > 0,  # both ends: a zero may have lost its sign
    eft.from_bits: lambda n: n[0] >= 0,
    eft.whole: lambda x: x[0] == x[0],
    eft.shift_right: lambda n, _: n[0] >= 0,
    operator.lshift: lambda n, k: (n[0] >= 0) & ((n[1] << k[1]) >> k[1] == n[1]),
    operator.add: lambda n, m: (n[0] >= 0) & (m[0] >= 0) & (n[1] + m[1] >= 0),  # no sum wraps around
    operator.or_: lambda n, m: (n[0] >= 0) & (m[0] == m[1]) & (n[1] < (m[0] & -m[0])),  # all bits of m above those of n
}
"""Where an operation rises, though it has more than one number to work on."""


def on_bits(target: Any, *operands: Any) -> Ends:
    """The ends of an operation on int32, or between int32 and fp32."""
    ends = [x if isinstance(x, tuple) else (_int32(x), _int32(x)) for x in operands]
    ends = [(low.float(), high.float()) if low.is_floating_point() else (low, high) for low, high in ends]
    low, high = _run(target, [x[0] for x in ends]), _run(target, [x[1] for x in ends])
    decided = torch.stack(torch.broadcast_tensors(*(x[0] == x[1] for x in ends))).all(0)
    assert (decided | (_RISES[target](*ends) if target in _RISES else False)).all(), target
    return (low.double(), high.double()) if low.is_floating_point() else (low, high)


def _run(target: Any, operands: list[Tensor]) -> Tensor:
    if target is eft.shift_right:
        operands = [operands[0], operands[1].item()]  # type: ignore[list-item]  # how far is a number
    result: Tensor = target(*operands)
    return result


def _int32(x: int) -> Tensor:
    return torch.tensor(x, dtype=torch.int32)
