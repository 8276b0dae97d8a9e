"""Tells what rounding errors of a state become: forgotten, as those of first moments are, or large.

First moments are averages whose rounding errors are forgotten, and reach the parameter no larger. Given::

    m = exp_avg.lerp(grad, s0);  a = grad_avg.lerp(grad, s1);  v = square_avg * s2 + grad * grad * s3
    param + s4 * m / (v - a * a).sqrt()

Result: `exp_avg` is a first moment. `grad_avg` is none: its square stands under a root, which a small error of it may
make negative.

A first moment changes its sign with the gradient (`state_roles`) and decays by a number below 1 in each step. What
becomes of the parameter and of other states has it only as it is, as its size, or behind a sign, in the first power. It
is added to the parameter, which is not computed from it anew, and no other term may cancel it (`gains`). What depends
on it in this way has its errors too, so the same is required of that. A state of which this is not shown gets more
bits.

A state that the step makes of the gradient and does not read (momentum of SGD, in its first step) shows nothing of
this: the step that follows it does (`state_roles.Structure.unread`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from functools import cache

from collage_neuron.passes.analysis.gains import Gains
from collage_neuron.passes.analysis.value_numbering import Product, Sum, Values, is_slot


def first_moments(new: Mapping[str, Sum], among: Collection[str], gains: Gains) -> frozenset[str]:
    """Names of the states in `among` that are first moments; `new` are the values of all and `param` after a step.

    The values of `gains` know the numbers of the step.
    """
    return frozenset(n for n in among if _is_average(gains, new[n], n) and _stays_small(gains, new, n))


LONG = 0.99
"""Errors of a first moment add up to 1 / sqrt(2 * (1 - decay)) of one in units of what it moves: 7 of them here."""


def is_long(values: Values, x: Sum, name: str) -> bool:
    """Returns True if x, the new value of a first moment, keeps more than `LONG` of the old one."""
    return any(LONG < change.kept < 1 for change in values.changes(x, name))


def _is_average(gains: Gains, x: Sum, name: str) -> bool:
    """Returns True if every alternative of x keeps the state, or decays it and adds something; one at least decays.

    What is added has nothing of the state but its sign, and little of the weights.
    """
    values, errors = gains.values, Errors(gains.values, frozenset({name}), None)
    # A choice about which states decide may be a maximum, and is not taken apart.
    changes = [*values.changes(x, name, lambda atom: _is_chosen_by_gradient(values, atom, name))]
    return bool(changes) and all(
        0 < change.kept < 1
        and not change.is_scaled
        and any(map(values.support, change.others))
        and not errors.of_sum(change.others)
        and not gains.holds_weights(change.others)
        for change in changes
    )


def _is_chosen_by_gradient(values: Values, atom: int, name: str) -> bool:
    """Returns True for a choice, by the parameter and its gradient, between values of which one has the state."""
    kind, operands, _ = values.atoms[atom]
    if kind != "where" or not any(name in values.inputs(x) for x in operands[:2]):
        return False
    return all(n in ("param", "grad") or is_slot(n) for n in values.inputs(operands[2]))


def _stays_small(gains: Gains, new: Mapping[str, Sum], name: str) -> bool:
    """Returns True if nothing depends on the errors of a state, or of what it enters, by more than the first power.

    What reads the new parameter in a later step is not followed: there the errors of a step are as small as the step.
    """
    values, noisy = gains.values, frozenset({name})
    while True:
        errors = Errors(values, noisy, gains)
        powers = {n: _power(errors, x, n) for n, x in new.items()}
        if any(power > 1 for power in powers.values()):  # errors of a square do not average out
            return False
        now = noisy | {n for n, power in powers.items() if power and n != "param"}
        if now == noisy:
            return True
        noisy = now


def _power(errors: Errors, x: Sum, name: str) -> float:
    """The power in which a new value depends on errors: they are added to a parameter, and may decay in a state."""
    if name in errors.noisy:  # what its own terms are beside the others, they were before
        return max(map(errors.of_sum, (change.others for change in errors.values.changes(x, name))), default=0.0)
    power = errors.of_sum(x)  # of a state that has errors from now on
    if not power or name != "param":
        return power
    return power if all(map(errors.is_added, errors.values.alternatives(x))) else math.inf


class Errors:
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
            return powers[0]
        if kind == "norm":  # of all elements: their errors average out
            return 0.0 if powers[0] <= 1 else math.inf
        return 0.0 if kind in ("sign", "mask") and max(powers) < math.inf else math.inf

    def _of_choice(self, powers: list[float], operands: tuple[Sum, ...], by_errors: bool) -> float:
        """A choice that errors decide may be a maximum, which they only increase; a bound that is a number is none."""
        bounded = any(not self.values.inputs(x) for x in operands[:2])
        return max(powers) if bounded or not by_errors or not any(powers) else math.inf


def sensitive(gains: Gains, new: Mapping[str, Sum], among: Collection[str]) -> frozenset[str]:
    """Names of the states in `among` of which errors matter; `new` are the values of all and `param` after a step.

    These are compared, terms that others cancel, factors of the weights, and averages of the weights: a comparison, or
    terms that cancel, make large errors of small ones. Given::

        v = square_avg * s0 + grad * grad * s1;  a = grad_avg.lerp(grad, s2)
        param - s3 * grad / (v - a * a).sqrt()

    Result: `square_avg`. An error of a hundredth of it may be more than the difference, and make the root NaN. A second
    moment under a root or in a divisor is not sensitive: the step has its relative error, or half of that. Given::

        count = seen + (grad != 0)
        param - s0 * grad * (count >= 5)

    Result: `seen`. Rounded stochastically, a counter of 5 is a 4 in some elements, and these do not move.
    """
    sums = [each for x in new.values() for each in sums_in(gains.values, x)]
    by_errors = {name for name in among if any(_is_of_weights(gains, p) for p in new[name])}
    for name in set(among) - by_errors:
        own, errors = new[name].keys(), Errors(gains.values, frozenset({name}), None)
        if any(_matters(gains, x, [p for p in x if errors.of_product(p)]) for x in sums if x.keys() != own):
            by_errors.add(name)
    return frozenset(by_errors | (set(among) & _compared(gains.values, new)))


def _compared(values: Values, new: Mapping[str, Sum]) -> set[str]:
    """Names of the inputs that comparisons or signs in `new` depend on; the larger of two values compares none.

    A sign by which a state itself is moved (Yogi's second moment) does not count: it stays as wrong as it was.
    """
    atoms = {n: {a for each in sums_in(values, x, True) for p in each for a, _ in p} for n, x in new.items()}
    names = set[str]()
    for atom in set().union(*atoms.values()):
        kind, operands, _ = values.atoms[atom]
        if kind in ("mask", "sign"):
            inside = {name for x in operands for name in values.inputs(x)}
            names |= {n for n in inside if kind == "mask" or atom not in atoms.get(n, ())}
    return names


def _matters(gains: Gains, x: Sum, terms: Collection[Product]) -> bool:
    return bool(terms) and (gains.holds_weights({p: x[p] for p in terms}) or gains.cancels(x, terms))


def _is_of_weights(gains: Gains, p: Product) -> bool:
    """Returns True for the size of what is made of the weights, but for a small decay beside the gradient."""
    # The first is the value itself.
    _, *inside = sums_in(gains.values, {p: 1.0})
    return any(map(gains.holds_weights, inside))


def sums_in(values: Values, x: Sum, compared: bool = False) -> Iterator[Sum]:
    """A value, and the sums in it, each once; those that are only compared if `compared` is true."""
    seen, todo = set[int](), [x]
    while todo:
        x = todo.pop()
        yield x
        atoms = {a for p in x for a, _ in p} - seen
        seen |= atoms
        inside = [values.atoms[a] for a in atoms]
        todo += [operand for a in inside if compared or a.kind not in ("sign", "mask") for operand in a.operands]
