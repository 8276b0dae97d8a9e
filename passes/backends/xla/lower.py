"""Lowers an update, for one parameter shape, to one XLA user computation (`nodes`; with stages: `stages`).

A user computation enters torch_xla's lazy graph as one node, so that tracing is cheap, and its hash includes the
wiring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.fx as fx

from collage_neuron import torch_privates
from collage_neuron.numerics.reductions import REDUCTIONS, count
from collage_neuron.numerics.storage import storage_of
from collage_neuron.passes.backends.xla.blocks import gather, spread, words_of
from collage_neuron.passes.backends.xla.compilers import XLA, Compiler, begin
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape
from collage_neuron.passes.backends.xla.nodes import lower_node
from collage_neuron.passes.ir.update import Update

Dims = tuple[int, ...]


class Own(NamedTuple):
    """The shapes of the components of a parameter that a step sees in another one (`update.seen_as`)."""

    reads: tuple[Dims, ...]
    """In the order of `update.inputs`."""
    writes: tuple[Dims, ...]
    """In the order of `update.outputs`."""

    @classmethod
    def of(cls, update: Update, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor]) -> Own | None:
        """Those of these tensors; None if the step sees all of them in their own shape."""
        shapes = (tuple(tuple(t.shape) for t in tensors) for tensors in (reads, writes))
        return None if update.seen_as is None else cls(*shapes)


def write_hlo(
    update: Update, dims: Dims, dtypes: Sequence[torch.dtype], own: Own | None = None, compiler: Compiler = XLA
) -> tuple[Computation, bytes]:
    """The HLO of `update` for parameters of shape `dims` whose components have `dtypes`: (readable, bytes).

    Its parameters are the components in the order of `update.inputs`, then the fp32 scalar vector. If components have
    shapes of their `own`, it computes in the shape `dims`.
    """
    hlo = begin("collage_update", compiler)
    parameters = [hlo.reshaped(x, dims) for x in components(hlo, update, dims, dtypes, own)]
    vector = hlo.parameter(Shape("f32", (len(update.scalars.entries),)))
    entries = [hlo.element(vector, i, dims) for i in range(len(update.scalars.entries))]
    index = [hlo.numbers(dims)] if update.draws else []
    inputs = (n for n in update.graph.graph.nodes if n.op == "placeholder")
    values = dict(zip(inputs, parameters + index + entries, strict=True))
    for node in update.graph.graph.nodes:
        if node.op == "call_function" and node.target not in REDUCTIONS:
            values[node] = lower_node(hlo, node, values, dims)
    results = update.only_stage.results
    measures = [r for r in results if r not in values]
    stored = [values[r] for r in results if r in values]
    for i, key in enumerate(update.outputs):
        if key in update.blocks:
            stored[i] = gather(hlo, stored[i], update.blocks[key])
        elif own is not None:
            stored[i] = hlo.reshaped(stored[i], own.writes[i])
    return hlo, hlo.module(stored + measured(hlo, measures, values, dims))


def components(
    hlo: Computation, update: Update, dims: Dims, dtypes: Sequence[torch.dtype], own: Own | None
) -> list[Instruction]:
    """The next parameters: the components of `update.inputs`, with a word for each element."""
    shapes = [dims] * len(dtypes) if own is None else own.reads
    return [
        _read(hlo, storage_of(dtype).hlo, shape, update.blocks.get(key))
        for key, dtype, shape in zip(update.inputs, dtypes, shapes, strict=True)
    ]


def _read(hlo: Computation, element: str, dims: Dims, block: int | None) -> Instruction:
    if block is None:
        return hlo.parameter(Shape(element, dims))
    return spread(hlo, hlo.parameter(Shape(element, words_of(dims, block))), dims, block)


def measured(
    hlo: Computation, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Instruction], dims: tuple[int, ...]
) -> list[Instruction]:
    """All sums and counts of an update as two vectors, f32 and s32, computed in one loop over the elements.

    Elements are added in rows, then the sums of the rows. In any order of additions, the error of a sum is less than
    (rows + length of a row) * 2**-24 of the sum of magnitudes. Counts are exact below 2**31.
    """
    if not nodes:
        return []
    terms = [_term(hlo, node, values, dims) for node in nodes]
    sums = hlo.sums(hlo.sums([hlo.reshape(x, rows(math.prod(dims))) for x in terms]))
    return [hlo.concatenate([x for x in sums if x.shape == Shape(element)]) for element in ("f32", "s32")]


def rows(n: int) -> tuple[int, int]:
    """Number and length of equal rows of n elements: as close to each other as n's divisors allow."""
    number = next((r for r in range(math.isqrt(n), 0, -1) if n % r == 0), 1)
    return number, n // number


def _term(hlo: Computation, node: fx.Node, values: Mapping[fx.Node, Instruction], dims: tuple[int, ...]) -> Instruction:
    """The summands: the values themselves, or 1 for each element to count."""
    (x,) = node.args
    assert isinstance(x, fx.Node)
    return hlo.add("convert", Shape("s32", dims), [values[x]]) if node.target is count else values[x]


def user_computation(module: bytes) -> Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]:
    """A function that runs the module whose bytes these are, on lazy tensors."""
    import torch_xla.core.xla_builder as xb  # an extra: imported only where parameters are on an XLA device

    computation = xb.computation_from_module_proto("collage_update", module)

    def call(tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        results: Sequence[torch.Tensor] = torch_privates.user_computation("xla::collage_update", tensors, computation)
        return results

    return call
