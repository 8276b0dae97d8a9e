"""Finds the states that accumulate slowly, from what the graph computes; strategy `plus` stores these as pairs.

These are:

* sums and averages of magnitudes, which cannot be negative (squares, absolute values, their powers and products). At a
  decay near 1 such a state moves by less than half an ulp of bf16 per step, and stalls; a first moment, whose decay is
  around 0.9, does not;
* maxima with decay, which stall in the same way;
* sums without any decay;
* copies and averages of the parameter, which need the precision of the parameter (schedule-free's z, a lookahead's
  slow weights).

The graph is read as sums of products (`passes/analysis/value_numbering.py`), so the way a sum is written is irrelevant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.passes.analysis.parameter_path import spine
from collage_neuron.passes.analysis.value_numbering import NEVER_NEGATIVE, ONE, SELECTS, Product, Sum, Values

aten = torch.ops.aten


def slow_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that accumulate slowly, which `plus` stores as pairs."""
    return _roles(graph).slow


def magnitude_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states of a captured update that accumulate a magnitude."""
    return _roles(graph).magnitudes


def maximum_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that are a maximum with decay, `maximum(s * beta, x)`: it stalls as an average does."""
    return _roles(graph).maxima


def sum_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that are sums without decay, or copies or averages of the parameter or of such a state."""
    return _roles(graph).sums


def idle_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that this update does not change, so that it cannot show what they accumulate."""
    states = _outputs(graph).items()
    return frozenset(name for name, node in states if name != "param" and _is_placeholder(node, name))


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
    (outputs,) = next(n for n in graph.nodes if n.op == "output").args
    assert isinstance(outputs, dict)
    return outputs


