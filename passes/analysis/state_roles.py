"""The roles of the states of an update, by which a strategy chooses their formats (`numerics.strategies`).

What holds whatever the numbers of a step are (`Structure`) is found in sums of products whose
numbers are wildcards, so the way a value is written is irrelevant. Slow are:

* sums and averages of magnitudes (`signs`). At a decay near 1 such a state moves by less than half an ulp of bf16 per
  step, and stalls; a first moment, whose decay is around 0.9, does not;
* sums without any decay;
* copies and averages of the parameter, which need the precision of the parameter (schedule-free's z, a lookahead's
  slow weights), and what the parameter is moved to by a `lerp`.

Strategy `plus` stores these as pairs. Other strategies need more, which `roles_of` finds by the numbers of a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
import torch.fx as fx

from collage_neuron.passes.analysis.gains import Gains
from collage_neuron.passes.analysis.parameter_path import spine
from collage_neuron.passes.analysis.rounding_errors import first_moments, is_long, sensitive, sums_in
from collage_neuron.passes.analysis.signs import magnitudes, nonnegative
from collage_neuron.passes.analysis.value_numbering import ONE, Product, Sum, Values
from collage_neuron.passes.ir.stage import ancestors, returned
from collage_neuron.passes.ir.update import Captured, Recording

if TYPE_CHECKING:
    from collage_neuron.numerics.strategies import Role

aten = torch.ops.aten

COPIES = (aten.clone.default, aten._to_copy.default, aten.detach.default, aten.copy.default)
LERPS = (aten.lerp.Scalar, aten.lerp.Tensor)


@lru_cache(maxsize=256)  # asked again in each step, for the same few graphs
def structure(graph: fx.Graph) -> Structure:
    """What a captured update does to its states, whatever its numbers are."""
    return Structure(graph)


def _outputs(graph: fx.Graph) -> dict[str, Any]:
    outputs = returned(graph)
    assert isinstance(outputs, dict)
    return outputs


class Structure:
    """What a captured update does to its states, whatever its numbers are."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph, self.outputs = graph, _outputs(graph)
        self.values = Values(graph, _copies(graph, {}))
        self.new = {name: self.values.of[node] for name, node in self.outputs.items() if name not in ("param", "grad")}
        self.next = {name: self._alternatives(name) for name in self.new}

    def _alternatives(self, name: str) -> list[Sum]:
        """The possible new values of a state other than its old one; empty if the state is only kept or replaced."""
        starts, leaves = self._starts(name), self.values.alternatives(self.new[name])
        changed = [x for x in leaves if x not in starts]
        # Kept in some elements, and replaced in the others: nothing adds up (a gradient of before, behind a mask).
        if len(changed) < len(leaves) and not any(name in self.values.inputs(x) for x in changed):
            return []
        return changed

    def _starts(self, name: str) -> list[Sum]:
        """The possible values of a state before the step: itself, or the number that it is filled with at first."""
        return [self.values.atom("input", name=name), *self.values.fills()]

    def reads_itself(self, name: str) -> bool:
        """Returns True if the new value of a state depends on its old one."""
        return any(name in self.values.inputs(x) for x in self.next[name])

    @cached_property
    def idle(self) -> frozenset[str]:
        """The states that it does not change, so that it cannot show what they accumulate."""
        return frozenset(n for n, node in self.outputs.items() if n != "param" and _is_placeholder(node, n))

    @cached_property
    def unread(self) -> frozenset[str]:
        """The states that it makes of the gradient and the parameter, without reading them."""
        read = {str(n.target) for n in self.graph.nodes if n.op == "placeholder" and n.users}
        inputs = {name: self.values.inputs(x) for name, x in self.new.items() if name not in read}
        return frozenset(n for n, of_one in inputs.items() if {"grad"} <= of_one <= {"grad", "param", COPY})

    @cached_property
    def slow(self) -> frozenset[str]:
        """The states that accumulate slowly, which `plus` stores as pairs."""
        return self.magnitudes | self.sums

    @cached_property
    def magnitudes(self) -> frozenset[str]:
        """The states that accumulate a magnitude."""
        return magnitudes(self.values, self.next)

    @cached_property
    def sums(self) -> frozenset[str]:
        """The states that are sums without decay, or copies or averages of the parameter or of such a state."""
        param = _original(self.outputs["param"])
        sums = frozenset(n for n in self.new if self._is_sum(n) or _original(self.outputs[n]) is param)
        sums |= self.idle | self._positions
        while True:
            # Repeated, since an average of an average of the parameter is one of the parameter too.
            averages = _ParameterAverages(self.graph, self.outputs, sums)
            now = sums | {name for name in self.new if averages.has_average(name)}
            if now == sums:
                return sums
            sums = now

    @cached_property
    def _positions(self) -> frozenset[str]:
        """States that the parameter is moved towards by a `lerp`: each of their errors is one of the parameter then."""
        towards: set[Any] = {_original(n.args[1]) for n in spine(self.graph) if n.target in LERPS}  # type: ignore[arg-type]
        olds = {_original(n): str(n.target) for n in self.graph.nodes if n.op == "placeholder"}
        return frozenset(n for n in self.new if _original(self.outputs[n]) in towards).union(
            olds[n] for n in towards & olds.keys() if olds[n] in self.new
        )

    def _is_sum(self, name: str) -> bool:
        """Returns True if the update adds to the state, or to its initial value, with a coefficient of exactly 1."""
        for x in self.next[name]:
            for start in self._starts(name):
                (old,) = start
                others = [p for p in x if p != old]
                if x.get(old) == 1 and others and not any(old <= p for p in others):
                    return True
        return False

    @cached_property
    def odd(self) -> frozenset[str]:
        """States that change their sign with the gradient and the parameter, as first moments do."""
        # A state may be odd because another one is: so all others start as odd, and what contradicts that is dropped.
        parities = {name: 0 if name in self.magnitudes else 1 for name in self.new}
        while True:  # the largest assignment that follows from itself
            parity = _parity(self.values, {"param": 1, "grad": 1, **parities})
            now = {name: p for name, p in parities.items() if parity(self.new[name]) == p}
            if now == parities:
                return frozenset(name for name, p in now.items() if p)
            parities = now

    @cached_property
    def denominators(self) -> frozenset[str]:
        """The states of which the parameter's update takes a root, or by which it divides."""
        under = set[str]()

        def read(name: str) -> set[str]:
            """The states that a new value is made of, in which the new values of others are inputs."""
            others = {node: n for node, n in made.items() if n != name}
            values = Values(self.graph, others)
            inside = [*sums_in(values, values.of[self.outputs[name]])]
            steep = {a for x in inside for p in x for a, e in p if e < 0 or values.atoms[a].kind in ("power", "exp")}
            for a in steep:
                under.update(_inputs(values, sums_in(values, {frozenset({(a, 1.0)}): 1.0})))
            return _inputs(values, inside) & self.new.keys()

        made = {_original(node): name for name, node in self.outputs.items() if name in self.new}
        made = {node: name for node, name in made.items() if node.op != "placeholder"}
        ancestors(["param"], read)
        return frozenset(under & self.new.keys())

    @property
    def lossy_denominators(self) -> frozenset[str]:
        """The denominators that add to themselves, are not slow, and do not change sign with the gradient."""
        return frozenset(n for n in self.denominators - self.slow if self.reads_itself(n) and n not in self.odd)


