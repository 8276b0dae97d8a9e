"""Words that blocks of elements share: values of one element for each block, and how they meet those of elements.

Given: `power = power_of_two(block_max(x, 128));  y = x * inverse_power_of_two(power)`
Result: `power = block_max(power_of_two(x));  inverse = inverse_power_of_two(power);  y = multiply(x, Spread(inverse))`

where power and inverse have one element for each block. The power of two is taken first, by a mask on bits: of these
the maximum is the same, and it never meets a NaN, for which an engine's maximum is not documented; infinity stands for
one. A `Spread` is one number a partition of an instruction that runs once for each block, as numbers of the step are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.block_words import BLOCK
from collage_neuron.numerics.eft import block_max, power_of_two
from collage_neuron.passes.backends.nki.ir import Column, Operand, Spread, Tile, Value, View

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
    if op not in SPREADS or any(not isinstance(x, Value) or (x.block and x.dtype != "float32") for x in tiles):
        raise UnsupportedUpdate(
            f"the update computes {op} of words that blocks share and of elements (node {name}), which no kernel does "
            f"yet; use backend='xla', or one of {', '.join(sorted(SPREADS))}"
        )
    mixed = [Spread(x) if isinstance(x, Value) and x.block else x for x in args]
    return tuple(reversed(mixed) if isinstance(mixed[0], Spread) and op in SYMMETRIC else mixed), False


def is_block_max(node: Any) -> bool:
    """Returns True for the node of the largest magnitude of a block."""
    return isinstance(node, fx.Node) and node.target is block_max


def largest_power(new: Callable[..., Value], args: Sequence[Any], node: fx.Node) -> Value:
    """The power of two of the largest magnitude of a block.

    Raises:
        UnsupportedUpdate: the blocks have another size, or something reads the magnitude itself.
    """
    x, size = args
    if size != BLOCK or any(user.target is not power_of_two for user in node.users) or isinstance(x, View):
        raise UnsupportedUpdate(
            f"the update uses the largest magnitude of blocks of {size} (node {node.name}); kernels for NKI compute "
            f"its power of two alone, for blocks of {BLOCK}: use backend='xla'"
        )
    if x.dtype != "float32":
        x = new("copy", (x,), "float32", f"{node.name}_wide")
    power = new("power_of_two", (x,), "float32", f"{node.name}_power")
    return power if power.block else new("block_max", (power,), "float32", node.name, True)


def is_floor(mask: Operand, x: Operand, y: Operand) -> bool:
    """Returns True for `where(x > y, x, y)` of a power of two of blocks and a number: the larger one, never NaN."""
    plain = isinstance(x, Value) and x.op == "block_max" and not isinstance(y, (*Tile, Column))
    return plain and isinstance(mask, Value) and mask.op == "greater" and mask.args == (x, y)
