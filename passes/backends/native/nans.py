"""Which values, where they are NaN, have zeros in their last 16 bits: rounding these to bf16 need not look for NaN.

Rounding adds at most 0xFFFF to the bits of a number and cuts the last 16. Of a NaN with zeros there that leaves the
upper half as it is: the same NaN. With other bits there it might give infinity or -0, so these have to be looked for,
which takes a comparison and a move for each word, a seventh of the instructions of AdamW's update in pairs.

A NaN comes from memory, where words of 16 bits end in zeros as fp32, or is made by the CPU, whose own ends in zeros.
Arithmetic hands the NaN of an operand on, made quiet by a bit of the upper half (IEEE 754, 6.2.3; x86 and ARM do).
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping

import torch
import torch.fx as fx

from collage_neuron.numerics.eft import (
    capped,
    inverse_power_of_two,
    narrow,
    power_of_two,
    round_to,
    sqrt,
    stochastic_round,
    widen,
)

NARROW = frozenset({torch.bfloat16, torch.int8, torch.int16, torch.uint8})
"""The dtypes whose words give no other NaN. Those of fp16 have 13 zeros only."""

HANDED_ON = frozenset(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, torch.where, torch.maximum,
     torch.minimum, torch.abs, sqrt, capped, round_to, narrow, widen}
)  # fmt: skip
"""The operations whose result is such a value if all operands are. Functions of the C library are not among them."""

ALWAYS = frozenset({stochastic_round, power_of_two, inverse_power_of_two})
"""Those whose result is one whatever the operands are: they keep bits of the upper half only."""


def with_short_nans(
    nodes: Iterable[fx.Node], dtypes: Mapping[fx.Node, torch.dtype], numbers: Container[str]
) -> frozenset[fx.Node]:
    """The nodes with such values; `dtypes` are those of the tensors that are read, other placeholders are scalars.

    `numbers` are the scalars that earlier stages found in tensors, with any NaN of those.
    """
    found: set[fx.Node] = set()
    for node in nodes:
        if node.op == "placeholder":
            is_short = dtypes[node] in NARROW if node in dtypes else node.name not in numbers
        elif node.target in ALWAYS or (node.target in (round_to, narrow) and node.args[1] == "bf16"):
            is_short = True
        else:
            is_short = node.target in HANDED_ON and found.issuperset(node.all_input_nodes)
        if is_short:
            found.add(node)
    return frozenset(found)