def _inputs(values: Values, sums: Iterable[Sum]) -> set[str]:
    return {values.atoms[a].name for x in sums for p in x for a, _ in p if values.atoms[a].kind == "input"}


def _parity(values: Values, inputs: Mapping[str, int]) -> Callable[[Sum], int | None]:
    """A function of values: 1 for one that changes sign with the inputs of parity 1, 0 for one that does not."""

    @cache  # there may be exponentially many paths to an atom
    def of_atom(atom: int) -> int | None:
        kind, operands, name = values.atoms[atom]
        if kind == "input":
            return inputs.get(name)
        if (clamped := _clamped(values, atom)) is not None:
            return of_sum(clamped)
        if kind == "where":  # by a mask that is of neither sign: by the sign of x, x or -x is a magnitude
            chosen = {of_sum(x) for x in operands[:2] if x.keys() - {ONE}} or {0}
            return chosen.pop() if len(chosen) == 1 and of_sum(operands[2]) is not None else None
        parities = [of_sum(x) for x in operands]
        if kind in ("sign", "sum", "total"):
            return parities[0]
        if kind in ("abs", "norm"):
            return None if parities[0] is None else 0
        return 0 if {0}.issuperset(parities) else None

    def of_product(p: Product) -> int | None:
        each = [(of_atom(a), e) for a, e in p]
        if any(parity is None or (parity and not e.is_integer()) for parity, e in each):
            return None
        return int(sum(e for parity, e in each if parity)) % 2

    def of_sum(x: Sum) -> int | None:
        parities = {of_product(p) for p in x} or {0}
        return parities.pop() if len(parities) == 1 else None

    return of_sum


