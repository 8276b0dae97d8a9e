"""What a kernel may make of an update on a device whose approximations are off by some ulps: intervals in float64.

All but sqrt, reciprocal, exp, log and power is fp32 rounded once, and rounding is monotone: the ends of an interval go
to the ends of the result. Where both ends meet, the device must give that very number.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from exact import Interval, Intervals, ulp
from nki_runs import Step

from collage_neuron.numerics.eft import sqrt

FUNCTIONS = {sqrt: 0, torch.exp: 2, torch.log: 2, torch.pow: 2}
"""Approximated on the device, and the ulps that the float64 of these intervals may be off by after its rounding."""


class _OnDevice(Intervals):
    """Runs an update, whose quotients are products with reciprocals, on intervals."""

    def __init__(self, module: fx.GraphModule, ulps: int) -> None:
        super().__init__(module)
        self._ulps = ulps

    def run_node(self, n: fx.Node) -> Any:
        result = fx.Interpreter.run_node(self, n)
        if n.target in FUNCTIONS:
            return _widened(result, self._ulps + FUNCTIONS[n.target])
        if n.target is operator.truediv and not _is_scalar(n.args[1]):
            return _widened(result, self._ulps)
        return result._replace(exact=None) if isinstance(result, Interval) else result  # no engine contracts


def _is_scalar(x: object) -> bool:
    return isinstance(x, fx.Node) and x.op == "placeholder" and str(x.target)[1:].isdigit()


def _widened(x: Interval, ulps: int) -> Interval:
    return Interval(x.low - ulps * ulp(x.low, 24), x.high + ulps * ulp(x.high, 24))


def allowed(step: Step, ulps: int) -> dict[str, Interval]:
    """The intervals of the new components, by key."""
    s = step.by_reciprocals()
    values = [Interval(x.double(), x.double()) for x in (*(s.components[k] for k in s.update.inputs), *s.vector)]
    return dict(zip(s.update.outputs, _OnDevice(s.update.graph, ulps).run(*values), strict=True))


def outside(found: dict[str, torch.Tensor], step: Step, ulps: int) -> dict[str, int]:
    """How many elements of each component are not in their interval, where any are."""
    intervals = allowed(step, ulps)
    counts = {}
    for key, x in found.items():
        low, high = intervals[key].low, intervals[key].high
        counts[key] = int((~((x.double() >= low) & (x.double() <= high))).sum())
    return {key: n for key, n in counts.items() if n}


def undecided(step: Step, ulps: int) -> float:
    """The share of elements for which more than one number is allowed."""
    wide = [(i.low != i.high).double().mean() for i in allowed(step, ulps).values()]
    return float(torch.stack(wide).mean())
