"""Graphs and updates as text, one line per node."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher
from itertools import groupby
from typing import Any

import torch.fx as fx

from collage_neuron import torch_privates
from collage_neuron.numerics.reductions import COLUMN, MATRIX, NUMBER, ROW
from collage_neuron.passes.ir.stage import BETWEEN, NUMBERS, REDUCTION
from collage_neuron.passes.ir.update import Update


def format_update(update: Update, parts: bool = False) -> str:
    """An update as text: its scalar vector, its stages, and what the results of each are.

    With `parts`, a line above operations says what they are part of (`Writer.begin`).
    """
    scalars = [f"  {line}" for line in str(update.scalars).splitlines()]
    if scalars and parts:
        scalars.insert(0, "  # numbers of the step:")
    return "\n".join([*scalars, *_stages(update, named=True, parts=parts), *_small(update)])


def format_stages(update: Update) -> str:
    """The graphs of an update as text; with the numbers of its stages if there are several."""
    return "\n".join([*_stages(update, named=False), *_small(update)])


def _small(update: Update) -> Iterator[str]:
    """Which number of its stages each state of one number becomes."""
    if len(update.stages) > 1:
        yield from (f"  state {name} = {number}" for name, number in update.small.items())


def _stages(update: Update, named: bool, parts: bool = False) -> Iterator[str]:
    for number, stage in enumerate(update.stages):
        if len(update.stages) > 1:
            yield f"  stage {number}, {stage}"
        extras = _extras(update) if stage is update.stages[-1] else ()
        yield format_graph(stage.body, parts) + (f" as ({', '.join([*stage.gives, *extras])})" if named else "")


def _extras(update: Update) -> Iterator[str]:
    """The results of the last stage after its outputs."""
    yield from (f"wanted {name}" for name in update.wanted)
    yield from (f"sum {name}" for name in update.sums)
    yield from (f"count {name}" for name in update.counts)


def format_stage_list(update: Update) -> Iterator[str]:
    """What each stage of an update with several computes, and what it reads: a line each."""
    if len(update.stages) > 1:
        yield "  Stages, one after another; each reads parameter, gradient and states as they were before the step:"
    for number, stage in enumerate(update.stages if len(update.stages) > 1 else ()):
        sizes = {name: SIZES[update.extents.get(name, NUMBER)] for name in stage.reduced}
        own = {size: [name for name, other in sizes.items() if other == size] for size in sizes.values()}
        sums = ", ".join(f"{', '.join(names)} ({size}{' each' * (len(names) > 1)})" for size, names in own.items())
        does = {REDUCTION: f"adds elements up to {sums}", NUMBERS: f"computes from such sums {sums}"}
        does[BETWEEN] = f"adds up those of all processes to {sums}"
        stores = f"computes each element and stores {', '.join(stage.outputs)}"
        reads = ", ".join([*stage.inputs, *stage.numbers])
        yield f"  {number}, {stage.kind}: {does.get(stage.kind, stores)}; reads {reads}"


SIZES = {
    NUMBER: "one number", ROW: "one for each row", COLUMN: "one for each column", MATRIX: "one for each matrix",
}  # fmt: skip
"""How many values a stage gives, by extent."""

GENERATOR = re.compile(r"  (\w+) = (?:whole|lshift|shift_right|or_|xor|and_|add)\(")
"""The lines of operations with which random bits are drawn; additions are among others too."""


def fold_draws(text: str) -> str:
    """The text of an update with one line in place of each stretch of operations that draw random bits."""
    lines, folded = text.splitlines(), list[str]()
    for drawing, group in groupby(lines, lambda line: GENERATOR.match(line) is not None):
        own = [*group]
        # Additions at the beginning may be the update's: a stretch begins with what only a generator does.
        first = next((i for i, line in enumerate(own) if drawing and " = add(" not in line), len(own))
        folded += own[:first]
        if own[first:]:
            folded += [_folded(own[first:], lines)] if drawing else own[first:]
    return "\n".join(folded)


def _folded(drawn: Sequence[str], lines: Sequence[str]) -> str:
    # Of all these results, random bits are those that the rest of the text reads.
    others = " ".join(line.partition(" = ")[2] or line for line in lines if line not in drawn)
    names = [line.split()[0] for line in drawn]
    bits = [name for name in names if re.search(rf"\b{name}\b", others)]
    return f"  {', '.join(bits)} = 16 random bits for each element: {len(drawn)} operations of a generator (Threefry)"


def format_changes(before: str, after: str) -> str:
    """What a pass has made of the text of an update: lines marked - are gone, those marked + are new.

    Stretches that stay as they were are counted. Where nothing stays, it is the whole text after the pass.
    """
    old, new = before.splitlines(), after.splitlines()
    # With `autojunk` lines that recur in long texts would not be matched (difflib, from 200 lines on).
    spans = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    if all(tag != "equal" for tag, *_ in spans):
        return after
    return "\n".join(line for tag, i, j, k, m in spans for line in _span(tag == "equal", old[i:j], new[k:m]))


def _span(same: bool, old: Sequence[str], new: Sequence[str]) -> Iterator[str]:
    if same and len(old) > 2:
        yield f"  ... {len(old)} lines as before"
    elif same:
        yield from old
    else:
        yield from (f"- {line.lstrip()}" for line in old)
        yield from (f"+ {line.lstrip()}" for line in new)


def format_graph(graph: fx.Graph, parts: bool = False) -> str:
    """A graph as text, one line per node: `name = operation(operands)`."""
    return "\n".join(f"  {line}" for line in _lines(graph, parts))


def _lines(graph: fx.Graph, parts: bool) -> Iterator[str]:
    part = ""
    for node in graph.nodes:
        if line := _format_node(node):
            if parts and node.meta.get("part", part) != part:
                part = node.meta["part"]
                yield f"# {part}:"
            yield line


def _format_node(node: fx.Node) -> str:
    if node.op == "placeholder":
        return ""
    if node.op == "output":
        return f"return {_format_value(node.args[0])}"
    operands = [_format_value(x) for x in node.args] + [f"{k}={_format_value(v)}" for k, v in node.kwargs.items()]
    return f"{node.name} = {_name(node.target)}({', '.join(operands)})"


def _name(target: Any) -> str:
    return str(target) if torch_privates.is_operation(target) else target.__name__


def _format_value(x: Any) -> str:
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k}: {_format_value(v)}" for k, v in x.items()) + "}"
    if isinstance(x, (tuple, list)):
        return "(" + ", ".join(map(_format_value, x)) + ")"
    return str(x)