def _is_placeholder(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.target == name


class _Roles:
    """The roles of the states of a captured update, determined from their values after the step."""

    def __init__(self, outputs: Mapping[str, Any], graph: fx.Graph) -> None:
        self.graph, self.outputs = graph, outputs
        self.values = Values(graph, _copies(graph, {}))
        self.new = {name: self.values.of[node] for name, node in outputs.items() if name != "param"}
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
            evident = _Evidence(self.values, found)
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
        param = _original(self.outputs["param"])
        found = frozenset(n for n in self.new if self._is_sum(n) or _original(self.outputs[n]) is param)
        found |= idle_states(self.graph)
        while True:
            precise = _Precise(self.graph, self.outputs, found)
            now = found | {name for name in self.new if precise.is_average(name)}
            if now == found:
                return found
            found = now

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
            parity = _Parity(self.values, assumed)
            now = {n: p if p in (parity.of_sum(self.new[n]), 2) else None for n, p in assumed.items()}
            if now == assumed:
                return assumed
            assumed = now

    @cached_property
    def denominators(self) -> frozenset[str]:
        cone = _ancestors([self.outputs["param"]], lambda _: False)
        under = [x for node in cone if isinstance(x := _under(node), fx.Node)]
        return frozenset(name for node in _ancestors(under, self._names) for name in self._names(node))

    def _names(self, node: fx.Node) -> list[str]:
        """Names of the states whose value, before or after the step, is this node."""
        value = self.values.of[node]
        after = [name for name, x in self.new.items() if x == value and self.values.inputs(x)]
        return after or [name for name in self.new if _is_placeholder(node, name)]


class _Evidence:
    """Finds out whether a state accumulates magnitudes; `found` are the states known to do so already."""

    def __init__(self, values: Values, found: frozenset[str]) -> None:
        self.values, self.found = values, found
        self._inside = cache(self._look_inside)  # there may be exponentially many paths to an atom
        self._not_negative = cache(self._cannot_be_negative)

    def of_sum(self, x: Sum, name: str) -> bool:
        """Returns True if a term of x shows that the state `name` accumulates magnitudes."""
        return any(self._of_product(p, name) for p in x)

    def _of_product(self, p: Product, name: str) -> bool:
        if not self.values.support(p) - {name}:
            return False
        unknown = [a for a, e in p if e % 2 and not self._not_negative(a) and not self._is_moved_sign(a, name)]
        return not unknown or (len(unknown) == 1 and self._inside(unknown[0], name))

    def _look_inside(self, atom: int, name: str) -> bool:
        """Looks into the operand of a function, since a state may be the root or the logarithm of a sum."""
        kind, operands, _ = self.values.atoms[atom]
        if kind == "minimum":
            operands = tuple(x for x in operands if name in self.values.inputs(x))
        return kind in ("sum", "log", "minimum") and any(self.of_sum(x, name) for x in operands)

    def _is_moved_sign(self, atom: int, name: str) -> bool:
        """Returns True for the sign of a difference of magnitudes: `v - sign(v - g * g) * g * g` is as slow."""
        kind, operands, _ = self.values.atoms[atom]
        return kind == "sign" and self._inside_sum(operands[0], name)

    def _inside_sum(self, x: Sum, name: str) -> bool:
        return any(self._inside(a, name) for p in x for a, _ in p)

    def _cannot_be_negative(self, atom: int) -> bool:
        kind, operands, name = self.values.atoms[atom]
        if kind == "input":
            return name in self.found
        if kind == "maximum":
            return any(x and x.keys() != {ONE} and self._all(x) for x in operands)
        if kind in SELECTS:
            return all(map(self._all, operands[:2]))
        return kind in NEVER_NEGATIVE or (kind == "sum" and self._all(operands[0]))

    def _all(self, x: Sum) -> bool:
        """Returns True if every term of x cannot be negative; numbers are assumed to be positive."""
        return all((c is None or c > 0) and all(e % 2 == 0 or self._not_negative(a) for a, e in p)
                   for p, c in x.items())  # fmt: skip


class _Precise:
    """Finds averages of the parameter, or of states in `found`, whatever is added to these in the same step."""

    def __init__(self, graph: fx.Graph, outputs: Mapping[str, Any], found: frozenset[str]) -> None:
        named: dict[fx.Node, str] = {outputs[name]: name for name in found}
        named |= dict.fromkeys(spine(graph), "param") | {outputs["param"]: "param"}
        self.outputs, self.values = outputs, Values(graph, named | _copies(graph, named))
        self.precise = {self._product(name) for name in ("param", _COPY, *found)}

    def _product(self, name: str) -> Product:
        ((product, _),) = self.values.atom("input", name=name).items()
        return product

    def is_average(self, name: str) -> bool:
        """Returns True if the state `name` is such an average, or is the parameter plus something."""
        own = self._product(name)
        found = self.values.alternatives(self.values.of[self.outputs[name]])
        return any(self._is_average(x, own, self.precise - {own}) for x in found if x != {own: 1.0})

    def _is_average(self, x: Sum, own: Product, precise: set[Product]) -> bool:
        if precise.isdisjoint(x):
            return False
        added = own not in x and sum(x.get(p) or 0 for p in precise) == 1
        return added or all(p in precise | {ONE, own} or not self.values.support(p) for p in x)


_COPY = "copy of param"


def _copies(graph: fx.Graph, named: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Copies of the parameter, as separate values: a new state may start as a copy and differ from it later."""
    copies = {n: _original(n) for n in graph.nodes if n not in named and _original(n) is not n}
    return {n: _COPY for n, of in copies.items() if named.get(of) == "param" or _is_placeholder(of, "param")}


def _original(node: fx.Node) -> fx.Node:
    """The node that a node is a copy of, or the node itself."""
    while node.target in (aten.clone.default, aten._to_copy.default, aten.detach.default, aten.copy.default):
        node = node.args[1 if node.target is aten.copy.default else 0]  # type: ignore[assignment]  # a node
    return node


class _Parity:
    """The parity of values: 1 if they change sign with the gradient and the parameter, 0 if not, 2 for numbers."""

    def __init__(self, values: Values, states: Mapping[str, int | None]) -> None:
        self.values, self.inputs = values, {"param": 1, "grad": 1, **states}
        self._of_atom = cache(self._find)

    def of_sum(self, x: Sum) -> int | None:
        found = [0 if p == ONE else self._of_product(p) for p in x]
        return _same(found) if x.keys() - {ONE} else 2

    def _of_product(self, p: Product) -> int | None:
        found = [(self._of_atom(a), e) for a, e in p]
        if any(parity is None or (parity == 1 and not e.is_integer()) for parity, e in found):
            return None
        signed = [(parity, e) for parity, e in found if parity != 2]
        return sum(int(e) for parity, e in signed if parity) % 2 if signed else 2

    def _find(self, atom: int) -> int | None:
        kind, operands, name = self.values.atoms[atom]
        parities = [self.of_sum(x) for x in operands]
        if kind in ("input", "fill"):
            return self.inputs.get(name) if kind == "input" else 2 if name == "0" else 0
        if kind in ("sign", "sum"):
            return parities[0]
        if kind == "where":
            return _same(parities[:2])
        if kind == "minimum" and 2 in parities and (bounded := self._bounded(operands)):
            return self.of_sum(bounded)
        if kind == "abs":
            return 0 if parities[0] is not None else None
        return 0 if all(parity in (0, 2) for parity in parities) else None

    def _bounded(self, operands: tuple[Sum, ...]) -> Sum | None:
        """The value that is clamped from both sides by numbers."""
        for p in (p for x in operands if len(x) == 1 for p in x if len(p) == 1):
            ((atom, _),) = p
            kind, inner, _ = self.values.atoms[atom]
            if kind == "maximum" and any(self.of_sum(x) == 2 for x in inner):
                return next(x for x in inner if self.of_sum(x) != 2)
        return None


def _same(parities: Iterable[int | None]) -> int | None:
    """The common parity of all operands that are not numbers; None if they differ."""
    found = {p for p in parities if p != 2} or {2}
    return found.pop() if len(found) == 1 else None


_ROOTS = {aten.sqrt.default: 0, aten.rsqrt.default: 0, aten.reciprocal.default: 0, aten.exp.default: 0,
          aten.div.Tensor: 1, aten.addcdiv.default: 2}  # fmt: skip
"""Operations that may turn a small error of one operand into a large one of the result: the operand's index."""

_ELSEWHERE = {aten.sign, aten.sgn, aten.lt, aten.le, aten.gt, aten.ge, aten.eq, aten.ne}
"""Operations whose result does not depend on the size of an operand, only on its sign or order."""


def _under(node: fx.Node) -> Any:
    """The operand of which a node takes the root, or by which it divides."""
    if node.target is aten.pow.Tensor_Scalar:
        return node.args[0] if node.args[1] < 0 or node.args[1] % 1 else None  # type: ignore[operator]  # an exponent
    return node.args[_ROOTS[node.target]] if node.target in _ROOTS else None


def _ancestors(nodes: list[fx.Node], ends: Callable[[fx.Node], Any]) -> list[fx.Node]:
    """The nodes and all that they are computed from; the search does not pass nodes for which `ends` is true."""
    found: dict[fx.Node, None] = {}
    todo = list(nodes)
    while todo:
        node = todo.pop()
        if node not in found:
            found[node] = None
            passed = not ends(node) and getattr(node.target, "overloadpacket", None) not in _ELSEWHERE
            todo += _passed(node) if passed else []
    return list(found)


def _passed(node: fx.Node) -> list[fx.Node]:
    """The operands on whose size the result depends: not the mask of a `where`."""
    return [x for x in node.all_input_nodes if node.target is not aten.where.self or x is not node.args[0]]
