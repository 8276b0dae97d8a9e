"""Lowers an update in stages, for one parameter shape, to one XLA user computation: nothing waits for the host.

Given (LAMB)::

    stage 0, reduction:    param, grad -> reduced0, reduced1
    stage 1, numbers:      reduced0, reduced1 -> number0
    stage 2, elementwise:  param, grad, number0 -> param

the computation has all three, one after another. Values have the shape of their extent (`numerics.matrix_sums`), and
are repeated where they meet others. States without a value for each element are parameters of it too, and results.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.eft import sqrt
from collage_neuron.numerics.matrix_sums import ENDINGS, NUMBER, shape_of, view_of
from collage_neuron.numerics.reductions import REDUCTIONS
from collage_neuron.numerics.storage import storage_of
from collage_neuron.numerics.tensor_sums import OF_TENSOR
from collage_neuron.passes.backends.xla.blocks import gather
from collage_neuron.passes.backends.xla.compilers import XLA, Compiler, begin
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape
from collage_neuron.passes.backends.xla.lower import Dims, Own, components, measured, user_computation, write_hlo
from collage_neuron.passes.backends.xla.nodes import lower_node
from collage_neuron.passes.backends.xla.sums import Adder
from collage_neuron.passes.ir.stage import REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

ROUNDING = frozenset({operator.mul, operator.truediv, sqrt})
"""Operations whose rounding XLA may leave out: it contracts x * y + z, and makes a / b / c of fewer divisions, and a
multiplication by an approximate reciprocal root of a / sqrt(b)."""


def write_stages(
    update: Update,
    dims: Dims,
    dtypes: Sequence[torch.dtype],
    states: Sequence[Shape],
    own: Own | None = None,
    compiler: Compiler = XLA,
) -> tuple[Computation, bytes]:
    """The HLO of `update`, as `lower.write_hlo`, for states without a value for each element of these shapes.

    Its parameters are the components in the order of `update.inputs`, the fp32 scalar vector, a zero, f32[1], and these
    states in the order of `update.small`. Its results are those of `write_hlo`, and then the states of `stored`.
    """
    hlo = begin("collage_update", compiler)
    writer = _Writer(hlo, update, dims, own)
    for key, component in zip(update.inputs, components(hlo, update, dims, dtypes, own), strict=True):
        writer.values[key] = hlo.reshaped(component, writer.view)
    writer.entries(hlo.parameter(Shape("f32", (len(update.scalars.entries),))))
    writer.adder = Adder(hlo, hlo.parameter(Shape("f32", (1,))))
    for name, shape in zip(update.small, states, strict=True):
        state = hlo.add("convert", Shape("f32", shape.dims), [hlo.parameter(shape)])
        writer.values[name] = hlo.reshape(state, writer.shape_of(name))
    results = writer.run()
    shapes = dict(zip(update.small, states, strict=True))
    for name in stored(update):
        value = hlo.stretch(writer.values[update.small[name]], writer.shape_of(name))
        results.append(hlo.reshape(value, shapes[name].dims))
    return hlo, hlo.module(results)


def stored(update: Update) -> list[str]:
    """The states without a value for each element that change, in the order of the results."""
    return [name for name, number in update.small.items() if number != name]


class _Writer:
    """Writes the stages of one update."""

    adder: Adder

    def __init__(self, hlo: Computation, update: Update, dims: Dims, own: Own | None) -> None:
        self.hlo, self.update = hlo, update
        self.stored_as = [dims] * len(update.outputs) if own is None else own.writes
        self.view = view_of(dims) if update.by_rows else dims
        self.values: dict[str, Instruction] = {}
        """Components, states, and what the stages have found, by name."""
        self._entries: list[Instruction] = []

    def shape_of(self, name: str) -> Dims:
        """The shape of a state, for computing with it."""
        return shape_of(self.update.extents.get(name, NUMBER), self.view)

    def entries(self, vector: Instruction) -> None:
        """Reads the scalar vector."""
        self._entries = [self.hlo.element(vector, i, ()) for i in range(vector.array.dims[0])]

    def run(self) -> list[Instruction]:
        """Runs all stages; the results of the last one."""
        *before, last = self.update.stages
        for stage in before:
            found, results = self._computed(stage, [])
            self.values |= {name: found[x] for name, x in zip(stage.reduced, results, strict=True)}
        found, results = self._computed(last, [self.hlo.numbers(self.view)] if self.update.draws else [])
        return self._stored(found, results)

    def _computed(self, stage: Stage, index: list[Instruction]) -> tuple[dict[fx.Node, Instruction], Sequence[fx.Node]]:
        """The values of the nodes of a stage, and which of these nodes are its results."""
        given = [self.values[x] for x in stage.inputs] + index + self._entries + [self.values[x] for x in stage.numbers]
        inputs = (node for node in stage.body.nodes if node.op == "placeholder")
        found = dict(zip(inputs, given, strict=True))
        for node in stage.body.nodes:
            if node.op == "call_function" and node.target not in REDUCTIONS:
                found[node] = self._node(node, found, stage.kind == REDUCTION)
        return found, stage.results

    def _node(self, node: fx.Node, found: Mapping[fx.Node, Instruction], of_elements: bool) -> Instruction:
        if node.target in OF_TENSOR:
            return self.adder.whole(node.target, found[node.all_input_nodes[0]])
        if node.target in ENDINGS:
            add: Callable[..., Instruction] = self.adder.of_elements if of_elements else self.adder.of_sums
            return add(node.target, found[node.all_input_nodes[0]], node.args[1])
        dims = torch.broadcast_shapes(*(found[x].array.dims for x in node.all_input_nodes))
        result = lower_node(self.hlo, node, self._stretched(node.all_input_nodes, found, dims), tuple(dims))
        return self.adder.kept(result) if node.target in ROUNDING else result

    def _stretched(
        self, nodes: Sequence[fx.Node], found: Mapping[fx.Node, Instruction], dims: Sequence[int]
    ) -> dict[fx.Node, Instruction]:
        return {x: self.hlo.stretch(found[x], tuple(dims)) for x in nodes}

    def _stored(self, found: Mapping[fx.Node, Instruction], results: Sequence[fx.Node]) -> list[Instruction]:
        """The new components as they are stored, and the measurements."""
        components = [self.hlo.stretch(found[x], self.view) for x in results if x in found]
        for i, (key, dims) in enumerate(zip(self.update.outputs, self.stored_as, strict=True)):
            whole = self.hlo.reshaped(components[i], dims)
            components[i] = gather(self.hlo, whole, self.update.blocks[key]) if key in self.update.blocks else whole
        measures = [x for x in results if x not in found]
        terms = self._stretched([y for x in measures for y in x.all_input_nodes], found, self.view)
        return components + measured(self.hlo, measures, terms, self.view)


class XlaUpdate:
    """Callable form of an update on torch_xla devices; compiles once per parameter shape."""

    def __init__(self, update: Update, compiler: Compiler = XLA) -> None:
        self._update, self._compiler = update, compiler
        self._whole = next(i for i, key in enumerate(update.inputs) if key not in update.blocks)
        self._calls: dict[Any, Callable[[list[Tensor]], Sequence[Tensor]]] = {}
        self._zeros: dict[torch.device, Tensor] = {}

    def __call__(
        self,
        components: Sequence[Tensor],
        scalars: Tensor,
        small: Mapping[str, Tensor] | None = None,
        own: Own | None = None,
    ) -> Sequence[Tensor]:
        """New components from the old ones (parameter-shaped or `own`) and the fp32 scalar vector: lazy tensors.

        And then new values of the states of `stored`; `small` are all states of `update.small`.
        """
        states = [(small or {})[name] for name in self._update.small]
        shapes = tuple(Shape(storage_of(x.dtype).hlo, tuple(x.shape)) for x in states)
        dims = self._update.seen_as or tuple(components[self._whole].shape)
        key = (dims, tuple(c.dtype for c in components), shapes, own)
        if key not in self._calls:
            self._calls[key] = user_computation(self._module(*key))
        more = [self._zero(scalars.device), *states] if self._update.is_staged else []
        return self._calls[key]([*components, scalars, *more])

    def _module(self, dims: Dims, dtypes: Sequence[torch.dtype], states: Sequence[Shape], own: Own | None) -> bytes:
        if self._update.is_staged:
            return write_stages(self._update, dims, dtypes, states, own, self._compiler)[1]
        return write_hlo(self._update, dims, dtypes, own, self._compiler)[1]

    def _zero(self, device: torch.device) -> Tensor:
        """A zero as a vector, which torch_xla does not make a constant of."""
        if device not in self._zeros:
            self._zeros[device] = torch.zeros(1, dtype=torch.float32, device="cpu").to(device)
        return self._zeros[device]