def _clamped(values: Values, atom: int) -> Sum | None:
    """The value that an atom clamps by numbers, from below and then from above; None for other atoms."""
    inside: list[Sum] = [{frozenset({(atom, 1.0)}): 1.0}]
    for expected in ("minimum", "maximum"):
        factors = [a for p in inside[0] for a, _ in p]
        kind, operands, _ = values.atoms[factors[0]]
        inside = [x for x in operands if values.inputs(x)]
        if len(factors) != 1 or kind != expected or len(inside) != 1:
            return None
    return inside[0]


# --- copies and averages of the parameter -----------------------------------------------------------------------------


class _ParameterAverages:
    """Finds averages of the parameter, or of the states `known`, whatever is added to these in the same step."""

    def __init__(self, graph: fx.Graph, outputs: Mapping[str, Any], known: frozenset[str]) -> None:
        # Opaque inputs: `slow.lerp(p, w)` is to be a mean of `slow` and `param`, and not of all that p is made of now.
        named: dict[fx.Node, str] = {outputs[name]: name for name in known}
        named |= dict.fromkeys(spine(graph), "param") | {outputs["param"]: "param"}
        self.outputs, self.values = outputs, Values(graph, named | _copies(graph, named))
        self.precise = {self.values.input(name) for name in ("param", COPY, *known)}

    def has_average(self, name: str) -> bool:
        """Returns True if the state `name` is such an average, or is the parameter plus something."""
        own = self.values.input(name)
        leaves = self.values.alternatives(self.values.of[self.outputs[name]])
        return any(self._is_average(x, own, self.precise - {own}) for x in leaves if x != {own: 1.0})

    def _is_average(self, x: Sum, own: Product, precise: set[Product]) -> bool:
        there = [c for p, c in x.items() if p in precise]
        if not there:
            return False
        added = own not in x and sum(c for c in there if not math.isnan(c)) == 1
        return added or all(p in precise | {ONE, own} or not self.values.support(p) for p in x)


COPY = "copy of param"


def _copies(graph: fx.Graph, named: Mapping[fx.Node, str]) -> dict[fx.Node, str]:
    """Copies of the parameter, as separate values: a new state may start as a copy and differ from it later."""
    copies = {n: _original(n) for n in graph.nodes if n not in named and _original(n) is not n}
    return {n: COPY for n, of in copies.items() if named.get(of) == "param" or _is_placeholder(of, "param")}


def _original(node: fx.Node) -> fx.Node:
    """The node that a node is a copy of, or the node itself."""
    while node.target in COPIES:
        node = node.args[1 if node.target is aten.copy.default else 0]  # type: ignore[assignment]  # a node
    return node


def _is_placeholder(node: Any, name: str) -> bool:
    return isinstance(node, fx.Node) and node.op == "placeholder" and node.target == name


# --- by the numbers of a step -----------------------------------------------------------------------------------------


