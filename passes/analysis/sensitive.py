"""Finds the slow states of which small errors matter, because others cancel them, or because they follow the weights.

Given::

    v = square_avg * s0 + grad * grad * s1;  a = grad_avg.lerp(grad, s2)
    param - s3 * grad / (v - a * a).sqrt()

Result: `square_avg`. An error of a hundredth of it may be more than the difference, and make the root NaN.

A second moment under a root or in a divisor is not sensitive: the step has the relative error of it, or half of that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import cache

from collage_neuron.passes.analysis.gains import Gains
from collage_neuron.passes.analysis.polynomials import Product, Sum


def sensitive(gains: Gains, new: Mapping[str, Sum], among: Collection[str]) -> frozenset[str]:
    """Names of the states in `among` of which errors matter; `new` are the values of all and `param` after a step.

    These are terms that others cancel, factors of the weights, and averages of the weights.
    """
    carried = _carriers(gains)
    sums = [each for x in new.values() for each in _sums(gains, x)]
    found = {name for name in among if any(_is_of_weights(gains, p) for p in new[name])}
    for name in set(among) - found:
        own = _ratios(new[name])
        if any(_matters(gains, x, [p for p in x if name in carried(p)]) for x in sums if _ratios(x) != own):
            found.add(name)
    return frozenset(found)


def _matters(gains: Gains, x: Sum, terms: Collection[Product]) -> bool:
    return bool(terms) and (gains.holds_weights({p: x[p] for p in terms}) or gains.cancels(x, terms))


def _is_of_weights(gains: Gains, p: Product) -> bool:
    """Returns True for the size of what is made of the weights, but for a small decay beside the gradient."""
    _, *inside = _sums(gains, {p: 1.0})
    return any(map(gains.holds_weights, inside))


def _ratios(x: Sum) -> frozenset[object]:
    """The same for sums that differ by a factor only: a value that is divided by its first coefficient."""
    first = x[min(x, key=sorted)] if x else None
    return frozenset((p, c / first) if c is not None and first else (p, None) for p, c in x.items())


def _sums(gains: Gains, x: Sum) -> Iterator[Sum]:
    """A value, and the sums in it, each once; not those that are only compared (`comparisons`)."""
    seen, todo = set[int](), [x]
    while todo:
        x = todo.pop()
        yield x
        atoms = {a for p in x for a, _ in p} - seen
        seen |= atoms
        inside = [gains.values.atoms[a] for a in atoms]
        todo += [operand for atom in inside if atom.kind not in ("sign", "mask") for operand in atom.operands]


def _carriers(gains: Gains) -> Callable[[Product], frozenset[str]]:
    """A function that tells the states whose errors are in a product; those in a norm of all elements average out."""

    @cache  # there may be exponentially many paths to an atom
    def of_atom(atom: int) -> frozenset[str]:
        kind, operands, name = gains.values.atoms[atom]
        if kind == "input":
            return frozenset({name})
        return frozenset() if kind in ("norm", "total") else frozenset().union(*(of(p) for x in operands for p in x))

    def of(p: Product) -> frozenset[str]:
        return frozenset().union(*(of_atom(a) for a, _ in p))

    return of
