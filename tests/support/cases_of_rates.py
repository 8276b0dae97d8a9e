"""Rates that depend on which parameter it is, on the step, and on what the code keeps on the host: all are launched."""

from __future__ import annotations

import collections
import contextvars
import enum
import fractions
import io
import itertools
import random
import threading
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary
from traced_updates import all_of, launched, place

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


def _by_default(head: Any) -> Callable[[Any], float]:
    def rate(p: Any, q: Any = head) -> float:
        return 5.0 if p is q else 1.0

    return rate


def _by_keyword_default(head: Any) -> Callable[[Any], float]:
    def rate(p: Any, *, special: Any = (head,)) -> float:
        return 5.0 if any(p is q for q in special) else 1.0

    return rate


class Held:
    """An object with a slot."""

    __slots__ = ("head",)

    def __init__(self, head: Any) -> None:
        self.head = head


BY_ID: dict[int, float] = {}
BY_PARAMETER: Any = WeakTensorKeyDictionary()


def _in_modules(params: list[Any]) -> dict[str, Any]:
    """The dictionaries of this module have the last parameter too."""
    BY_ID.clear()
    BY_ID[id(params[-1])] = BY_PARAMETER[params[-1]] = 0.1
    return {"mine": len(params)}


def _by_all_states(o: Any, p: Any, s: Any, t: int) -> Any:
    s["n"] = t
    return 9.0 / sum(o.state[q].get("n", 0) for q in o.state)


with_late("rate_by_place", lambda o, p, s, t: 0.5 ** place(o, p))
with_late("rate_of_the_last", lambda o, p, s, t: 4.0 if place(o, p) == len(all_of(o)) - 1 else 1.0)
with_late("rate_by_the_number_of_all", lambda o, p, s, t: 3.0 / sum(q.grad is not None for q in all_of(o)))
with_late("rate_by_the_elements_of_all", lambda o, p, s, t: 50.0 / sum(q.numel() for q in all_of(o)))
with_late("rate_by_shape", lambda o, p, s, t: (0.5 if p.ndim > 1 else 1) * 3 / p.shape[-1] / (1 + (p.numel() > 10)))
with_late("rate_by_id", lambda o, p, s, t: o.kept[id(p)], lambda ps: {id(p): 1.0 + i for i, p in enumerate(ps)})
with_late("rate_by_parameter", lambda o, p, s, t: o.kept.get(p, 1.0), lambda ps: {ps[2]: 5.0})
with_late("rate_of_those_held", lambda o, p, s, t: 5.0 if any(p is q for q in o.kept["these"]) else 1.0,
          lambda ps: {"these": ps[2:]})  # fmt: skip
with_late("rate_in_a_slot", lambda o, p, s, t: _compared(p, o.kept["o"].head), lambda ps: {"o": Held(ps[1])})
with_late("rate_in_a_weak_dictionary", lambda o, p, s, t: o.kept["d"].get(p, 1.0),
          lambda ps: {"d": WeakIdKeyDictionary({ps[2]: 5.0})})  # fmt: skip
with_late("rate_in_a_weak_dictionary_of_tensors", lambda o, p, s, t: o.kept["d"].get(p, 1.0),
          lambda ps: {"d": WeakTensorKeyDictionary({ps[2]: 5.0})})  # fmt: skip
with_late("rate_of_a_weak_reference", lambda o, p, s, t: 5.0 if o.kept["r"]() is p else 1.0,
          lambda ps: {"r": weakref.ref(ps[2])})  # fmt: skip
with_late("rate_in_a_default", lambda o, p, s, t: o.kept["f"](p), lambda ps: {"f": _by_default(ps[2])})
with_late("rate_in_a_keyword_default", lambda o, p, s, t: o.kept["f"](p), lambda ps: {"f": _by_keyword_default(ps[2])})
with_late("rate_in_a_partial", lambda o, p, s, t: o.kept["f"](p), lambda ps: {"f": partial(_compared, second=ps[2])})
with_late("rate_in_modules", lambda o, p, s, t: BY_ID.get(id(p), 1.0) + BY_PARAMETER.get(p, 1.0), _in_modules)
with_late("rate_by_class", lambda o, p, s, t: 5.0 if p.__class__ is Parameter and isinstance(p, Parameter) else 1.0)
with_late("rate_of_one_at_a_time", lambda o, p, s, t: 1.0 if place(o, p) == t % 3 else 0.0)
with_late("rate_by_all_states", _by_all_states)


# --- what one parameter leaves for the next ---------------------------------------------------------------------------


def _advanced(o: Any, name: str, by: float = 1.0) -> float:
    o.kept[name] = o.kept.get(name, 0.0) + by
    return float(o.kept[name])


def _passed_on(o: Any, p: Any, s: Any, t: int) -> float:
    """The rate that the parameter before, or the last one of the step before, has left."""
    rate, o.kept["rate"] = o.kept.get("rate", 1.0), 0.5 if p.dim() == 1 else 2.0
    return float(rate)


def _seen(o: Any, p: Any, s: Any, t: int) -> float:
    if o.kept.get("t") != t:
        o.kept.update(t=t, seen=set())
    o.kept["seen"].add(p)
    return float(len(o.kept["seen"]))


def _on_the_parameter(o: Any, p: Any, s: Any, t: int) -> Any:
    p.steps = getattr(p, "steps", 0) + 1
    return 1.0 / p.steps


