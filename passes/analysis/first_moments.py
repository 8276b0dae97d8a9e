"""Finds the first moments: averages whose rounding errors are forgotten, and reach the parameter no larger.

Given::

    m = exp_avg.lerp(grad, s0);  a = grad_avg.lerp(grad, s1);  v = square_avg * s2 + grad * grad * s3
    param + s4 * m / (v - a * a).sqrt()

Result: `exp_avg` is a first moment. `grad_avg` is none: its square stands under a root, which a small error of it may
make negative.

A first moment decays by a number below 1 in each step, changes its sign with the gradient, and is found in what
becomes of the parameter and of other states only as it is, as its size, or behind a sign, in the first power. It is
added to the parameter, which is not computed from it anew, and no other term may cancel it (`gains`). What depends
on it in this way has its errors too, so the same is required of that. A state of which this is not shown gets more
bits.

A state that the step makes of the gradient and does not read (momentum of SGD, in its first step) shows nothing of
this: the step that follows it does (`unread_states`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from functools import cache, lru_cache

import torch.fx as fx

from collage_neuron.passes.analysis.gains import Gains
from collage_neuron.passes.analysis.polynomials import TERMS, Product, Sum, plus
from collage_neuron.passes.analysis.value_numbering import Values, is_slot
from collage_neuron.passes.ir.stage import returned


def first_moments(new: Mapping[str, Sum], among: Collection[str], gains: Gains) -> frozenset[str]:
    """Names of the states in `among` that are first moments; `new` are the values of all and `param` after a step.

    The values of `gains` know the numbers of the step.
    """
    values = gains.values
    return frozenset(
        n
        for n in among
        if _is_average(values, new[n], n)
        and not any(map(gains.holds_weights, _without_own(values, new[n], n)))
        and _stays_small(gains, new, n)
    )


LONG = 0.99
"""Errors of a first moment add up to 1 / sqrt(2 * (1 - decay)) of one in units of what it moves: 7 of them here."""


def is_long(values: Values, x: Sum, name: str) -> bool:
    """Returns True if x, the new value of a first moment, keeps more than `LONG` of the old one."""
    (own,) = values.atom("input", name=name)
    return any(LONG < (leaf.get(own) or 0.0) < 1 for leaf in values.alternatives(x, name))


@lru_cache(maxsize=256)  # asked again in each step, for the same few graphs
def unread_states(graph: fx.Graph) -> frozenset[str]:
    """Names of the states that a captured update makes of the gradient and the parameter, without reading them."""
    outputs = returned(graph)
    assert isinstance(outputs, dict)
    read = {str(n.target) for n in graph.nodes if n.op == "placeholder" and n.users}
    return frozenset(n for n, x in outputs.items() if n not in (*_NO_STATES, *read) and _is_of_gradient(x))


def _is_of_gradient(x: fx.Node) -> bool:
    """Returns True if a value depends on the gradient, and on no state."""
    found, todo = set[fx.Node](), [x]
    while todo:
        node = todo.pop()
        todo += [n for n in node.all_input_nodes if n not in found]
        found.add(node)
    names = {str(n.target) for n in found if n.op == "placeholder"}
    return "grad" in names and all(n in _NO_STATES or is_slot(n) for n in names)


_NO_STATES = {"param", "grad"}


def _is_average(values: Values, x: Sum, name: str) -> bool:
    """Returns True if every alternative of x keeps the state, or decays it and adds something; one at least decays."""
    (own,) = values.atom("input", name=name)
    errors = _Errors(values, frozenset({name}), None)
    changed = [leaf for leaf in _alternatives(values, x, name) if leaf != {own: 1.0}]
    return bool(changed) and all(_decays(errors, leaf, own) for leaf in changed)


def _decays(errors: _Errors, x: Sum, own: Product) -> bool:
    """Returns True for `c * own + others` with c from 0 to below 1, where the size of the state is in no other term."""
    old = [(p, c) for p, c in x.items() if errors.of_product(p)]
    others = [p for p in x if not errors.of_product(p) and errors.values.support(p)]
    return len(old) == 1 and bool(others) and _is_decay(*old[0], own)


def _is_decay(p: Product, c: float | None, own: Product) -> bool:
    """Returns True if p is the state times a number above 0 and below 1: what is multiplied by 0 is replaced."""
    return own == p and c is not None and 0 < c < 1


def _alternatives(values: Values, x: Sum, name: str) -> list[Sum]:
    """The alternatives of x by `where`, unless a mask depends on states, since that may be a maximum."""
    done: list[Sum] = []
    todo = [x]
    while todo:
        leaf = todo.pop()
        found = next(((p, a) for p in leaf for a, e in p if e == 1 and _chooses(values, a, name)), None)
        if found is None or len(done) + len(todo) > TERMS:
            done.append(leaf)
            continue
        (p, a), c = found, leaf[found[0]]
        rest = {q: d for q, d in leaf.items() if q != p}
        todo += [plus(rest, values.times({p - {(a, 1.0)}: c}, of)) for of in values.atoms[a].operands[:2]]
    return done


def _chooses(values: Values, atom: int, name: str) -> bool:
    """Returns True for a choice, by the parameter and its gradient, between values of which one has the state."""
    kind, operands, _ = values.atoms[atom]
    if kind != "where" or not any(name in values.inputs(x) for x in operands[:2]):
        return False
    return all(n in _NO_STATES or is_slot(n) for n in values.inputs(operands[2]))


def _stays_small(gains: Gains, new: Mapping[str, Sum], name: str) -> bool:
    """Returns True if nothing depends on the errors of a state, or of what it enters, by more than the first power.

    What reads the new parameter in a later step is not followed: there the errors of a step are as small as the step.
    """
    values, noisy = gains.values, frozenset({name})
    while True:
        errors = _Errors(values, noisy, gains)
        powers = {n: _power(errors, x, n) for n, x in new.items()}
        if any(power > 1 for power in powers.values()):
            return False
        now = noisy | {n for n, power in powers.items() if power and n != "param"}
        if now == noisy:
            return True
        noisy = now


def _power(errors: _Errors, x: Sum, name: str) -> float:
    """The power in which a new value depends on errors: they are added to a parameter, and may decay in a state."""
    if name in errors.noisy:  # what its own terms are beside the others, they were before
        return max(map(errors.of_sum, _without_own(errors.values, x, name)), default=0.0)
    power = errors.of_sum(x)
    if not power or name != "param":
        return power
    return power if all(map(errors.is_added, errors.values.alternatives(x))) else math.inf


def _without_own(values: Values, x: Sum, name: str) -> list[Sum]:
    """The alternatives of x, the new value of a state, each without the terms that have the old one as a factor."""
    (own,) = values.atom("input", name=name)
    return [{p: c for p, c in leaf.items() if not own <= p} for leaf in values.alternatives(x, name)]


class _Errors:
    """The power in which a value depends on the errors of the states in `noisy`; infinity for other functions.

    With `gains` it is infinity too where terms may cancel, since errors become larger beside what is left.
    """

    def __init__(self, values: Values, noisy: frozenset[str], gains: Gains | None) -> None:
        self.values, self.noisy, self.gains = values, noisy, gains
        self._of_atom = cache(self._find)  # there may be exponentially many paths to an atom

    def of_sum(self, x: Sum) -> float:
        powers = {p: power for p in x if (power := self.of_product(p))}
        if powers and self.gains is not None and self.gains.cancels(x, powers):
            return math.inf
        return max(powers.values(), default=0.0)

    def is_added(self, x: Sum) -> bool:
        """Returns True if x, a new value of the parameter, has the old one in a term without errors."""
        return any("param" in self.values.support(p) and not self.of_product(p) for p in x)

    def of_product(self, p: Product) -> float:
        powers = [(self._of_atom(a), e) for a, e in p]
        return sum(power * e if e > 0 and float(e).is_integer() else math.inf for power, e in powers if power)

    def _find(self, atom: int) -> float:
        kind, operands, name = self.values.atoms[atom]
        if kind == "input":
            return float(name in self.noisy)
        powers = [self.of_sum(x) for x in operands]
        if kind == "where":
            return self._of_choice(powers[:2], operands, not self.noisy.isdisjoint(self.values.inputs(operands[2])))
        if not any(powers):
            return 0.0
        if kind in ("maximum", "minimum"):
            return self._of_choice(powers, operands, True)
        if kind in ("sum", "abs", "total"):  # |x| changes by no more than x
            return self._of_total(operands[0]) if kind == "total" else powers[0]
        if kind == "norm":  # of all elements: their errors average out
            return 0.0 if powers[0] <= 1 else math.inf
        return 0.0 if kind in ("sign", "mask") and max(powers) < math.inf else math.inf

    def _of_choice(self, powers: list[float], operands: tuple[Sum, ...], by_errors: bool) -> float:
        """A choice that errors decide may be a maximum, which they only increase; a bound that is a number is none."""
        bounded = any(not self.values.inputs(x) for x in operands[:2])
        return max(powers) if bounded or not by_errors or not any(powers) else math.inf

    def _of_total(self, x: Sum) -> float:
        """A sum over all elements: of squares, a norm."""
        is_square = len(x) == 1 and all(e % 2 == 0 for p in x for _, e in p)
        return 0.0 if is_square and self.of_sum(x) <= 2 else self.of_sum(x)
