"""The pass `cut`: makes stages of an update with reductions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.tensor_sums import OF_TENSOR
from collage_neuron.passes.ir.stage import ELEMENTWISE, JOINED, NUMBERS, REDUCTION, Reduced, Stage
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

    def __call__(self, update: Update) -> Update:
        """The update in stages; `update` itself if it has no reductions.

        Raises:
            UnsupportedUpdate: a reduction of what is the same for all elements.
        """
        if update.only_stage.kind != JOINED:
            return update
        cutting = _Cutting(update)
        stages = tuple(cutting.stages())
        return replace(update, stages=stages, small={name: cutting.known[x] for name, x in cutting.kept.items()})


class _Place(NamedTuple):
    """Where a node can be computed."""

    level: int
    """The number of reductions that have to be done before, one after another."""
    is_number: bool
    """True if it is the same for all elements of a parameter."""


def places(graph: fx.Graph, of_elements: Iterable[str]) -> dict[fx.Node, _Place]:
    """The place of each node; inputs with the names `of_elements` have a value for each element."""
    each, found = frozenset(of_elements), dict[fx.Node, _Place]()
    for node in graph.nodes:
        inputs = [found[x] for x in node.all_input_nodes]
        level = max((x.level for x in inputs), default=0)
        if node.op == "placeholder":
            found[node] = _Place(0, node.target not in each)
        elif node.target in OF_TENSOR:
            found[node] = _Place(level + 1, True)
        else:
            found[node] = _Place(level, all(x.is_number for x in inputs))
    return found


class _Cutting:
    """The stages of one update."""

    def __init__(self, update: Update) -> None:
        self.update = update
        self.graph = update.only_stage.body
        self.places = places(self.graph, (*update.inputs, "index"))
        inputs = [n for n in self.graph.nodes if n.op == "placeholder"]
        self.known: dict[fx.Node, str] = {n: str(n.target) for n in inputs if n.target in update.reads_small}
        """The names of numbers that earlier stages give, and of states of one number."""
        self.scalars = [n for n in inputs if self.places[n].is_number and n not in self.known]
        (results,) = next(n for n in reversed(self.graph.nodes) if n.op == "output").args
        assert isinstance(results, tuple)
        first, last = len(update.outputs), len(update.outputs) + len(update.small)
        self.kept: dict[str, fx.Node] = dict(zip(update.small, results[first:last], strict=True))
        """The new values of the states of one number."""
        self.results = results[:first] + results[last:]

    def stages(self) -> Iterable[Stage]:
        for level in range(1 + max(place.level for place in self.places.values())):
            own = [n for n in self.graph.nodes if self.places[n] == (level, True) and n.op == "call_function"]
            reductions = [node for node in own if node.target in OF_TENSOR]
            for node in reductions:
                self._check(node)
            if reductions:
                yield self._small(REDUCTION, "reduced", reductions)
            needed = [node for node in own if node.target not in OF_TENSOR and self._is_needed(node, level)]
            if needed:
                yield self._small(NUMBERS, "number", needed)
        body, _, numbers = self._body(self.results, all_inputs=True)
        yield Stage(ELEMENTWISE, body, self.update.inputs, self.update.outputs, numbers=numbers)

    def _check(self, node: fx.Node) -> None:
        if self.places[node.all_input_nodes[0]].is_number:
            raise UnsupportedUpdate(
                f"the update adds up {node.all_input_nodes[0]}, which is the same number for all elements; multiply by "
                "p.numel() instead"
            )

    def _is_needed(self, node: fx.Node, level: int) -> bool:
        """Returns True for a number that is stored, or that another stage reads: for each element, or after reductions.

        What is known without a reduction is computed again where it is read.
        """
        if node.target in _TRUTHS:
            return False
        return (
            any(node is x for x in self.kept.values())
            if not level
            else any(self._is_elsewhere(node, user) for user in node.users)
        )

    def _is_elsewhere(self, node: fx.Node, user: fx.Node) -> bool:
        if user.op == "output" or self.places[user] != self.places[node]:
            return True
        return user.target in _TRUTHS and any(self._is_elsewhere(node, further) for further in user.users)

    def _small(self, kind: str, prefix: str, results: Sequence[fx.Node]) -> Stage:
        """A stage that gives numbers; they are known from then on."""
        body, inputs, numbers = self._body(results)
        first = sum(name.startswith(prefix) for name in self.known.values())
        names = {node: f"{prefix}{first + i}" for i, node in enumerate(results)}
        self.known |= names
        return Stage(kind, body, inputs, (), tuple(map(Reduced, names.values())), numbers)

    def _body(
        self, results: Sequence[fx.Node], all_inputs: bool = False
    ) -> tuple[fx.Graph, tuple[str, ...], tuple[str, ...]]:
        """The graph of these results, the components that it reads, and the numbers."""
        needed = self._ancestors(results)
        body, made = fx.Graph(), dict[fx.Node, fx.Node]()
        inputs = [n for n in self.graph.nodes if n.op == "placeholder" and n not in {*self.scalars, *self.known}]
        read = [n for n in inputs if n in needed or all_inputs]
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

    def _ancestors(self, results: Sequence[fx.Node]) -> Mapping[fx.Node, Any]:
        """What the results need, without what known numbers need."""
        found, waiting = dict[fx.Node, Any](), list(results)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found[node] = None
                waiting += () if node in self.known else node.all_input_nodes
        return found
