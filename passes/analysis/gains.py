"""Tells what becomes of a constant gradient in an update, and so which terms of a sum cancel.

Given::

    a = slow * s0 + grad * s1;  b = fast * s2 + grad * s3;  v = square.lerp(grad * grad, s4)
    param - s5 * (a - b) / v.sqrt()

Result: with s0, ... = .99, .01, .9, .1, the gain of `slow` and of `fast` is 1: both become the gradient. The gain of
what is added to the parameter, beside `1 / v.sqrt()`, is -s5 + s5: the terms cancel, and what is left may be much
smaller than the rounding errors of both.

A difference of gradients has the gain 0 and the gross gain 2: its errors are those of a gradient, and nothing of it is
left in the end, unless there is a momentum beside it (Adan). What this does not show has an unknown gain, which cancels
with anything.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from collage_neuron.passes.analysis.value_numbering import NEVER_NEGATIVE, ONE, Product, Sum, Values, is_slot


class Gain(NamedTuple):
    """Of a value: how many times the gradient it is, beside factors that are sizes (second moments, norms)."""

    value: float
    """NaN if it is unknown."""
    gross: float
    """The same if nothing in it were subtracted."""
    sizes: Product = ONE
    is_size: bool = False
    """True if it is a size itself, which has no sign to change with the gradient."""


_UNKNOWN, _GRADIENT, _SIZE = Gain(math.nan, math.nan), Gain(1.0, 1.0), Gain(1.0, 1.0, is_size=True)
_WEIGHTS = Gain(0.0, 0.0, is_size=True)
"""Of what is made of the parameter alone; beside other terms it is none."""


class Gains:
    """The gains of the values of an update.

    `magnitudes` are the states that cannot be negative, `weights` those that are sums, copies or averages of the
    parameter, and `new` the values of all states after a step.
    """

    def __init__(
        self, values: Values, new: Mapping[str, Sum], magnitudes: Collection[str], weights: Collection[str]
    ) -> None:
        self.values = values
        self._states = dict.fromkeys(("param", *weights), _WEIGHTS) | dict.fromkeys(magnitudes, _SIZE)
        self._states["grad"] = _GRADIENT
        self._of_atom = cache(self._find)  # there may be exponentially many paths to an atom
        rest = {name: x for name, x in new.items() if name not in self._states}
        # The gain of an average of another state follows once that of the other is known.
        while known := {n: g for n, x in rest.items() if not math.isnan((g := self._of_state(x, n)).value)}:
            self._states |= known
            self._of_atom = cache(self._find)
            rest = {name: x for name, x in rest.items() if name not in known}

    def cancels(self, x: Sum, terms: Collection[Product]) -> bool:
        """Returns True if less than half of some of the terms of x may be left, beside what is made of the weights."""
        left = self._terms(x)
        if len(left) == 1 and math.isnan(left[0].value):
            return False  # whatever it is, there is nothing to cancel it
        gross = [g.gross for p in terms if (g := self._of_product(p, x[p])) is not _WEIGHTS]
        if not gross:
            return True  # the terms are of the weights, which are larger than any step
        # Written so that an unknown gain, which is NaN, counts as one that cancels.
        return not abs(_total(left).value) >= max(gross) / 2

    def is_weights(self, p: Product) -> bool:
        """Returns True for a product that is made of the weights, and of sizes."""
        return self._of_product(p, 1.0) is _WEIGHTS

    def holds_weights(self, x: Sum) -> bool:
        """Returns True if the weights are more than a fifth of what is in x of the gradient: no small decay is."""
        of_weights = [math.inf if math.isnan(c) else abs(c) for p, c in x.items() if self.is_weights(p)]
        return sum(of_weights) > sum(term.gross for term in self._terms(x)) / 5

    def _terms(self, x: Sum) -> list[Gain]:
        return [g for p, c in x.items() if (g := self._of_product(p, c)) is not _WEIGHTS]

    def _of_sum(self, x: Sum) -> Gain:
        terms = self._terms(x)
        return _total(terms) if terms else _WEIGHTS

    def _of_product(self, p: Product, c: float) -> Gain:
        """The gain of c * p; a factor whose exponent is even, or no whole number, is a size."""
        gains = {(a, e): self._of_atom(a) if float(e).is_integer() and e % 2 else _SIZE for a, e in p}
        signed = [(e, gain) for (_, e), gain in gains.items() if gain is not _SIZE]
        sizes = frozenset(factor for factor, gain in gains.items() if gain is _SIZE)
        if math.isnan(c) or len(signed) > 1:
            return _UNKNOWN
        if not signed:
            return Gain(c, abs(c), sizes, True)
        ((exponent, gain),) = signed
        if gain is _WEIGHTS or (exponent < 0 and not gain.value):
            return gain if gain is _WEIGHTS else _UNKNOWN
        return Gain(c * gain.value**exponent, abs(c) * gain.gross**exponent, sizes)

    def _of_state(self, x: Sum, name: str) -> Gain:
        """What a state becomes in the end, if its old value decays; the same of all alternatives that change it."""
        gains = list[Gain]()
        for change in self.values.changes(x, name):
            if not -1 < change.kept < 1:
                return _UNKNOWN
            gain = self._of_sum(change.others)
            value, gross = gain.value / (1 - change.kept), gain.gross / (1 - abs(change.kept))
            gains.append(gain._replace(value=value, gross=gross))
        return _common(gains)

    def _find(self, atom: int) -> Gain:
        kind, operands, name = self.values.atoms[atom]
        if kind == "input":  # a number that is 0 in this step has no sign yet; when it has, all this is found anew
            return _SIZE if is_slot(name) else self._states.get(name, _UNKNOWN)
        if kind in NEVER_NEGATIVE or kind == "number":  # a tensor that is filled with a number of the step
            return _SIZE
        if kind in ("where", "maximum", "minimum"):  # bounds that are numbers do not count
            return _common([_factor(self._of_sum(x)) for x in operands[:2] if self.values.inputs(x)])
        gain = _factor(self._of_sum(operands[0])) if kind in ("sum", "sign") else _UNKNOWN
        return _GRADIENT._replace(value=math.copysign(1.0, gain.value)) if kind == "sign" and gain.value else gain


def _common(gains: Sequence[Gain]) -> Gain:
    """The gain that all have; unknown if they differ, or there are none."""
    return gains[0] if gains and all(gain == gains[0] for gain in gains) else _UNKNOWN


def _factor(gain: Gain) -> Gain:
    """The gain of a sum that is a factor: all sizes that cannot be negative are alike."""
    return _SIZE if gain.is_size and gain.value > 0 else gain


def _total(terms: Sequence[Gain]) -> Gain:
    """The gain of a sum; unknown if its terms have different signs, and different sizes beside them."""
    values = [t.value for t in terms]
    if len({t.is_size for t in terms}) > 1 or (len({t.sizes for t in terms}) > 1 and min(values) < 0 < max(values)):
        return _UNKNOWN
    value = math.fsum(values) if all(map(math.isfinite, values)) else math.nan
    return Gain(value, sum(t.gross for t in terms), terms[0].sizes, terms[0].is_size)
