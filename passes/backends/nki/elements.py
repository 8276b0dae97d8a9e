"""The elementwise parts of updates by rows and columns, as kernels take them: values of rows are tensors of their own.

A kernel loads what has a value for each element. So a value of each row, column or matrix that a stage reads becomes an
operand with one for each element: fp32, 4 bytes more to load, and to write before that. Of a reduction the elements
that it adds up are stored as they are (`chunk_totals.py` adds them up), in fp32 too.

Given (a second moment of rows)::

    stage 0, reduction:    grad -> reduced0                        (the means of the rows of squares)
    stage 1, numbers:      exp_avg_sq_row, reduced0 -> number0
    stage 2, elementwise:  param, grad, number0 -> param

Result::

    elementwise:  grad -> operand0                                 (its squares)
    elementwise:  param, grad, number0 -> param                    (number0 is an input)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch.fx as fx

from collage_neuron.numerics.eft import widen
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.numerics.matrix_sums import ENDINGS, NUMBER
from collage_neuron.passes.ir.stage import ELEMENTWISE, REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

OPERAND = "operand"
"""What the elements that a reduction adds up are called, with a number."""


@cache
def elements_of(part: Update) -> Update:
    """A reduction or the last stage of an update by rows (`Update.parts`), with values of rows among its inputs.

    The outputs of a reduction are what it adds up, each once: `operands_of` has which result adds up which.
    """
    (stage,) = part.stages
    results, outputs = stage.results, part.outputs
    if stage.kind == REDUCTION:
        added = zip(operands_of(stage), _added(stage), strict=True)
        stored = {key: node for key, node in added if direct(node) is None}
        results, outputs = tuple(stored.values()), tuple(stored)
    spread = tuple(name for name in stage.numbers if part.extents.get(name, NUMBER) != NUMBER)
    numbers = tuple(name for name in stage.numbers if name not in spread)
    inputs = (*stage.inputs, *spread)
    new = Stage(ELEMENTWISE, _reordered(stage.body, inputs, numbers, results), inputs, outputs, numbers=numbers)
    formats = {**part.formats, **dict.fromkeys(spread, FORMATS["fp32"])}
    return replace(
        part, stages=(new,), inputs=inputs, outputs=outputs, formats=formats, extents={}, small={}, reads_small=()
    )


def operands_of(stage: Stage) -> list[str]:
    """For each result of a reduction the key of what it adds up: an output of `elements_of`, or a component."""
    added = _added(stage)
    numbers = list(dict.fromkeys(added))
    return [direct(node) or f"{OPERAND}{numbers.index(node)}" for node in added]


def direct(node: fx.Node) -> str | None:
    """The component that a node is, if it is one: no kernel is needed to store it."""
    while node.target is widen:
        (node,) = node.all_input_nodes
    return str(node.target) if node.op == "placeholder" else None


def _added(stage: Stage) -> list[fx.Node]:
    return [result.all_input_nodes[0] for result in stage.results]


def _reordered(body: fx.Graph, inputs: Sequence[str], numbers: Sequence[str], results: Sequence[fx.Node]) -> fx.Graph:
    """The graph with placeholders in the order of `Stage.body`, without reductions of rows and columns."""
    given = {str(node.target): node for node in body.nodes if node.op == "placeholder"}
    others = [name for name in given if name not in {*inputs, *numbers}]
    graph = fx.Graph()
    made = {given[name]: graph.placeholder(name) for name in (*inputs, *others, *numbers)}
    for node in body.nodes:
        if node.op == "call_function" and node.target not in ENDINGS:
            made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in results))
    return graph
