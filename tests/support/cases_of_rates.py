"""Rates that depend on which parameter it is, on the step, and on what the code keeps on the host: all are launched."""

from __future__ import annotations

import itertools
import math
import random
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary
from traced_updates import launched, place

Rate = Callable[[Any, Any, dict[str, Any], int], Any]
Kept = Callable[[list[Any]], dict[Any, Any]]

LATE = 4
"""The step from which on the rates of some depend on the parameter, when nothing in the operations shows it."""


RATED: set[str] = set()
"""The names of all: updates with the same calls."""


def rated(name: str, rate: Rate, kept: Kept = lambda params: {}) -> None:
    """Registers descent with a rate."""

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        p.sub_(g, alpha=lr * rate(o, p, s, t))

    update.__name__, update.kept = name, kept  # type: ignore[attr-defined]
    launched(update)
    RATED.add(name)


def with_late(name: str, rate: Rate, kept: Kept = lambda params: {}) -> None:
    """Registers a rate, and one that is the same for all parameters in the first steps."""
    rated(name, rate, kept)
    rated(f"{name}_later", lambda o, p, s, t: rate(o, p, s, t) if t >= LATE else 1.0, kept)


# --- which parameter --------------------------------------------------------------------------------------------------


def _compared(first: Any, second: Any = None) -> float:
    return 5.0 if first is second else 1.0


class Held:
    """An object with a slot."""

    __slots__ = ("head",)

    def __init__(self, head: Any) -> None:
        self.head = head


def _holding(params: list[Any]) -> dict[str, Any]:
    """All ways to hold a parameter of one's own."""

    def by_default(p: Any, q: Any = params[0]) -> float:
        return _compared(p, q)

    def by_keyword_default(p: Any, *, special: Any = (params[1],)) -> float:
        return max(_compared(p, q) for q in special)

    functions = by_default, by_keyword_default, partial(_compared, second=params[2])
    return {"list": params[2:], "slot": Held(params[1]), "weak": weakref.ref(params[2]), "functions": functions}


def _by_those_held(o: Any, p: Any, s: Any, t: int) -> float:
    held = [*o.kept["list"], o.kept["slot"].head, o.kept["weak"]()]
    return math.prod([*(_compared(p, q) for q in held), *(f(p) for f in o.kept["functions"])]) / 10


BY_ID: dict[int, float] = {}
BY_PARAMETER: Any = WeakTensorKeyDictionary()


def _in_dictionaries(params: list[Any]) -> dict[str, Any]:
    """Those of this module have the last parameter too."""
    BY_ID.clear()
    BY_ID[id(params[-1])] = BY_PARAMETER[params[-1]] = 0.1
    by_id = {id(p): 1.0 + i for i, p in enumerate(params)}
    return {"by id": by_id, "own": {params[2]: 5.0}, "weak": WeakIdKeyDictionary({params[1]: 3.0})}


def _by_dictionaries(o: Any, p: Any, s: Any, t: int) -> float:
    own = o.kept["by id"][id(p)] + o.kept["own"].get(p, 1.0) + o.kept["weak"].get(p, 1.0)
    return float(own * (BY_ID.get(id(p), 1.0) + BY_PARAMETER.get(p, 1.0)) / 4)


with_late("rate_by_place", lambda o, p, s, t: 0.5 ** place(o, p))
rated("rate_by_shape", lambda o, p, s, t: (0.5 if p.ndim > 1 else 1) * 3 / p.shape[-1] / (1 + (p.numel() > 10)))
with_late("rate_by_dictionaries", _by_dictionaries, _in_dictionaries)
with_late("rate_by_those_held", _by_those_held, _holding)
with_late("rate_by_class", lambda o, p, s, t: 5.0 if p.__class__ is Parameter and isinstance(p, Parameter) else 1.0)
rated("rate_of_one_at_a_time", lambda o, p, s, t: 1.0 if place(o, p) == t % 3 else 0.0)


# --- what one parameter leaves for the next ---------------------------------------------------------------------------


def _passed_on(o: Any, p: Any, s: Any, t: int) -> float:
    """The rate that the parameter before, or the last one of the step before, has left."""
    rate, o.kept["rate"] = o.kept.get("rate", 1.0), 0.5 if p.dim() == 1 else 2.0
    return float(rate)


with_late("a_rate_that_is_passed_on", _passed_on)


# --- what is on the host ----------------------------------------------------------------------------------------------


class Schedule:
    """Keeps its place in an attribute, and has one that is computed."""

    calls = 0

    @property
    def value(self) -> float:
        return (0.5 if self.calls < 10 else 2.0) / (1 + self.calls)

    def next(self) -> float:
        self.calls += 1
        return self.value


def _drawing(params: list[Any]) -> dict[str, Any]:
    return {"python": random.Random(3), "numpy": np.random.default_rng(3)}


def _of_dice(o: Any, p: Any, s: Any, t: int) -> Any:
    return 8 * o.kept["python"].random() * float(o.kept["numpy"].random()) * float(torch.rand(()))


rated("of_a_cycle", lambda o, p, s, t: next(o.kept["i"]), lambda ps: {"i": itertools.cycle([1.0, 0.5, 0.25, 2.0])})
rated("of_a_generator", lambda o, p, s, t: next(o.kept["i"]), lambda ps: {"i": (1 / n for n in itertools.count(1))})
rated("of_dice", _of_dice, _drawing)
rated("of_a_method_of_a_schedule", lambda o, p, s, t: o.kept["next"](), lambda ps: {"next": Schedule().next})


@launched
def decays_of_each(o: Any, p: Any, g: Any, s: dict[str, Any], lr: float, t: int) -> None:
    """Decays near 1 and near 0, and below: another one for each parameter, and another in each step."""
    m = s.setdefault("m", torch.zeros_like(p))
    m.mul_((0.95, 0.25, -0.5, 0.0, -0.0)[(place(o, p) + t) % 5]).add_(g)
    p.sub_(m, alpha=lr)
