"""Words that are not one number an element: blocks that share one, halves of bits, and random bits.

Blocks of elements share words: values of one element for each block, and how they meet those of elements.

Given: `power = power_of_two(block_max(x, 128));  y = x * inverse_power_of_two(power)`
Result: `power = block_max(power_of_two(x));  inverse = inverse_power_of_two(power);  y = multiply(x, Spread(inverse))`

where power and inverse have one element for each block. The power of two is taken first, by a mask on bits: of these
the maximum is the same, and it never meets a NaN, for which an engine's maximum is not documented; infinity stands for
one. A `Spread` is one number a partition of an instruction that runs once for each block, as numbers of the step are.

Halves: an fp32 number next to a bf16 one is that one's bits and a signed count of fp32's last places below them.
Engines read and write both halves as int16, in every second element of a view of the tile, so that no instruction adds
32-bit integers, which GpSimd alone does as such.

Given: `x1 = beyond(hi, lo * 256.0);  y = limit_places(x, 32512);  n = places(y)`
Result: `lower(x1) = int16(lo * 256.0);  upper(x1) = int16(bits(hi) - (lo < 0.0));  y = x;
lower(y) = int16(maximum(lower(y), -32512.0))`, and what reads n reads lower(y)

Random bits are drawn by the generator of the vector engine, not computed from the number of an element. Threefry takes
some hundred operations on 32-bit integers for every four draws, a fifth of them sums that wrap: ten times what a whole
step takes (docs/kernels.md). So whatever an update computes from the index of an element becomes draws.

Given: `bits = and_(words, 65535);  y = stochastic_round(x, bits)`, with words computed from `index`
Result: `bits = draw();  carry = lower(x) > bits and upper(x) != -1;  bits(y) = upper(x) + carry`

where lower and upper are the halves of an fp32 number, as uint16 and int16. A carry rounds up in magnitude.
"""

from __future__ import annotations

import hashlib
import math
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics import eft
from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.passes.backends.nki.ir import Column, Operand, Spread, Tile, Value, View
from collage_neuron.passes.ir.scalars import DRAWING
from collage_neuron.passes.ir.update import Update

SPREADS = frozenset({"add", "subtract", "multiply", "maximum", "minimum"})
"""Operations on a value of elements and one of blocks."""

SYMMETRIC = SPREADS - {"subtract"}


def spread(op: str, args: tuple[Operand, ...], name: str) -> tuple[tuple[Operand, ...], bool]:
    """The operands of `op`, in which values of blocks are spread over elements, and whether all are of blocks.

    Raises:
        UnsupportedUpdate: the operation cannot take values of both kinds.
    """
    tiles = [x for x in args if isinstance(x, Tile)]
    small = [isinstance(x, Value) and x.block for x in tiles]
    if all(small) or not any(small):
        return args, bool(small) and all(small)
    # A word becomes the number that an instruction takes for each partition, and those have to be fp32 ([ISA]).
    if op not in SPREADS or any(not isinstance(x, Value) or (x.block and x.dtype != "float32") for x in tiles):
        raise UnsupportedUpdate(
            f"the update computes {op} of words that blocks share and of elements (node {name}), which no kernel does "
            f"yet; use backend='xla', or one of {', '.join(sorted(SPREADS))}"
        )
    # An instruction's number is its second operand, so the tile comes first; `reverse0` turns a difference.
    mixed = [Spread(x) if isinstance(x, Value) and x.block else x for x in args]
    return tuple(reversed(mixed) if isinstance(mixed[0], Spread) and op in SYMMETRIC else mixed), False


def largest_power(new: Callable[..., Value], args: Sequence[Any], node: fx.Node) -> Value:
    """The power of two of the largest magnitude of a block.

    Raises:
        UnsupportedUpdate: the blocks have another size, or something reads the magnitude itself.
    """
    x, size = args
    if size != BLOCK or any(user.target is not eft.power_of_two for user in node.users) or isinstance(x, View):
        raise UnsupportedUpdate(
            f"the update uses the largest magnitude of blocks of {size} (node {node.name}); kernels for NKI compute "
            f"its power of two alone, for blocks of {BLOCK}: use backend='xla'"
        )
    if x.dtype != "float32":
        x = new("copy", (x,), "float32", f"{node.name}_wide")
    power = new("power_of_two", (x,), "float32", f"{node.name}_power")
    return power if power.block else new("block_max", (power,), "float32", node.name, True)


def is_floor(mask: Operand, x: Operand, y: Operand) -> bool:
    """Returns True for `where(x > y, x, y)` of a power of two of blocks and a number."""
    # Neither is NaN (infinity stands for one), so that the choice is a maximum, whatever engines make of NaN there.
    plain = isinstance(x, Value) and x.op == "block_max" and not isinstance(y, (*Tile, Column))
    return plain and isinstance(mask, Value) and mask.op == "greater" and mask.args == (x, y)


New = Callable[[str, tuple[Operand, ...], str, str], Value]
"""Makes the value of an operation, with these operands, type and name."""


def _places(new: New, args: Sequence[Any], name: str) -> View:
    return View(_tile(args[0], name), half=0)


def _limit_places(new: New, args: Sequence[Any], name: str) -> Value:
    # The lower halves are changed in the tile itself, and others may read x as it was.
    own = new("own_copy", (_tile(args[0], name),), "float32", f"{name}_own")
    return new("limit_places", (own, -float(args[1])), "float32", name)


