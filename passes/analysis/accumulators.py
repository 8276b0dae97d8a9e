"""Finds the states that accumulate slowly, from what the graph computes; strategy `plus` stores these as pairs.

These are:

* sums and averages of magnitudes, which cannot be negative (squares, absolute values, their powers and products). At a
  decay near 1 such a state moves by less than half an ulp of bf16 per step, and stalls; a first moment, whose decay is
  around 0.9, does not;
* maxima with decay, which stall in the same way;
* sums without any decay;
* copies and averages of the parameter, which need the precision of the parameter (schedule-free's z, a lookahead's
  slow weights), and what the parameter is moved to by a `lerp`.

The graph is read as sums of products (`passes/analysis/value_numbering.py`), so the way a sum is written is irrelevant.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.passes.analysis.averages import Precise, copies, is_placeholder, original
from collage_neuron.passes.analysis.denominators import ancestors, denominator
from collage_neuron.passes.analysis.magnitudes import Evidence
from collage_neuron.passes.analysis.parameter_path import spine
from collage_neuron.passes.analysis.parity import Parity
from collage_neuron.passes.analysis.polynomials import Sum
from collage_neuron.passes.analysis.value_numbering import Values
from collage_neuron.passes.ir.stage import returned

LERPS = (torch.ops.aten.lerp.Scalar, torch.ops.aten.lerp.Tensor)


def slow_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that accumulate slowly, which `plus` stores as pairs."""
    return _roles(graph).slow


def magnitude_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states of a captured update that accumulate a magnitude."""
    return _roles(graph).magnitudes


def sum_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that are sums without decay, or copies or averages of the parameter or of such a state."""
    return _roles(graph).sums


def idle_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that this update does not change, so that it cannot show what they accumulate."""
    states = _outputs(graph).items()
    return frozenset(name for name, node in states if name != "param" and is_placeholder(node, name))


def odd_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that change their sign with the gradient and the parameter, as first moments do."""
    return frozenset(name for name, parity in _roles(graph).parities.items() if parity == 1)


def denominators(graph: fx.Graph) -> frozenset[str]:
    """Names of the states of which the parameter's update takes a root, or by which it divides."""
    return _roles(graph).denominators


def lossy_denominators(graph: fx.Graph) -> frozenset[str]:
    """Names of the denominators that add to themselves and are recognised neither as slow nor as a first moment."""
    roles = _roles(graph)
    return frozenset(name for name in roles.denominators - roles.slow if not roles.is_fast(name))


@lru_cache(maxsize=256)  # asked again in each step, for the same few graphs
def _roles(graph: fx.Graph) -> _Roles:
    return _Roles(_outputs(graph), graph)


def _outputs(graph: fx.Graph) -> dict[str, Any]:
    outputs = returned(graph)
    assert isinstance(outputs, dict)
    return outputs


class _Roles:
    """The roles of the states of a captured update, determined from their values after the step."""

    def __init__(self, outputs: Mapping[str, Any], graph: fx.Graph) -> None:
        self.graph, self.outputs = graph, outputs
        self.values = Values(graph, copies(graph, {}))
        self.new = {name: self.values.of[node] for name, node in outputs.items() if name not in ("param", "grad")}
        self.next = {name: self._alternatives(name) for name in self.new}

    def _alternatives(self, name: str) -> list[Sum]:
        """The possible new values of a state other than its old one; empty if the state is only kept or replaced."""
        starts = self._starts(name)
        found = self.values.alternatives(self.new[name])
        changed = [x for x in found if x not in starts]
        if len(changed) < len(found) and not any(name in self.values.inputs(x) for x in changed):
            return []
        return changed

    @cached_property
    def slow(self) -> frozenset[str]:
        return self.magnitudes | self.sums | self.maxima

    @cached_property
    def magnitudes(self) -> frozenset[str]:
        """A fixed point, since an average of an average of squares is an average of magnitudes too."""
        found: frozenset[str] = frozenset()
        while True:
            evident = Evidence(self.values, found)
            now = frozenset(s for s, xs in self.next.items() if any(evident.of_sum(x, s) for x in xs)) - self.maxima
            if now == found:
                return found
            found = now

    @cached_property
    def maxima(self) -> frozenset[str]:
        return frozenset(name for name, x in self.new.items() if self._is_maximum(x, name))

    def _is_maximum(self, x: Sum, name: str) -> bool:
        atoms = [self.values.atoms[a] for p in x for a, _ in p] if len(x) == 1 else []
        olds = [frozenset(o) for o in self._starts(name)]
        return any(atom.kind == "maximum" and any(frozenset(o) in olds and None in o.values() for o in atom.operands)
                   for atom in atoms)  # fmt: skip

    @cached_property
    def sums(self) -> frozenset[str]:
        """A fixed point, since an average of an average of the parameter is an average of the parameter too."""
        param = original(self.outputs["param"])
        found = frozenset(n for n in self.new if self._is_sum(n) or original(self.outputs[n]) is param)
        found |= idle_states(self.graph) | self._positions
        while True:
            precise = Precise(self.graph, self.outputs, found)
            now = found | {name for name in self.new if precise.is_average(name)}
            if now == found:
                return found
            found = now

    @cached_property
    def _positions(self) -> frozenset[str]:
        """States that the parameter is moved towards by a `lerp`: each of their errors is one of the parameter then."""
        towards: set[Any] = {original(n.args[1]) for n in spine(self.graph) if n.target in LERPS}  # type: ignore[arg-type]
        olds = {original(n): str(n.target) for n in self.graph.nodes if n.op == "placeholder"}
        return frozenset(n for n in self.new if original(self.outputs[n]) in towards).union(
            olds[n] for n in towards & olds.keys() if olds[n] in self.new
        )

    def _is_sum(self, name: str) -> bool:
        """Returns True if the update adds to the state, or to its initial value, with a coefficient of exactly 1."""
        for x in self.next[name]:
            for start in self._starts(name):
                ((old,),) = (tuple(start),)
                others = [p for p in x if p != old]
                if x.get(old) == 1 and others and not any(old <= p for p in others):
                    return True
        return False

    def _starts(self, name: str) -> list[Sum]:
        """The possible values of a state before the step: itself, or the number that it is filled with at first."""
        return [self.values.atom("input", name=name), *self.values.fills()]

    def is_fast(self, name: str) -> bool:
        """Returns True if a state is replaced in each step, or averages a value that changes sign with the gradient."""
        return not any(name in self.values.inputs(x) for x in self.next[name]) or self.parities[name] == 1

    @cached_property
    def parities(self) -> Mapping[str, int | None]:
        """1 for states that change sign with the gradient and the parameter, 0 for states that do not."""
        assumed: dict[str, int | None] = {n: 0 if n in self.magnitudes | self.maxima else 1 for n in self.new}
        while True:
            parity = Parity(self.values, assumed)
            now = {n: p if p in (parity.of_sum(self.new[n]), 2) else None for n, p in assumed.items()}
            if now == assumed:
                return assumed
            assumed = now

    @cached_property
    def denominators(self) -> frozenset[str]:
        cone = ancestors([self.outputs["param"]], lambda _: False)
        under = [x for node in cone if isinstance(x := denominator(node), fx.Node)]
        return frozenset(name for node in ancestors(under, self._names) for name in self._names(node))

    def _names(self, node: fx.Node) -> list[str]:
        """Names of the states whose value, before or after the step, is this node."""
        value = self.values.of[node]
        after = [name for name, x in self.new.items() if x == value and self.values.inputs(x)]
        return after or [name for name in self.new if is_placeholder(node, name)]
