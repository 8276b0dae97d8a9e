"""Verify: an update is in explicit-rounding form, and no rounding got lost on the way to a backend."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.errors import VerificationError
from collage_neuron.numerics.eft import capped, narrow, round_to, shift_right, sqrt, stochastic_round, whole, widen
from collage_neuron.numerics.reductions import REDUCTIONS, count, total
from collage_neuron.numerics.storage import storage_named
from collage_neuron.passes.ir.update import Update

OPERATIONS = frozenset(
    {
        operator.add, operator.sub, operator.mul, operator.truediv, operator.neg,
        operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne,
        torch.logical_or, torch.logical_and, torch.logical_not, torch.where, torch.maximum, torch.minimum,
        torch.abs, torch.sign, capped, sqrt, torch.exp, torch.log, torch.pow,
        round_to, widen, narrow,
    }
)  # fmt: skip
"""The operations of explicit-rounding form. All are fp32 and elementwise; only `round_to` rounds below fp32."""

ON_BITS = frozenset({stochastic_round, whole, shift_right, operator.lshift, operator.and_, operator.or_, operator.xor})
"""Those of updates that draw random bits, which are int32; `stochastic_round` rounds below fp32 too."""


def verify(update: Update) -> None:
    """Raises VerificationError if `update` is not in explicit-rounding form, or a stored component is missing."""
    nodes = list(update.graph.graph.nodes)
    words = frozenset(f"c{i}" for i, (form, _) in enumerate(update.scalars.entries) if form in ("hi", "lo"))
    for node in nodes:
        if node.op == "call_function" and node.target not in OPERATIONS | ON_BITS | REDUCTIONS:
            raise VerificationError(f"{node.name}: {node.target} is not an operation of explicit-rounding form")
        if node.target in REDUCTIONS and any(user.op != "output" for user in node.users):
            raise VerificationError(f"{node.name} is a number of the whole update, and an operation computes with it")
        if node.target is narrow:
            _verify_store(node, words)
    for name, fmt in update.formats.items():
        missing = [key for key in fmt.keys(name) if key not in update.outputs]
        if missing:
            raise VerificationError(f"the update stores no {missing[0]}, a component of {name} ({fmt.name})")
    if len(set(update.outputs)) != len(update.outputs):
        raise VerificationError(f"a component is stored twice: {update.outputs}")
    _verify_results(update, nodes[-1])


def _verify_results(update: Update, output: fx.Node) -> None:
    """Components come first, then what is wanted, then sums, then counts: each at the place of its name."""
    (results,) = output.args
    assert isinstance(results, tuple)
    kinds = [None] * len(update.outputs + update.wanted) + [total] * len(update.sums) + [count] * len(update.counts)
    found = [n.target if isinstance(n, fx.Node) and n.target in REDUCTIONS else None for n in results]
    if found != kinds:
        raise VerificationError(
            f"the update returns {len(results)} values, not its {len(kinds)} outputs, sums and counts in order"
        )


def _verify_store(node: fx.Node, words: frozenset[str]) -> None:
    """What is stored in a format must already be one of its numbers: rounded to it, or a word of an expansion."""
    value, fmt = node.args
    if storage_named(fmt).dtype == torch.float32 or _is_rounded(value, fmt, words):
        return
    raise VerificationError(f"{node.name} stores {value} as {fmt} without a round_to: a rounding was lost")


def _is_rounded(value: Any, fmt: object, words: frozenset[str]) -> bool:
    """Whether every number `value` can be is one of `fmt`: a rounding, a stored word, or a choice or sign of such.

    `words` are the entries of the scalar vector that the host rounded to bf16.
    """
    if not isinstance(value, fx.Node):
        return bool(value == 0.0)
    if value.target is round_to:
        return value.args[1] == fmt
    if value.target is stochastic_round:
        return fmt == "bf16"
    if value.target in (operator.neg, torch.where, torch.maximum, torch.minimum, torch.abs):
        operands = value.args[1:] if value.target is torch.where else value.args
        return all(_is_rounded(v, fmt, words) for v in operands)
    return value.target is widen or value.target in words


def roundings(graph: fx.Graph) -> int:
    """How many `round_to` nodes a graph has."""
    return sum(node.target is round_to for node in graph.nodes)
