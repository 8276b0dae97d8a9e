"""The tables by which one chooses: device, learning rate and memory give a strategy; and all strategies with errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from accuracy.conditions import CONDITIONS, PRE_TRAINING
from runs import ROOT, digits, errors, fine_tuning, markdown

from collage_neuron.numerics.strategies import BY_ACCURACY, DEFAULT, STRATEGIES, bytes_with_adam

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


WORDS = {
    "bf16x2": "hi + lo",
    "bf16+fp32": "bf16 and fp32 master",
    "bf16_stochastic": "bf16, stochastic",
    "bf16+int16": "bf16 + int16",
    "bf16+int8": "bf16 + int8",
    "i16q8": "16-bit codes",
    "i8q8": "8-bit codes, stochastic",
    "u16q16": "16-bit codes, stochastic",
    "u8q16": "8-bit codes, stochastic",
}
"""What the table of all strategies calls formats; others have their names."""
IN_PAPER = {
    "bf16": "option A",
    "light": "Collage-light",
    "plus": "Collage-plus",
    "fp32": "option D",
    "fp32_states": "option D without master weights",
}


def all_strategies() -> str:
    """Every strategy: its formats, bytes, and the errors that README.md shows."""
    large, tuned = largest(LARGE), fine_tuning()
    head = [
        "`strategy=`", "parameters", "second moments", "other states", "bytes", "error at 1e-4", "fine-tuning",
        "in the paper",
    ]  # fmt: skip
    lines = [["torch AdamW fp32", "fp32", "fp32", "fp32", "16", digits(large["torch fp32"]), tuned["torch fp32"], ""]]
    for name, own in STRATEGIES.items():
        words = [WORDS.get(fmt, fmt) for fmt in (own.param, own.slow, own.state)]
        shown = f"`{name}`{' (default)' if name == DEFAULT else ''}"
        errors = [digits(large[name]), tuned[name]]
        lines.append([shown, *words, str(bytes_with_adam(name)), *errors, IN_PAPER.get(name, "")])
    return markdown(head, lines)