def _beyond(new: New, args: Sequence[Any], name: str) -> Value:
    """The lower halves are the places; the upper ones a bf16 number's bits, less 1 where the places are negative."""
    upper, count = (_tile(x, name) for x in args)
    if upper.dtype != "bfloat16":
        upper = new("copy", (upper,), "bfloat16", f"{name}_upper")  # exact: it is a bf16 number
    factors, scale = _factors(count)
    base = factors[0]
    for factor in factors[1:]:
        base = _masked(new, base, factor, f"{name}_places")
    scaled = base if scale == 1 else new("multiply", (base, scale), "float32", f"{name}_scaled")
    lower = new("lower", (scaled,), "float32", name)
    # VectorE computes in fp32, which adds any two int16 exactly: neither half needs a sum of 32-bit integers.
    return new("upper", (lower, View(upper), base), "float32", name)


def _tile(x: Any, name: str) -> Value:
    if isinstance(x, Value):
        return x
    raise UnsupportedUpdate(
        f"the update takes the bits of a number of the step apart (node {name}), which no kernel does yet; use "
        "backend='xla'"
    )


def _factors(x: Value) -> tuple[list[Value], float]:
    """The tiles and the power of two of which x is the product, in any order."""
    if x.op != "multiply" or x.dtype != "float32":
        return [x], 1.0
    factors: list[Value] = []
    scale = 1.0
    for a in x.args:
        # Such a power changes neither a rounding nor the sign, for which `_beyond` asks: so it is taken out of the
        # product, and multiplied in where ScalarE does it on the way.
        if isinstance(a, float) and a >= 1 and math.frexp(a)[0] == 0.5:
            scale *= a
        elif isinstance(a, Value):
            inner, more = _factors(a)
            factors, scale = [*factors, *inner], scale * more
        else:
            return [x], 1.0
    return factors, scale


def _masked(new: New, x: Value, mask: Value, name: str) -> Value:
    """x * mask; where the mask says what is not 0, with two ways to make it, of which an instruction reads one."""
    if mask.op != "not_equal" or mask.args[1] != 0.0:
        return new("multiply", (x, mask), "float32", name)
    # From v3 on VectorE makes a bf16 mask four times faster. On v2, where ScalarE has time, that makes a sign, whose
    # square is the mask too.
    fast = new(mask.op, mask.args, "bfloat16", f"{name}_mask")
    sign = new("sign", mask.args[:1], "float32", f"{name}_sign")
    return new("masked", (x, fast, new("multiply", (sign, sign), "float32", f"{name}_square")), "float32", name)


ON_HALVES: Mapping[Any, Callable[[New, Sequence[Any], str], Operand]] = {
    eft.places: _places,
    eft.limit_places: _limit_places,
    eft.beyond: _beyond,
}


INDEX = "index"
"""The placeholder with the numbers of the elements, and what stands for all that is computed from it."""

READERS = (eft.widen, eft.stochastic_round)
"""Operations that read random bits as a number from 0 to 65535."""


def check_is_draw(node: fx.Node) -> None:
    """Raises UnsupportedUpdate if a node is not 16 bits of a random word."""
    if (node.target, node.args[1:]) not in ((operator.and_, (0xFFFF,)), (eft.shift_right, (16,))):
        raise UnsupportedUpdate(
            f"the update reads random bits in a way that no kernel does (node {node.name}); use backend='xla'"
        )


def stochastic(new: Callable[..., Value], x: Value, random: Value, name: str) -> Value:
    """`stochastic_round`: x rounded up in magnitude where its lower half is larger than the random number."""
    if x.dtype != "float32":
        x = new("copy", (x,), "float32", f"{name}_wide")
    upper = View(x, half=1)
    # Of 2**16 random numbers exactly lower(x) are smaller, so a carry has the probability lower(x) / 2**16.
    larger = new("greater", (View(x, half=0, dtype="uint16"), random), "float32", f"{name}_larger")
    # An upper half of -1 is a NaN of all ones, which a carry would make 0.
    number = new("not_equal", (upper, -1.0), "float32", f"{name}_number")
    carry = new("logical_and", (number, larger), "float32", f"{name}_carry")
    return new("carried", (upper, carry), "bfloat16", name)


def seed_of(steps: Iterable[tuple[Update, torch.Tensor]], cores: int = 1) -> torch.Tensor:
    """The seeds of a kernel, [1, cores] int32, from the scalar vectors of its updates: hashes of what they draw from.

    That is seed and number of the step, and of each parameter its index, and that of its first element: two shards do
    not draw alike, nor do two cores.
    """
    # Python's own hash of bytes differs between processes, and replicas and resumed runs need the same seed.
    digest = hashlib.blake2b(digest_size=4)
    for update, vector in steps:
        entries = zip(update.scalars.entries, vector.tolist(), strict=True)
        digest.update(b"".join(struct.pack("<d", x) for (_, scalar), x in entries if scalar.op in DRAWING))
    seeds: list[int] = []
    for _ in range(cores):
        seeds += struct.unpack("<i", digest.digest())
        digest.update(b"another core")
    # Before v4 the generator is a shift register, which would stay at 0: an odd seed is never 0.
    return torch.tensor([[seed | 1 for seed in seeds]], dtype=torch.int32, device="cpu")
