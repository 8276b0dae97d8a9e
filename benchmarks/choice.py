"""The decision table of README.md and docs/strategies.md: device, learning rate and memory give one strategy."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from accuracy.conditions import CONDITIONS, PRE_TRAINING
from runs import ROOT, errors, markdown

from collage_neuron.numerics.strategies import BY_ACCURACY, bytes_with_adam

MEMORY = (12, 11, 10, 9, 8, 7)
"""Bytes per parameter: weight, gradient, Adam's two states."""
LARGE = tuple(c.name for c in PRE_TRAINING.values() if c.lr >= 1e-4)
LOST = 0.5
"""The error from which on no strategy is recommended: half of the way is lost."""
TOLERATED = 1e-2
"""The error that is taken for a shorter step on Trainium."""


def largest(of: Iterable[str]) -> dict[str, float]:
    """By strategy and other contender: the largest mean error under the conditions."""
    names = list(of)
    return {name: max(found[c] for c in names) for name, found in errors().items()}


def safest(memory: int, worst: dict[str, float]) -> str:
    """The strategy with the smallest error, to one digit, and then the first of BY_ACCURACY; "" if the way is lost."""
    name = min(_fitting(memory), key=lambda name: float(f"{worst[name]:.0e}"))
    return name if worst[name] < LOST else ""


def quickest(memory: int, worst: dict[str, float]) -> str:
    """The strategy whose kernel is estimated to be the quickest on trn1, of those whose error is tolerated."""
    costs = estimates()
    tolerated = [name for name in _fitting(memory) if worst[name] <= TOLERATED]
    return min(tolerated, key=lambda name: costs[name]) if tolerated else safest(memory, worst)


def estimates(target: str = "trn1") -> dict[str, float]:
    """By strategy: the estimated time of AdamW's kernel over the memory bound, from the table of docs/kernels.md."""
    text = (ROOT / "docs" / "kernels.md").read_text()
    table = text.split("| strategy | target |")[1].split("\n\n")[0]
    return {
        name: float(x) for name, x in re.findall(rf"^\| `(\w+)` \| {target} .* \| ([\d.]+) \| [\d.]+ \|$", table, re.M)
    }


def _fitting(memory: int) -> list[str]:
    return [name for name in BY_ACCURACY if bytes_with_adam(name) <= memory]


def table() -> str:
    """One row for each learning rate, and one for Trainium; a column for each number of bytes."""
    whole, large = largest(CONDITIONS), largest(LARGE)
    rows: list[tuple[str, Sequence[str]]] = [
        ("any device, any learning rate (fine-tuning, or you do not know)", [safest(n, whole) for n in MEMORY]),
        ("any device, peak learning rate 1e-4 or more", [safest(n, large) for n in MEMORY]),
        ("Trainium, 1e-4 or more, and the time of the update counts", [quickest(n, large) for n in MEMORY]),
    ]
    head = ["device and learning rate", f"{MEMORY[0]} bytes", *map(str, MEMORY[1:])]
    return markdown(head, [[what, *(f"`{name}`" if name else "none" for name in names)] for what, names in rows])
