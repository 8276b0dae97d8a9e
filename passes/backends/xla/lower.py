"""Lowers an update, for one parameter shape, to one XLA user computation: nothing waits for the host.

A user computation enters torch_xla's lazy graph as one node, so that tracing is cheap, and its hash includes the
wiring. It has all stages of an update (`ir/stage.py`), one after another. Values have the shape of their extent
(`numerics.reductions`), and are repeated where they meet others. States without a value for each element are
parameters of it too, and results.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron import torch_privates
from collage_neuron.numerics.eft import sqrt, storage_of
from collage_neuron.numerics.reductions import ENDINGS, NUMBER, OF_TENSOR, REDUCTIONS, count, shape_of, view_of
from collage_neuron.passes.backends.xla.hlo import Computation, Instruction, Shape
from collage_neuron.passes.backends.xla.nodes import gather, lower_node, spread, words_of
from collage_neuron.passes.backends.xla.sums import Adder
from collage_neuron.passes.ir.stage import REDUCTION, Stage
from collage_neuron.passes.ir.update import Update

Dims = tuple[int, ...]

ROUNDING = frozenset({operator.mul, operator.truediv, sqrt})
"""Operations whose rounding XLA may leave out: it contracts x * y + z, and makes a / b / c of fewer divisions, and a
multiplication by an approximate reciprocal root of a / sqrt(b)."""


class Own(NamedTuple):
    """The shapes of the components of a parameter that a step sees in another one (`update.seen_as`)."""

    reads: tuple[Dims, ...]
    """In the order of `update.inputs`."""
    writes: tuple[Dims, ...]
    """In the order of `update.outputs`."""

    @classmethod
    def of(cls, update: Update, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> Own | None:
        """Those of these tensors; None if the step sees all of them in their own shape."""
        shapes = (tuple(tuple(t.shape) for t in tensors) for tensors in (reads, writes))
        return None if update.seen_as is None else cls(*shapes)


def write_hlo(
    update: Update,
    dims: Dims,
    dtypes: Sequence[torch.dtype],
    states: Sequence[Shape] = (),
    own: Own | None = None,
    form: type[Computation] = Computation,
) -> tuple[Computation, bytes]:
    """The HLO of `update` for parameters of shape `dims` whose components have `dtypes`: (readable, bytes).

    Its parameters are the components in the order of `update.inputs`, in shapes of their `own` if they have such, and
    the fp32 scalar vector; with stages also a zero, f32[1], and the states without a value for each element, which have
    the shapes `states`, in the order of `update.small`. Its results are the components of `update.outputs`, what is
    measured, and the states of `stored`.
    """
    hlo = form("collage_update")
    writer = _Writer(hlo, update, dims, own)
    shapes = [dims] * len(dtypes) if own is None else own.reads
    components = [
        _component(hlo, storage_of(dtype).hlo, shape, update.blocks.get(key))
        for key, dtype, shape in zip(update.inputs, dtypes, shapes, strict=True)
    ]
    writer.values = {k: hlo.reshaped(x, writer.view) for k, x in zip(update.inputs, components, strict=True)}
    vector = hlo.parameter(Shape("f32", (len(update.scalars.entries),)))
    entry = () if update.is_staged else dims  # which the stages repeat where it meets other values
    writer.entries = [hlo.element(vector, i, entry) for i in range(vector.array.dims[0])]
    if update.is_staged:
        writer.adder = Adder(hlo, hlo.parameter(Shape("f32", (1,))))
    for name, shape in zip(update.small, states, strict=True):
        state = hlo.add("convert", Shape("f32", shape.dims), [hlo.parameter(shape)])
        writer.values[name] = hlo.reshape(state, writer.shape_of(name))
    results = writer.run()
    for name, shape in zip(update.small, states, strict=True):
        if name in stored(update):
            value = hlo.stretch(writer.values[update.small[name]], writer.shape_of(name))
            results.append(hlo.reshape(value, shape.dims))
    return hlo, hlo.module(results)


def stored(update: Update) -> list[str]:
    """The states without a value for each element that change, in the order of the results."""
    return [name for name, number in update.small.items() if number != name]


def _component(hlo: Computation, element: str, dims: Dims, block: int | None) -> Instruction:
    """The next parameter, with a word for each element."""
    if block is None:
        return hlo.parameter(Shape(element, dims))
    return spread(hlo, hlo.parameter(Shape(element, words_of(dims, block))), dims, block)


class _Writer:
    """Writes the stages of one update."""

    adder: Adder | None = None
    """Of an update with several stages."""

    def __init__(self, hlo: Computation, update: Update, dims: Dims, own: Own | None) -> None:
        self.hlo, self.update = hlo, update
        self.stored_as = [dims] * len(update.outputs) if own is None else own.writes
        self.view = view_of(dims) if update.by_rows else dims
        self.values: dict[str, Instruction] = {}
        """Components, states, and what the stages have found, by name."""
        self.entries: list[Instruction] = []
        """Those of the scalar vector."""

    def shape_of(self, name: str) -> Dims:
        """The shape of a state, for computing with it."""
        return shape_of(self.update.extents.get(name, NUMBER), self.view)

    def run(self) -> list[Instruction]:
        """Runs all stages; the results of the last one."""
        *before, last = self.update.stages
        for stage in before:
            found, results = self._computed(stage, [])
            self.values |= {name: found[x] for name, x in zip(stage.reduced, results, strict=True)}
        return self._stored(*self._computed(last, [self.hlo.numbers(self.view)] if self.update.draws else []))

    def _computed(self, stage: Stage, index: list[Instruction]) -> tuple[dict[fx.Node, Instruction], Sequence[fx.Node]]:
        """The values of the nodes of a stage, and which of these nodes are its results."""
        given = [self.values[x] for x in stage.inputs] + index + self.entries + [self.values[x] for x in stage.numbers]
        inputs = (node for node in stage.body.nodes if node.op == "placeholder")
        found = dict(zip(inputs, given, strict=True))
        for node in stage.body.nodes:
            if node.op == "call_function" and node.target not in REDUCTIONS:
                found[node] = self._node(node, found, stage.kind == REDUCTION)
        return found, stage.results

    def _node(self, node: fx.Node, found: Mapping[fx.Node, Instruction], of_elements: bool) -> Instruction:
        if self.adder is not None and node.target in OF_TENSOR:
            return self.adder.whole(node.target, found[node.all_input_nodes[0]])
        if self.adder is not None and node.target in ENDINGS:
            add: Callable[..., Instruction] = self.adder.of_elements if of_elements else self.adder.of_sums
            return add(node.target, found[node.all_input_nodes[0]], node.args[1])
        dims = tuple(torch.broadcast_shapes(*(found[x].array.dims for x in node.all_input_nodes)))
        result = lower_node(self.hlo, node, self._stretched(node.all_input_nodes, found, dims), dims)
        # XLA cannot leave out a rounding if its result goes through an operation on bits that it does not see through.
        return result if self.adder is None or node.target not in ROUNDING else self.adder.kept(result)

    def _stretched(
        self, nodes: Sequence[fx.Node], found: Mapping[fx.Node, Instruction], dims: Dims
    ) -> dict[fx.Node, Instruction]:
        return {x: self.hlo.stretch(found[x], dims) for x in nodes}

    def _stored(self, found: Mapping[fx.Node, Instruction], results: Sequence[fx.Node]) -> list[Instruction]:
        """The new components as they are stored, and the measurements."""
        components = [self.hlo.stretch(found[x], self.view) for x in results if x in found]
        for i, (key, dims) in enumerate(zip(self.update.outputs, self.stored_as, strict=True)):
            whole = self.hlo.reshaped(components[i], dims)
            components[i] = gather(self.hlo, whole, self.update.blocks[key]) if key in self.update.blocks else whole
        measures = [x for x in results if x not in found]
        terms = self._stretched([y for x in measures for y in x.all_input_nodes], found, self.view)
        return components + measured(self.hlo, measures, terms, self.view)


def measured(
    hlo: Computation, nodes: Sequence[fx.Node], values: Mapping[fx.Node, Instruction], dims: Dims
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


def _term(hlo: Computation, node: fx.Node, values: Mapping[fx.Node, Instruction], dims: Dims) -> Instruction:
    """The summands: the values themselves, or 1 for each element to count."""
    (x,) = node.all_input_nodes
    return hlo.add("convert", Shape("s32", dims), [values[x]]) if node.target is count else values[x]


class XlaUpdate:
    """Callable form of an update on torch_xla devices; compiles once per parameter shape."""

    def __init__(self, update: Update, form: type[Computation] = Computation) -> None:
        self._update, self._form = update, form
        # A component with a word for each element, whose shape is the parameter's: words of blocks have another one.
        self._whole = next(i for i, key in enumerate(update.inputs) if key not in update.blocks)
        self._calls: dict[Any, Callable[[list[Tensor], int], Sequence[Tensor]]] = {}
        self._zeros: dict[torch.device, Tensor] = {}

    def __call__(
        self,
        components: Sequence[Tensor],
        scalars: Tensor,
        small: Mapping[str, Tensor] | None = None,
        own: Own | None = None,
        node: int = 0,
    ) -> Sequence[Tensor]:
        """New components from the old ones (parameter-shaped or `own`) and the fp32 scalar vector: lazy tensors.

        And then new values of the states of `stored`; `small` are all states of `update.small`.
        """
        states = [(small or {})[name] for name in self._update.small]
        shapes = tuple(Shape(storage_of(x.dtype).hlo, tuple(x.shape)) for x in states)
        dims = self._update.seen_as or tuple(components[self._whole].shape)
        key = (dims, tuple(c.dtype for c in components), shapes, own)
        if key not in self._calls:
            self._calls[key] = user_computation(write_hlo(self._update, *key, self._form)[1])
        more = [self._zero(scalars.device), *states] if self._update.is_staged else []
        return self._calls[key]([*components, scalars, *more], node)

    def _zero(self, device: torch.device) -> Tensor:
        # A vector, since torch_xla makes a constant of a 0-d tensor that is 0, which XLA must not know.
        if device not in self._zeros:
            self._zeros[device] = torch.zeros(1, dtype=torch.float32, device="cpu").to(device)
        return self._zeros[device]


def user_computation(module: bytes) -> Callable[[list[Tensor], int], Sequence[Tensor]]:
    """A function that runs the module whose bytes these are, on lazy tensors, as a node with a number.

    torch_xla knows a graph again by a hash, of which nodes of one name and module have equal parts, whatever they read.
    It does not say to which of them a result belongs (pytorch/xla issue 8353): if tensors of equal shapes came in
    another order, they would get one another's results. So each node of a graph has a name of its own.
    """
    import torch_xla.core.xla_builder as xb  # an extra: imported only where parameters are on an XLA device

    computation = xb.computation_from_module_proto("collage_update", module)

    def call(tensors: list[Tensor], node: int) -> Sequence[Tensor]:
        name = f"xla::collage_update_{node}"
        results: Sequence[Tensor] = torch_privates.user_computation(name, tensors, computation)
        return results

    return call
