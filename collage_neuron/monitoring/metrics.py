"""Records of measured steps, and the definition of each number in them.

For one element of a parameter let

* theta be its value before the step and theta' after, as its storage format decodes it to fp32: `hi + lo` of a pair,
  the master of `bf16+fp32`, the number itself where there is one component;
* h and h' be the first component alone, the bf16 word that the model computes with;
* delta be the **raw update**: what the optimizer adds to theta, before it is added. In fp32 arithmetic it is the fp32
  sum of all that the update adds to the parameter, so theta + delta is what would be stored without rounding; a
  factor `p * s` (decoupled weight decay) adds `p * (s - 1)`. In bf16 arithmetic it is the aggregated update of the
  paper, the sum in bf16 of bf16 increments that is grown into the pair; with a single word (`bf16`) the fp32 sum of the
  increments before each rounds. If an update replaces its parameter (`p = where(mask, a, b)`) instead of adding to
  it, delta is the new value in fp32 arithmetic, minus theta;
* e = theta' - theta be the **effective update**, and e_high = h' - h that of the high word alone.

Sums go over all elements of a parameter, a module, a group or the optimizer:

* `raw_norm` = ||delta||, `pair.norm` = ||e||, `high.norm` = ||e_high||, all euclidean;
* `edq`, effective descent quality = <e, delta> / ||delta||; `ratio` = edq / ||delta||: 1 where nothing is lost
  (Yu et al., "Collage", ICML 2024: the metric EDQ; its released code measures the high word alone);
* `lost`: of the elements with delta != 0, the percentage with e = 0 (the paper's lost arithmetic, its code's
  "imprecision"). `zero`: the percentage of all elements with delta = 0, which that code counts as lost too;
* `low_norms`: for the parameter (`param`) and each state, the norm after the step of the part that the first component
  does not hold: of `lo`, or of master - h;
* `stalled`: for each state that accumulates slowly (`passes/analysis/state_roles.py`: second moments and similar
  states) and is rounded to nearest (a stochastic store leaves most small decreases out, and follows on average), the
  percentage, of the elements that should have decreased, whose stored value did not change. "Should" means
  in fp32 arithmetic, from the same stored values. `falling` is the percentage of all elements that should have
  decreased. (The stall of a bf16 second moment at beta2 near 1: Collage, section on beta2 = 0.999.)

Each product is rounded to fp32 once. The `reference` backend adds in float64; `xla` adds fp32 in rows, with an error
within (rows + length of a row) * 2**-24 of the sum of magnitudes. Counts are integers, exact for the values that the
backend compared. XLA on the CPU may contract a product and a sum in the comparison to one rounding where the stored
value had two; this changes the count of an element if the two results round differently: a few in a million.

A ratio with a zero denominator (no update at all, no falling element) is NaN. Where an element of delta or e is NaN or
Inf, norms, EDQ and `lost` are not finite: also in a step that an XLA device skips (`nonfinite="skip"`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NamedTuple, TypeVar

Key = TypeVar("Key", int, str)

ADVICE = 'resume from a checkpoint before it, with nonfinite="skip" or a lower learning rate (docs/checkpoints.md)'
"""What to do about a run that has become NaN or Inf."""


class Effect(NamedTuple):
    """How much of the raw update arrived, in the pair or in its high word alone. `lost` is a percentage."""

    norm: float
    edq: float
    ratio: float
    lost: float


@dataclass(frozen=True)
class Measures:
    """The numbers of one parameter, or the sums over several."""

    elements: int
    sums: Mapping[str, float]
    """Sums over the elements, by the names of `passes/rewrite/instrument.py`."""
    counts: Mapping[str, int]

    @classmethod
    def of(
        cls, elements: int, names: tuple[Sequence[str], Sequence[str]], sums: Sequence[float], counts: Sequence[int]
    ) -> Measures:
        """From the result vectors of an update; for a value with one component, `high` equals `pair`."""
        all_sums = dict(zip(names[0], sums, strict=True))
        all_counts = dict(zip(names[1], counts, strict=True))
        # Where the pair is its high word, the graph measures it once.
        alone = {k.replace("pair", "high"): v for k, v in all_sums.items() if k.startswith("pair")}
        return cls(elements, alone | all_sums, {"lost high": all_counts["lost pair"]} | all_counts)

    def __add__(self, other: Measures) -> Measures:
        sums, counts = _added(self.sums, other.sums), _added(self.counts, other.counts)
        return Measures(self.elements + other.elements, sums, counts)

    @property
    def finite(self) -> bool:
        """Returns True if no element of the raw or of the effective update is NaN or Inf."""
        return math.isfinite(self.sums["raw"] + self.sums["pair"])

    @property
    def raw_norm(self) -> float:
        return _root(self.sums["raw"])

    @property
    def zero(self) -> float:
        return _percent(self.counts["zero"], self.elements)

    @property
    def pair(self) -> Effect:
        """The effect on the sum of all components."""
        return self._effect("pair")

    @property
    def high(self) -> Effect:
        """The effect on the first component alone."""
        return self._effect("high")

    @property
    def low_norms(self) -> dict[str, float]:
        return {name: _root(x) for name, x in _under("low ", self.sums).items()}

    @property
    def falling(self) -> dict[str, float]:
        return {name: _percent(n, self.elements) for name, n in _under("falling ", self.counts).items()}

    @property
    def stalled(self) -> dict[str, float]:
        falling = _under("falling ", self.counts)
        return {name: _percent(n, falling[name]) for name, n in _under("stalled ", self.counts).items()}

    def _effect(self, which: str) -> Effect:
        raw, dot = self.raw_norm, self.sums[f"{which}*raw"]
        changed = self.elements - self.counts["zero"]
        # A NaN is counted as an update, and as one that arrived.
        lost = _percent(self.counts[f"lost {which}"], changed) if self.finite else math.nan
        return Effect(_root(self.sums[which]), _quotient(dot, raw), _quotient(dot, self.sums["raw"]), lost)

    def as_dict(self) -> dict[str, Any]:
        """All numbers, as a dict of numbers and dicts of numbers."""
        return {
            "elements": self.elements, "raw_norm": self.raw_norm, "zero": self.zero,
            "pair": self.pair._asdict(), "high": self.high._asdict(),
            "low_norms": self.low_norms, "falling": self.falling, "stalled": self.stalled,
        }  # fmt: skip

    def __str__(self) -> str:
        stalls = "".join(f", {name} stalled {percent:.1f} %" for name, percent in self.stalled.items())
        return f"EDQ {self.pair.ratio:.4f} (high {self.high.ratio:.4f}), lost {self.pair.lost:.2f} %{stalls}"


def _under(prefix: str, numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): x for name, x in numbers.items() if name.startswith(prefix)}


def _added(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    # Parameters of other groups may have other states.
    return {name: a.get(name, 0) + b.get(name, 0) for name in {**a, **b}}


def _root(x: float) -> float:
    return math.sqrt(x) if x >= 0 else math.nan  # of a NaN too


def _quotient(a: float, b: float) -> float:
    return a / b if b else math.nan


def _percent(part: int, whole: int) -> float:
    return 100 * part / whole if whole else math.nan


class Part(NamedTuple):
    """One parameter in a record: its group and module, and its numbers."""

    group: int
    module: str
    measures: Measures


@dataclass(frozen=True)
class Record:
    """A measured step."""

    step: int
    parameters: Mapping[str, Part]
    """By name, for every parameter that was updated."""

    @cached_property
    def total(self) -> Measures:
        """The numbers over all parameters."""
        return _sum(self.parameters.values())

    @cached_property
    def groups(self) -> dict[int, Measures]:
        """The numbers of each parameter group, by index."""
        return self._added_by(lambda part: part.group)

    @cached_property
    def modules(self) -> dict[str, Measures]:
        """The numbers of each module with parameters of its own; parameters without a module have their own name."""
        return self._added_by(lambda part: part.module)

    def under(self, name: str) -> Measures:
        """The numbers over the module `name` and all modules in it; KeyError if they have no updated parameter."""
        inside = [p for p in self.parameters.values() if p.module == name or p.module.startswith(f"{name}.")]
        if not inside:
            raise KeyError(f"no parameter of a module {name!r} was updated in step {self.step}")
        return _sum(inside)

    def _added_by(self, key: Callable[[Part], Key]) -> dict[Key, Measures]:
        parts: dict[Key, list[Part]] = {}
        for part in self.parameters.values():
            parts.setdefault(key(part), []).append(part)
        return {k: _sum(members) for k, members in parts.items()}

    def as_dict(self) -> dict[str, Any]:
        """The step's number, and the numbers of the whole, of each group and of each module."""
        return {
            "step": self.step, "total": self.total.as_dict(),
            "groups": {str(i): m.as_dict() for i, m in self.groups.items()},
            "modules": {name: m.as_dict() for name, m in self.modules.items()},
        }  # fmt: skip

    def __str__(self) -> str:
        return f"step {self.step}: {self.total}"


def _sum(parts: Iterable[Part]) -> Measures:
    return reduce(Measures.__add__, (part.measures for part in parts))