def _in_the_group(o: Any, p: Any, s: Any, t: int) -> Any:
    group = o.param_groups[0]
    group["n"] = group.get("n", 0) + 1
    return 1.0 / group["n"]


with_late("counts_parameters", lambda o, p, s, t: 1.0 / _advanced(o, "n"))
with_late("counts_in_the_group", _in_the_group)
rated("counts_on_the_parameter", _on_the_parameter)
with_late("a_rate_that_is_passed_on", _passed_on)
with_late("a_set_of_those_seen", _seen)


# --- what is on the host ----------------------------------------------------------------------------------------------


class Rule(enum.Enum):
    SLOW = 0.5
    FAST = 2.0


class Schedule:
    """Keeps its place in attributes, and has one that is computed."""

    def __init__(self) -> None:
        self.calls, self.rule = 0, Rule.SLOW

    @property
    def value(self) -> float:
        return float(self.rule.value) / (1 + self.calls)

    def next(self) -> float:
        self.calls += 1
        self.rule = Rule.FAST if self.calls > 9 else Rule.SLOW
        return self.value


class Chameleon:
    """Attributes that are not there are looked up elsewhere, and kept there."""

    def __init__(self) -> None:
        object.__setattr__(self, "elsewhere", {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return object.__getattribute__(self, "elsewhere").get(name, 0)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__getattribute__(self, "elsewhere")[name] = value


def _of_chameleon(o: Any, p: Any, s: Any, t: int) -> Any:
    o.kept["c"].n += 1
    return 1.0 / o.kept["c"].n


def _of_a_default(n: list[int] = []) -> float:  # noqa: B006  # the count lives there
    n.append(1)
    return 1.0 / len(n)


COUNT = contextvars.ContextVar("count", default=0)


def _of_a_context(o: Any, p: Any, s: Any, t: int) -> Any:
    COUNT.set(COUNT.get() + 1)
    return 1.0 / (COUNT.get() - o.kept["before"].count)


class Counts:
    n = 0


def _on_a_class(o: Any, p: Any, s: Any, t: int) -> Any:
    Counts.n += 1
    return 1.0 / (Counts.n - o.kept["before"].n)


def _of_a_text(o: Any, p: Any, s: Any, t: int) -> Any:
    o.kept["text"].write("x")
    return 9.0 / len(o.kept["text"].getvalue())


def _under_a_lock(o: Any, p: Any, s: Any, t: int) -> Any:
    with o.kept["lock"]:
        o.kept["last"].append(t)
        return 1.0 / sum(o.kept["last"])


def _of_numbers_of_all_kinds(o: Any, p: Any, s: Any, t: int) -> Any:
    half, one, third = o.kept["numbers"]
    return float(half) * np.float64(t) + torch.tensor(0.5 * t, dtype=torch.float64) * (one / t) + third[0]


rated("of_a_cycle", lambda o, p, s, t: next(o.kept["i"]), lambda ps: {"i": itertools.cycle([1.0, 0.5, 0.25, 2.0])})
rated("of_a_generator", lambda o, p, s, t: next(o.kept["i"]), lambda ps: {"i": (1 / n for n in itertools.count(1))})
rated("of_python_s_dice", lambda o, p, s, t: o.kept["d"].random(), lambda ps: {"d": random.Random(3)})
rated("of_numpy_s_dice", lambda o, p, s, t: float(o.kept["d"].random()), lambda ps: {"d": np.random.default_rng(3)})
rated("of_the_process_dice", lambda o, p, s, t: float(torch.rand(())))
rated("of_a_schedule", lambda o, p, s, t: o.kept["s"].next(), lambda ps: {"s": Schedule()})
rated("of_a_method_of_a_schedule", lambda o, p, s, t: o.kept["next"](), lambda ps: {"next": Schedule().next})
rated("of_a_chameleon", _of_chameleon, lambda ps: {"c": Chameleon()})
rated("of_a_default_argument", lambda o, p, s, t: o.kept["f"](), lambda ps: {"f": partial(_of_a_default, [])})
rated("of_a_context_variable", _of_a_context, lambda ps: {"before": SimpleNamespace(count=COUNT.get())})
rated("of_a_class", _on_a_class, lambda ps: {"before": SimpleNamespace(n=Counts.n)})
rated("of_a_text", _of_a_text, lambda ps: {"text": io.StringIO()})
rated("under_a_lock", _under_a_lock, lambda ps: {"lock": threading.RLock(), "last": collections.deque(maxlen=3)})
rated("of_numbers_of_all_kinds", _of_numbers_of_all_kinds,
      lambda ps: {"numbers": (fractions.Fraction(1, 4), 1.0, np.array([0.125]))})  # fmt: skip
rated("of_a_namespace_that_refers_back", lambda o, p, s, t: 1.0 / o.kept["n"].steps(o),
      lambda ps: {"n": SimpleNamespace(steps=lambda o: o.t)})  # fmt: skip


@launched
def decays_of_each(o: Any, p: Any, g: Any, s: dict[str, Any], lr: float, t: int) -> None:
    """Decays near 1 and near 0, and below: another one for each parameter, and another in each step."""
    m = s.setdefault("m", torch.zeros_like(p))
    m.mul_((0.95, 0.25, -0.5, 0.0, -0.0)[(place(o, p) + t) % 5]).add_(g)
    p.sub_(m, alpha=lr)
