"""Value numbering: the value of each node of a captured graph as a sum of products in which numbers are wildcards.

Given::

    mul = v * s0;  sub = g - m;  clone = m.clone();  sub_1 = g - clone
    addcmul = aten.addcmul(mul, sub, sub_1, value=s1)

Result: `addcmul` is the sum of the products `v` and `(g - m) ** 2`, each times an unknown number.

A copy or cast has the value of its operand, `(1 - b) * x` is `x - b * x`, and `x.lerp(y, w)` is `x + w * (y - x)`. Two
nodes that compute the same value are the same factor, whatever the numbers in them, because a slot may hold another
number in the next step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.fx as fx

from collage_neuron.passes.analysis.polynomials import ONE, TERMS, Sum, plus
from collage_neuron.passes.analysis.value_algebra import Algebra
from collage_neuron.passes.analysis.value_rules import RULES


class Values(Algebra):
    """The values of a captured graph's nodes; `opaque` nodes are treated as inputs with these names.

    With `numbers`, the slots have these values; one that is 0 may be anything in the next step, and is an input.
    """

    def __init__(
        self,
        graph: fx.Graph,
        opaque: Mapping[fx.Node, str] | None = None,
        numbers: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(exact=numbers is not None)
        self.numbers = numbers
        self.of: dict[fx.Node, Sum] = {}
        for node in graph.nodes:
            if node.op != "output":
                self.of[node] = self._value(node, opaque or {})

    def _value(self, node: fx.Node, opaque: Mapping[fx.Node, str]) -> Sum:
        if node in opaque:
            return self.atom("input", name=opaque[node])
        if node.op == "placeholder":
            name = str(node.target)
            return self._number(name) if is_slot(name) else self.atom("input", name=name)
        args: Any = fx.node.map_arg(node.args, self._of)
        kwargs: Any = fx.node.map_arg(node.kwargs, self._of)
        if node.target in RULES:
            return RULES[node.target](self, *args, **kwargs)
        operands = [self.of[x] for x in node.all_input_nodes]
        return self.atom(str(node.target), *operands, name=str([x for x in args if isinstance(x, (int, float))]))

    def _number(self, slot: str) -> Sum:
        if self.numbers is None:
            return {ONE: None}
        return {ONE: self.numbers[slot]} if self.numbers[slot] else self.atom("input", name=slot)

    def _of(self, node: fx.Node) -> Any:
        return self.of[node]

    def fills(self) -> list[Sum]:
        """The tensors filled with a number."""
        return [self.atom("fill", name=name) for kind, _, name in self.atoms if kind == "fill"]

    def alternatives(self, x: Sum, having: str = "") -> list[Sum]:
        """The possible values of an element of x: every candidate of a `where`, a maximum or a clamp.

        With the name of an input, of those only that may choose a value that has it.
        """
        done: list[Sum] = []
        todo = [x]
        while todo and len(todo) + len(done) < 4 * TERMS:
            branches = self._branches(todo[0], having)
            (todo if branches else done).extend(branches or todo[:1])
            del todo[0]
        return done + todo

    def _branches(self, x: Sum, having: str) -> list[Sum]:
        for p, c in x.items():
            for a, e in p:
                if self._is_choice(a) and e == 1 and (not having or having in self._inputs[a]):
                    rest = {q: d for q, d in x.items() if q != p}
                    others: Sum = {p - {(a, e)}: c}
                    return [plus(rest, self.times(others, of)) for of in self.atoms[a].operands[:2]]
        return []

    def _is_choice(self, atom: int) -> bool:
        """Returns True if an atom may be either of its operands; `minimum(g, g.abs())` is always `g`."""
        kind, operands, _ = self.atoms[atom]
        return kind in ("where", "maximum") or (kind == "minimum" and any(not self.inputs(x) for x in operands))


def is_slot(name: str) -> bool:
    """Returns True if a placeholder of this name is a number; a state may be called `m1`, but never `s1`."""
    return name.startswith("s") and name[1:].isdigit()
