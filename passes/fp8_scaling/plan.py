"""The plan of a graph, which matmuls run in 8 bits and what each operand is scaled by; and the rewriting of these.

Weights and inputs become e4m3, gradients e5m2. An operand whose size is known has a power of two from a vector, under
a name; one whose size is unknown takes its largest magnitude at run time.

A matmul belongs to the layer of a parameter if it reads the parameter (the output of the layer, and the gradient of its
input), or if its result becomes the parameter's gradient. All others, the products of attention, are left alone.

Rewrites the matmuls that a plan has marked: scale, round, multiply, scale back.

Given:
    mm = aten.mm(a, b)

Result:
    wide = widen(a);  scaled = wide * scale_a;  rounded = cast(scaled, "e4m3")        and so for b
    mm = result(dot(rounded_a, rounded_b, "e4m3", "e4m3") * (inverse_a * inverse_b), None, bfloat16)

The scales are elements of the first input, `powers`: float32[2, operands], scales and their inverses.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from collage_neuron.numerics.eft import widen
from collage_neuron.passes.fp8_scaling.scaled_matmul import LIMITS, amax_powers, cast, dot, largest, measure, result
from collage_neuron.passes.fp8_scaling.sizes import Size, analyse, known, packet, reason, views_bits
from collage_neuron.passes.ir.stage import ancestors

aten: Any = torch.ops.aten

PRODUCTS = {aten.mm.default: 0, aten.addmm.default: 1}
"""Operations that a linear layer becomes, with the index of the first factor."""

SAME_ELEMENTS = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.squeeze, aten.unsqueeze),
    *(aten.clone, aten.detach, aten.alias, aten._to_copy),
}
"""Operations whose results have all elements of the operand once, perhaps in another dtype."""

GATHERS = SAME_ELEMENTS | {aten.add}
"""Operations between a matmul and the gradient that it is part of: a parameter used twice gets a sum."""


@dataclass(frozen=True)
class Joint:
    """The nodes of a graph by their roles."""

    parameters: Mapping[Node, str]
    """The inputs that are parameters, with their names."""
    gradients: Mapping[Node, str]
    """The outputs that are gradients of parameters, with their names."""
    backward: frozenset[Node]
    """Values that depend on the gradient of an output."""
    nodes: Sequence[Node]


@dataclass(frozen=True)
class Product:
    """A matmul of a linear layer."""

    node: Node
    parameter: str
    role: str
    """`output`, `input gradient` or `weight gradient`."""


def factors(node: Node) -> Sequence[Any]:
    """The operands of a matmul, without the bias."""
    first = PRODUCTS[node.target]
    return node.args[first : first + 2]


def source(x: Any) -> Any:
    """The value whose elements `x` has, in another shape or dtype."""
    while isinstance(x, Node) and packet(x) in SAME_ELEMENTS and not views_bits(x):
        x = x.args[0]
    return x


def depending_on(starts: Iterable[Node], nodes: Sequence[Node]) -> frozenset[Node]:
    """The values that are computed from `starts`, these included."""
    found = set(starts)
    for node in nodes:
        if any(x in found for x in node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def products(joint: Joint) -> Iterator[Product]:
    """The matmuls of linear layers, in order; without those that also scale what they add (`alpha`, `beta`)."""
    gradient_of = _gradient_matmuls(joint)
    for node in joint.nodes:
        if node.target not in PRODUCTS or node.kwargs:
            continue
        owners = [joint.parameters[s] for s in map(source, factors(node)) if s in joint.parameters]
        if len(owners) == 1:
            yield Product(node, owners[0], "input gradient" if node in joint.backward else "output")
        elif node in gradient_of and not owners:
            yield Product(node, gradient_of[node], "weight gradient")


def _gradient_matmuls(joint: Joint) -> dict[Node, str]:
    """The matmuls whose results are added up to the gradient of a parameter, with its name."""

    def added(node: Node) -> list[Node]:
        return [x for x in node.all_input_nodes if x in joint.backward] if packet(node) in GATHERS else []

    parts = ((ancestors([gradient], added), name) for gradient, name in joint.gradients.items())
    return {node: name for part, name in parts for node in part if node.target in PRODUCTS}


def last(found: Sequence[Product], nodes: Sequence[Node]) -> set[str]:
    """The parameters of the layers whose output no other linear layer reads: the heads."""
    outputs = [p for p in found if p.role == "output"]
    reading = {p.node for p in outputs}
    return {p.parameter for p in outputs if not (depending_on([p.node], nodes) & reading) - {p.node}}


def results_of(node: Node) -> list[Any]:
    """What an output node returns, in order, with None for absent gradients."""
    return _flat(node.args[0])


def _flat(x: Any) -> list[Any]:
    return [y for part in x for y in _flat(part)] if isinstance(x, (list, tuple)) else [x]


FORWARD, GRADIENT = "e4m3", "e5m2"

MARK = "collage_neuron_operands"
"""Where a node of the graph carries its operands: torch copies what a node carries into the graphs it cuts."""


@dataclass(frozen=True)
class Operand:
    """One factor of a matmul."""

    name: str
    """`layers.0.weight`, `layers.0.input`, `layers.0.gradient`; a value that several matmuls read has one name."""
    fmt: str
    is_known: bool
    """False if its scale is the largest magnitude, at run time."""


@dataclass
class Plan:
    """What is done to a graph; `exponents` changes when sizes of gradients become known."""

    products: Sequence[Product]
    kept: Sequence[str]
    """Names of parameters whose matmuls stay as they are."""
    operands: Mapping[Node, Operand]
    """By the node that a matmul reads."""
    joint: Joint
    tangents: Sequence[Node]
    """The inputs that are gradients of outputs."""
    reductions: dict[str, str]
    """The operands that take their largest magnitude, with the reason."""
    given: dict[Node, Size] = field(default_factory=dict)
    """The sizes of inputs."""

    @property
    def weights(self) -> AbstractSet[str]:
        """The names of operands that are parameters."""
        return set(self.joint.parameters.values())

    @property
    def formats(self) -> dict[str, str]:
        """The storage type of each operand of known size, by name."""
        return {o.name: o.fmt for o in self.operands.values() if o.is_known}

    def exponents(self, gradients: Mapping[Node, Size]) -> dict[str, int]:
        """The exponent of each operand of known size, for these sizes of the gradients of outputs."""
        sizes = analyse(self.joint.nodes[0].graph, {**self.given, **gradients})
        return {
            operand.name: _exponent(sizes[node], operand.fmt)
            for node, operand in self.operands.items()
            if operand.is_known and known(sizes.get(node))
        }


def _exponent(size: Any, fmt: str) -> int:
    # The power of two nearest to the root mean square, or a larger one if the peak would saturate.
    nearest: int = max(math.floor(size.log + 0.5), math.ceil(size.log + size.peak - math.log2(largest(fmt))))
    return max(-LIMITS[fmt], min(LIMITS[fmt], nearest))


def plan(
    graph: Graph,
    names: Sequence[str | None],
    sizes: Sequence[Size | None],
    forward_outputs: int,
    keep: Iterable[str] | None,
) -> Plan:
    """Plans a graph and marks its matmuls.

    Args:
        graph: a forward graph, or a joint one of forward and backward, in operations of aten.
        names: of each forward input, the name of the parameter that it is, or None.
        sizes: of each forward input, its size or None.
        forward_outputs: the number of outputs that are not gradients.
        keep: the names of parameters to keep; None for the heads.

    Raises:
        ValueError: the graph has another number of inputs or of gradients.
    """
    holders = [n for n in graph.nodes if n.op == "placeholder"]
    inputs, tangents = holders[: len(names)], holders[len(names) :]
    (output,) = (n for n in graph.nodes if n.op == "output")
    gradients = results_of(output)[forward_outputs:]
    if len(inputs) != len(names) or (gradients and len(gradients) != len(names)):
        raise ValueError(
            f"the graph has {len(inputs)} inputs and {len(gradients)} gradients, and the model gave {len(names)}: "
            "inputs that share memory, or tensor subclasses, which fp8 matmuls cannot follow"
        )
    nodes = list(graph.nodes)
    joint = Joint(
        {n: name for n, name in zip(inputs, names, strict=True) if name is not None},
        {g: name for g, name in zip(gradients, names, strict=False) if name is not None and isinstance(g, Node)},
        depending_on(tangents, nodes),
        nodes,
    )
    found = list(products(joint))
    kept = last(found, nodes) if keep is None else set(keep)
    kept = (kept | _left_in_fp32(joint)).intersection(p.parameter for p in found)
    rewritten = [p for p in found if p.parameter not in kept]
    given = {n: size for n, size in zip(inputs, sizes, strict=True) if size is not None}
    # The sizes of gradients are known later: with any size for them, the analysis shows which values have one at all.
    at_one = analyse(graph, {**given, **dict.fromkeys(tangents, Size(0.0))})
    operands = _operands(rewritten, joint, {n for n, size in at_one.items() if known(size)})
    for p in rewritten:
        p.node.meta[MARK] = tuple(operands[x] for x in factors(p.node))
    reductions = {o.name: reason(x, at_one) for x, o in operands.items() if not o.is_known}
    return Plan(rewritten, sorted(kept), operands, joint, tangents, reductions, given)


def _left_in_fp32(joint: Joint) -> set[str]:
    """The fp32 parameters of a bf16 model: somebody wants them precise (`compile(..., keep_fp32=...)`)."""
    dtypes = {name: n.meta["val"].dtype for n, name in joint.parameters.items()}
    return {name for name, dtype in dtypes.items() if dtype == torch.float32 and torch.bfloat16 in dtypes.values()}


def _operands(found: Sequence[Product], joint: Joint, sized: set[Node]) -> dict[Node, Operand]:
    """One operand for each value that a matmul reads; values with the same elements share a name."""
    operands: dict[Node, Operand] = {}
    called: dict[Any, str] = {}
    for p in found:
        for x in factors(p.node):
            origin = source(x)
            backward = x in joint.backward
            kind = "gradient" if backward else "input"
            name = joint.parameters.get(origin) or f"{p.parameter.removesuffix('.weight')}.{kind}"
            if origin not in called:
                called[origin] = _unique(name, called.values())
            operands[x] = Operand(called[origin], GRADIENT if backward else FORWARD, x in sized)
    return operands


def _unique(name: str, taken: Any) -> str:
    """The name, numbered if a layer that is called several times has it already."""
    return next(tried for tried in chain([name], (f"{name}#{n}" for n in count(2))) if tried not in taken)


# --- the graph as the plan has it -------------------------------------------------------------------------------------


@dataclass
class Rewritten:
    """A graph with matmuls in 8 bits."""

    module: GraphModule
    names: Sequence[str]
    """The operands whose scales are in `powers`, in order."""


@dataclass
class _Rewriter:
    """Writes one graph; the values that were cast already are cast once."""

    graph: Graph
    places: Mapping[str, int]
    """Of operands in `powers`, by name."""
    scales: Node
    wanted: Sequence[str]
    unsteady: AbstractSet[str]
    measured: dict[str, Node] = field(default_factory=dict)
    cast: dict[Node, tuple[Node, Node]] = field(default_factory=dict)
    found: dict[str, tuple[Node, Node]] = field(default_factory=dict)

    def call(self, target: object, *args: object) -> Node:
        return self.graph.call_function(target, args)  # type: ignore[arg-type]  # functions of ours

    def powers(self, wide: Node, operand: Operand) -> tuple[Node, Node]:
        """The scale of an operand and its inverse; once for all values with the same elements."""
        if operand.name not in self.found:
            if operand.is_known and operand.name not in self.unsteady:
                # `powers` is flat: all scales, and then the inverse of each.
                both, at, n = self.scales, self.places[operand.name], len(self.places)
            else:
                both, at, n = self.call(amax_powers, wide, operand.fmt), 0, 1
            self.found[operand.name] = self.call(operator.getitem, both, at), self.call(operator.getitem, both, at + n)
        return self.found[operand.name]

    def rounded(self, x: Node, operand: Operand) -> tuple[Node, Node]:
        """An operand in 8 bits, and the inverse of its scale."""
        if x not in self.cast:
            wide = self.call(widen, x)
            scale, inverse = self.powers(wide, operand)
            scaled = self.call(torch.mul, wide, scale)
            found = self.call(cast, scaled, operand.fmt)
            if operand.name in self.wanted and operand.name not in self.measured:
                self.measured[operand.name] = self.call(measure, wide, scale, found, operand.fmt)
            self.cast[x] = found, inverse
        return self.cast[x]

    def rewrite(self, node: Node) -> None:
        """Replaces one matmul."""
        a, b = factors(node)
        of_a, of_b = node.meta[MARK]
        bias = node.args[0] if PRODUCTS[node.target] else None
        with self.graph.inserting_before(node):
            (qa, ia), (qb, ib) = self.rounded(a, of_a), self.rounded(b, of_b)
            unscaled = self.call(torch.mul, self.call(dot, qa, qb, of_a.fmt, of_b.fmt), self.call(torch.mul, ia, ib))
            out = self.call(result, unscaled, bias, node.meta["val"].dtype)
        out.meta = dict(node.meta)
        node.replace_all_uses_with(out)
        self.graph.erase_node(node)


def rewrite(module: GraphModule, measured: Sequence[str] = (), unsteady: AbstractSet[str] = frozenset()) -> Rewritten:
    """A copy of a graph with its marked matmuls rewritten.

    With names of operands in `measured`, a last output has what `measure` gives of each. Those in `unsteady` take their
    largest magnitude, as those of unknown size do.
    """
    graph = Graph()
    copied: Any = graph.graph_copy(module.graph, {}, return_output_node=True)
    # An output of the forward half that the backward half reads is an input there, and still carries the mark.
    marked = [n for n in graph.nodes if MARK in n.meta and n.target in PRODUCTS]
    operands = [o for n in marked for o in n.meta[MARK]]
    names = list(dict.fromkeys(o.name for o in operands if o.is_known))
    output = graph.output(copied[0])
    with graph.inserting_before(next(iter(graph.nodes))):
        powers = graph.placeholder("powers")
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        scales = graph.call_function(torch.unbind, (graph.call_function(torch.flatten, (powers,)),))
    writer = _Rewriter(graph, {name: i for i, name in enumerate(names)}, scales, measured, unsteady)
    for node in marked:
        writer.rewrite(node)
    if measured:
        with graph.inserting_before(output):
            seen = writer.call(torch.stack, [writer.measured[name] for name in measured])
        output.args = ([*results_of(output), seen],)
    return Rewritten(GraphModule(module, graph), names)
