"""Random bits of a kernel: drawn by the generator of the vector engine, not computed from the number of an element.

Threefry takes some hundred operations on 32-bit integers for every four draws, a fifth of them sums that wrap: ten
times what a whole step takes (docs/kernels.md). So whatever an update computes from the index of an element becomes
draws.

Given: `bits = and_(words, 65535);  y = stochastic_round(x, bits)`, with words computed from `index`
Result: `bits = draw();  carry = lower(x) > bits and upper(x) != -1;  bits(y) = upper(x) + carry`

where lower and upper are the halves of an fp32 number, as uint16 and int16. A carry rounds up in magnitude, with the
probability lower(x) / 2**16. Where the upper half is -1, a NaN of all ones, a carry would make it 0.
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.eft import bits_of, from_bits, shift_right, stochastic_round, widen
from collage_neuron.passes.backends.nki.ir import Value, View
from collage_neuron.passes.ir.scalars import DRAWING
from collage_neuron.passes.ir.update import Update

INDEX = "index"
"""The placeholder with the numbers of the elements, and what stands for all that is computed from it."""

READERS = (widen, stochastic_round)
"""Operations that read random bits as a number from 0 to 65535."""


def reason_against(update: Update) -> str | None:
    """Why no kernel can draw what `update` draws; None if one can."""
    if update.draws and any(n.target in (bits_of, from_bits) for n in update.graph.graph.nodes):
        return "kernels for NKI do not add random bits to those of a number (format ue5m3) yet; use backend='xla'"
    return None


def check_is_draw(node: fx.Node) -> None:
    """Raises UnsupportedUpdate if a node is not 16 bits of a random word."""
    if (node.target, node.args[1:]) not in ((operator.and_, (0xFFFF,)), (shift_right, (16,))):
        raise UnsupportedUpdate(
            f"the update reads random bits in a way that no kernel does (node {node.name}); use backend='xla'"
        )


def stochastic(new: Callable[..., Value], x: Value, random: Value, name: str) -> Value:
    """`stochastic_round`: x rounded up in magnitude where its lower half is larger than the random number."""
    if x.dtype != "float32":
        x = new("copy", (x,), "float32", f"{name}_wide")
    upper = View(x, half=1)
    larger = new("greater", (View(x, half=0, dtype="uint16"), random), "float32", f"{name}_larger")
    number = new("not_equal", (upper, -1.0), "float32", f"{name}_number")
    carry = new("logical_and", (number, larger), "float32", f"{name}_carry")
    return new("carried", (upper, carry), "bfloat16", name)


def seed_of(steps: Iterable[tuple[Update, torch.Tensor]], cores: int = 1) -> torch.Tensor:
    """The seeds of a kernel, [1, cores] int32, from the scalar vectors of its updates: hashes of what they draw from.

    That is seed and number of the step, and of each parameter its index, and that of its first element: two shards do
    not draw alike, nor do two cores. Seeds are odd, since a shift register would stay at 0.
    """
    digest = hashlib.blake2b(digest_size=4)
    for update, vector in steps:
        entries = zip(update.scalars.entries, vector.tolist(), strict=True)
        digest.update(b"".join(struct.pack("<d", x) for (_, scalar), x in entries if scalar.op in DRAWING))
    seeds: list[int] = []
    for _ in range(cores):
        seeds += struct.unpack("<i", digest.digest())
        digest.update(b"another core")
    return torch.tensor([[seed | 1 for seed in seeds]], dtype=torch.int32, device="cpu")


def is_drawn(*operands: Any) -> bool:
    """Returns True if an operand is computed from the index of an element."""
    return any(isinstance(x, str) and x == INDEX for x in operands)
