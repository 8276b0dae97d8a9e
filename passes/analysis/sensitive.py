"""Finds the states of which small errors matter: a comparison, or terms that cancel, make large errors of them.

Given::

    v = square_avg * s0 + grad * grad * s1;  a = grad_avg.lerp(grad, s2)
    param - s3 * grad / (v - a * a).sqrt()

Result: `square_avg`. An error of a hundredth of it may be more than the difference, and make the root NaN.

A second moment under a root or in a divisor is not sensitive: the step has the relative error of it, or half of that.

Given::

    count = seen + (grad != 0)
    param - s0 * grad * (count >= 5)

Result: `seen`. Rounded stochastically, a counter of 5 is a 4 in some elements, and these do not move.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

from collage_neuron.passes.analysis.first_moments import Errors
from collage_neuron.passes.analysis.gains import Gains
from collage_neuron.passes.analysis.value_algebra import Product, Sum
from collage_neuron.passes.analysis.value_numbering import Values


def sensitive(gains: Gains, new: Mapping[str, Sum], among: Collection[str]) -> frozenset[str]:
    """Names of the states in `among` of which errors matter; `new` are the values of all and `param` after a step.

    These are compared, terms that others cancel, factors of the weights, and averages of the weights.
    """
    sums = [each for x in new.values() for each in _sums(gains.values, x)]
    by_errors = {name for name in among if any(_is_of_weights(gains, p) for p in new[name])}
    for name in set(among) - by_errors:
        own, errors = _ratios(new[name]), Errors(gains.values, frozenset({name}), None)
        if any(_matters(gains, x, [p for p in x if errors.of_product(p)]) for x in sums if _ratios(x) != own):
            by_errors.add(name)
    return frozenset(by_errors | (set(among) & _compared(gains.values, new)))


def _compared(values: Values, new: Mapping[str, Sum]) -> set[str]:
    """Names of the inputs that comparisons or signs in `new` depend on; the larger of two values compares none.

    A sign by which a state itself is moved (Yogi's second moment) does not count: it stays as wrong as it was.
    """
    atoms = {n: {a for each in _sums(values, x, True) for p in each for a, _ in p} for n, x in new.items()}
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
    _, *inside = _sums(gains.values, {p: 1.0})
    return any(map(gains.holds_weights, inside))


def _ratios(x: Sum) -> frozenset[object]:
    """The same for sums that differ by a factor only: a value that is divided by its first coefficient."""
    first = x[min(x, key=sorted)] if x else 1.0
    return frozenset((p, None if math.isnan(c / first) else c / first) for p, c in x.items())  # NaN equals nothing


def _sums(values: Values, x: Sum, compared: bool = False) -> Iterator[Sum]:
    """A value, and the sums in it, each once; those that are only compared if `compared` is true."""
    seen, todo = set[int](), [x]
    while todo:
        x = todo.pop()
        yield x
        atoms = {a for p in x for a, _ in p} - seen
        seen |= atoms
        inside = [values.atoms[a] for a in atoms]
        todo += [operand for a in inside if compared or a.kind not in ("sign", "mask") for operand in a.operands]
