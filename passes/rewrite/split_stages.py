"""The pass `cut`: makes stages of an update with reductions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.reductions import DIMENSIONS, ELEMENT, ENDINGS, NUMBER, OF_TENSOR, across, joined
from collage_neuron.passes.ir.stage import BETWEEN, ELEMENTWISE, JOINED, NUMBERS, REDUCTION, Stage, ancestors, returned
from collage_neuron.passes.ir.update import Update

_TRUTHS = frozenset(
    {operator.gt, operator.ge, operator.lt, operator.le, operator.eq, operator.ne,
     torch.logical_and, torch.logical_or, torch.logical_not}
)  # fmt: skip
"""Operations whose results are masks, which no stage gives to another: each computes them again from numbers."""


@dataclass(frozen=True)
class Cut:
    """Makes stages of an update with reductions.

    Given: a descent along the gradient divided by its norm, in one joined stage::

        widen = widen(param)
        widen_1 = widen(grad)
        norm_of = norm_of(widen_1)
        mul = mul(norm_of, c0)
        truediv = truediv(widen_1, mul)
        add = add(widen, truediv)
        round_to = round_to(add, bf16)
        narrow = narrow(round_to, bf16)
        return (narrow) as (param)

    Result: stages of which the last alone stores anything; what earlier ones need of each element is computed again::

        stage 0, reduction: grad -> reduced0
        widen_1 = widen(grad)
        norm_of = norm_of(widen_1)
        return (norm_of) as (reduced0)
        stage 1, numbers: reduced0 -> number0
        mul = mul(reduced0, c0)
        return (mul) as (number0)
        stage 2, elementwise: param, grad, number0 -> param
        widen = widen(param)
        widen_1 = widen(grad)
        truediv = truediv(widen_1, number0)
        add = add(widen, truediv)

    No stage gives a mask to another: each computes it again from numbers. A state of one number (0-d) is read by its
    name where it is needed, and `small` says which number it becomes.
    """

    name: ClassVar[str] = "cut"
    idle: ClassVar[str] = "no sum or norm of a parameter's elements is needed, so one stage computes all"

    def __call__(self, update: Update) -> Update:
        """The update in stages; `update` itself if it has no reductions.

        Raises:
            UnsupportedUpdate: a reduction of what is the same for all elements.
        """
        if update.only_stage.kind != JOINED:
            return update
        cutting = _Cutting(update)
        stages = tuple(cutting.stages())
        small = {name: cutting.known[x] for name, x in cutting.kept.items()}
        of_numbers = {name: cutting.places[node].extent for node, name in cutting.known.items()}
        extents = {name: extent for name, extent in of_numbers.items() if extent != NUMBER}
        return replace(update, stages=stages, small=small, extents={**update.extents, **extents})


class _Place(NamedTuple):
    """Where a node can be computed."""

    level: int
    """The number of reductions, of elements or between processes, that have to be done before, one after another."""
    extent: str
    """That of its values (`numerics.reductions`)."""


def places(graph: fx.Graph, of_elements: Iterable[str], small: Mapping[str, str]) -> dict[fx.Node, _Place]:
    """The place of each node.

    Inputs with the names `of_elements` have a value for each element, those in `small` their extents; the others are
    numbers.
    """
    extents, place_of = {**small, **dict.fromkeys(of_elements, ELEMENT)}, dict[fx.Node, _Place]()
    for node in graph.nodes:
        inputs = [place_of[x] for x in node.all_input_nodes]
        level, extent = max((x.level for x in inputs), default=0), joined(x.extent for x in inputs)
        if node.op == "placeholder":
            place_of[node] = _Place(0, extents.get(str(node.target), NUMBER))
        elif node.target in OF_TENSOR or node.target is across:
            place_of[node] = _Place(level + 1, NUMBER)
        elif node.target in ENDINGS:  # only one of elements needs a pass over them
            place_of[node] = _Place(level + (extent == ELEMENT), str(node.args[1]))
        else:
            place_of[node] = _Place(level, extent)
    return place_of


def _adds_elements(node: fx.Node, place_of: Mapping[fx.Node, _Place]) -> bool:
    """Returns True for a reduction of a value for each element: one of rows, or of columns, is ordinary arithmetic."""
    of_elements = node.target in ENDINGS and place_of[node.all_input_nodes[0]].extent == ELEMENT
    return of_elements or node.target in OF_TENSOR


class _Cutting:
    """The stages of one update."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self.graph = update.only_stage.body
        self.places = places(self.graph, (*update.inputs, "index"), update.extents)
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.known: dict[fx.Node, str] = {n: str(n.target) for n in inputs if n.target in update.reads_small}
        """The names of numbers that earlier stages give, and of states of one number."""
        self.scalars = [n for n in inputs if self.places[n].extent == NUMBER and n not in self.known]
        results = returned(self.graph)
        first, last = len(update.outputs), len(update.outputs) + len(update.small)
        self.kept: dict[str, fx.Node] = dict(zip(update.small, results[first:last], strict=True))
        """The new values of the states of one number."""
        self.results = results[:first] + results[last:]
        for name, node in self.kept.items():
            extent, own = self.places[node].extent, update.extents.get(name, NUMBER)
            if not DIMENSIONS[extent] <= DIMENSIONS[own]:
                raise UnsupportedUpdate(
                    f"the update keeps a value of each {extent} in the state {name!r}, which has one of each {own}; "
                    "keep it in a state of that shape"
                )

    def stages(self) -> Iterable[Stage]:
        for level in range(1 + max(place.level for place in self.places.values())):
            own = [
                n
                for n in self.graph.nodes
                if n.op == "call_function" and self.places[n].level == level and self.places[n].extent != ELEMENT
            ]
            for node in own:
                self._check(node)
            # In this order each reads what is there: sums, then what processes make of them, then arithmetic with both.
            reductions = [node for node in own if _adds_elements(node, self.places)]
            if reductions:
                yield self._small(REDUCTION, "reduced", reductions)
            shared = [node for node in own if node.target is across]
            if shared:
                yield self._small(BETWEEN, "shared", shared)
            needed = [node for node in own if node not in (*reductions, *shared) and self._is_needed(node, level)]
            if needed:
                yield self._small(NUMBERS, "number", needed)
        body, _, numbers = self._body(self.results, all_inputs=True)
        yield Stage(ELEMENTWISE, body, self.update.inputs, self.update.outputs, numbers=numbers)

    def _check(self, node: fx.Node) -> None:
        if node.target in ENDINGS and not DIMENSIONS[str(node.args[1])] < DIMENSIONS[self._extent_in(node)]:
            raise UnsupportedUpdate(
                f"the update adds up {node.all_input_nodes[0]} over a dimension along which it is the same; multiply "
                "by its length instead"
            )
        if node.target is across and self._extent_in(node) != NUMBER:
            raise UnsupportedUpdate("the update adds up values of each element between processes")
        if node.target in OF_TENSOR and self._extent_in(node) == NUMBER:
            raise UnsupportedUpdate(
                f"the update adds up {node.all_input_nodes[0]}, which is the same number for all elements; multiply by "
                "p.numel() instead"
            )

    def _extent_in(self, node: fx.Node) -> str:
        return self.places[node.all_input_nodes[0]].extent

    def _is_needed(self, node: fx.Node, level: int) -> bool:
        """Returns True for a number that is stored, or that another stage reads: of elements, or after reductions."""
        if node.target in _TRUTHS:
            return False
        # What needs no reduction is computed again where it is read; by rows it would be computed for each element.
        if not level and not self.update.by_rows:
            return any(node is x for x in self.kept.values())
        return any(self._is_elsewhere(node, user) for user in node.users)

    def _is_elsewhere(self, node: fx.Node, user: fx.Node) -> bool:
        place, later = self.places[node], self.places[user]
        if user.op == "output" or later.level != place.level or later.extent == ELEMENT:
            return True
        # No stage gives a mask, so whoever reads one in another stage reads what the mask is made of.
        return user.target in _TRUTHS and any(self._is_elsewhere(node, further) for further in user.users)

    def _small(self, kind: str, prefix: str, results: Sequence[fx.Node]) -> Stage:
        """A stage that gives numbers; they are known from then on."""
        body, inputs, numbers = self._body(results, has_elements=kind == REDUCTION)
        first = sum(name.startswith(prefix) for name in self.known.values())
        names = {node: f"{prefix}{first + i}" for i, node in enumerate(results)}
        self.known |= names
        return Stage(kind, body, inputs, (), tuple(names.values()), numbers)

    def _body(
        self, results: Sequence[fx.Node], all_inputs: bool = False, has_elements: bool = False
    ) -> tuple[fx.Graph, tuple[str, ...], tuple[str, ...]]:
        """The graph of these results, the components that it reads (of elements one at least), and the numbers."""
        needed = ancestors(results, lambda node: () if node in self.known else node.all_input_nodes)
        body, made = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs = [n for n in self.graph.nodes if n.op == "placeholder" and n not in {*self.scalars, *self.known}]
        # A reduction that reads values of rows alone has a component too, from which backends take the shape.
        read = [n for n in inputs if n in needed or all_inputs] or inputs[:has_elements]
        numbers = [node for node in self.known if node in needed]
        for node in (*read, *self.scalars):
            made[node] = body.placeholder(str(node.target))
        for node in numbers:
            made[node] = body.placeholder(self.known[node])
        for node in self.graph.nodes:
            if node in needed and node not in made and node.op == "call_function":
                made[node] = body.node_copy(node, made.__getitem__)
        body.output(tuple(made[x] for x in results))
        components = tuple(str(n.target) for n in read if n.target in self.update.inputs)
        return body, components, tuple(self.known[n] for n in numbers)