def roles_of(captured: Captured, slots: Sequence[float], following: Recording | None = None) -> dict[str, Role]:
    """The roles of the states that have one; `slots` are the numbers of a step, `following` is the step after it."""
    graph, own = captured.graph, structure(captured.graph)
    idle, sums, slow = own.idle, own.sums, own.slow
    values, new = _numbered(graph, slots)
    unsigned = nonnegative(values, {name: x for name, x in new.items() if captured.fresh.get(name, 0.0) >= 0})
    others = sorted(new.keys() - slow - idle - {"param"})
    # From here on later roles replace earlier ones: what is shown by more comes after.
    roles: dict[str, Role] = dict.fromkeys(sorted(slow), "signed")
    roles |= {name: "sum" if name in sums else "slow" for name in roles if name in unsigned}
    roles |= {name: "maximum" for name in others if name in unsigned and _is_maximum(values, new[name], name)}
    gains = Gains(values, new, unsigned, sums)
    roles |= dict.fromkeys(sorted(sensitive(gains, new, roles)), "signed")
    averages = sorted(first_moments(new, own.odd & set(others), gains))
    roles |= {n: "long" if is_long(values, new[n], n) else "average" for n in averages}
    roles |= {n: role for n, role in _later(graph, following).items() if n in others}
    roles |= {name: "counter" for name in sorted(new.keys() - {"param"}) if _counts(values, new[name], name)}
    roles |= dict.fromkeys(sorted(idle), "idle")
    return roles | dict.fromkeys(sorted(idle & own.denominators), "decaying")  # a position divides nothing


def _numbered(graph: fx.Graph, slots: Sequence[float]) -> tuple[Values, dict[str, Sum]]:
    """The values of an update with the numbers of a step, and those that the parameter and the states have after it."""
    values = Values(graph, numbers={f"s{i}": x for i, x in enumerate(slots)})
    return values, {name: values.of[node] for name, node in _outputs(graph).items() if name != "grad"}


def _later(graph: fx.Graph, following: Recording | None) -> dict[str, Role]:
    """The roles in the step after of first moments that this step makes without reading them."""
    later = {} if following is None else roles_of(following.captured, following.slots)
    return {n: later[n] for n in sorted(structure(graph).unread) if later.get(n) in ("average", "long")}


def _is_maximum(values: Values, x: Sum, name: str) -> bool:
    """Returns True for `maximum(state, y)`, which has no decay (AMSGrad's)."""
    atoms = [values.atoms[a] for p, c in x.items() if c == 1 for a, e in p if e == 1 and len(p) == 1]
    own = values.atom("input", name=name)
    return len(x) == len(atoms) == 1 and atoms[0].kind == "maximum" and own in atoms[0].operands


def _counts(values: Values, x: Sum, name: str) -> bool:
    """Returns True if x, the new value of a state, is the old one and whole numbers: comparisons, signs, constants.

    Such a state is compared with numbers, and needs a format that holds whole numbers as they are.
    """
    changes = [*values.changes(x, name)]
    return any(change.kept for change in changes) and all(
        change.kept in (0.0, 1.0)
        and not change.is_scaled
        and all(values.atoms[a].kind in ("mask", "sign") for p in change.others for a, _ in p)
        for change in changes
    )


def decays(graph: fx.Graph, slots: Sequence[float]) -> Mapping[str, float]:
    """By how much a step shrinks the parameter (`param`) and each state that it shrinks, above 0 and below 1.

    1 minus the coefficient of the old value in the new one: 1e-6 for `param * s0 + s1 * m` with s0 = 1 - 1e-6. Of a
    value that a mask decides about, it is the largest. `slots` are the numbers of the step.
    """
    values, new = _numbered(graph, slots)
    kept = {name: [change.kept for change in values.changes(x, name)] for name, x in new.items()}
    by_name = {name: max((1 - c for c in of_one if 0 < c < 1), default=0.0) for name, of_one in kept.items()}
    return {name: decay for name, decay in by_name.items() if decay}


def pattern(slots: Sequence[float]) -> tuple[tuple[object, ...], ...]:
    """What roles may depend on of the numbers of a step: where it differs, they are determined anew.

    The sign of each number, if it is at most 1, or below, and in steps of a fifth its size and its distance from 1.
    """
    return tuple((x > 0, x < 0, abs(x) <= 1, abs(x) < 1, _size(x), _size(1 - abs(x))) for x in slots)


def _size(x: float) -> float:
    return round(4 * math.log2(abs(x))) if x and math.isfinite(x) else abs(x)
