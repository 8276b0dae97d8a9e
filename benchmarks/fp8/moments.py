"""Optimizer states in fp16 beside a power of two, Scalify's second claim, compared with formats of as many bytes.

AdamW as in docs/accuracy.md: the same conditions, seeds and errors, and the parameter in four bytes in every row.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from statistics import fmean

from accuracy import contenders
from accuracy.conditions import CONDITIONS, REPORTED, Stream
from accuracy.contenders import Contender, Options
from accuracy.exact import exact
from study.page import table
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

import collage_neuron

ROWS = {
    "both in `fp16`": ("fp16", "fp16"),
    "`fp16` and `u16q16`": ("fp16", "u16q16"),
    "`split422`: `i16q8` and `u16q16`": ("i16q8", "u16q16"),
    "both in `bf16`": ("bf16", "bf16"),
}
"""Formats of the first and the second moment."""
SHOWN = ("recipe", ".95", ".9999", "t2", "rows")


def errors(steps: int | None = None, names: Sequence[str] = SHOWN) -> str:
    """The table: a row for each pair of formats, a column for each condition; fewer steps to try it."""
    columns = [_column(name, steps or CONDITIONS[name].steps) for name in names]
    rows = ((label, *(column[label] for column in columns)) for label in ROWS)
    return table(("first and second moment", *(f"`{name}`" for name in names)), rows)


def _column(name: str, steps: int) -> dict[str, str]:
    """The mean error of each pair of formats under a condition."""

    def stream() -> Stream:
        return Stream(CONDITIONS[name], REPORTED)

    right = exact(stream(), steps)
    outcomes = {label: contenders.run(_contender(*pair), stream(), steps) for label, pair in ROWS.items()}
    return {label: f"{fmean(right.errors(outcome.theta)):.1e}" for label, outcome in outcomes.items()}


def _contender(first: str, second: str) -> Contender:
    strategy = {"param": "bf16+int16", "exp_avg": first, "exp_avg_sq": second}

    def build(params: list[Parameter], options: Options) -> Optimizer:
        with warnings.catch_warnings():  # that fp16 has a 0 for small second moments is what the table shows
            warnings.simplefilter("ignore", collage_neuron.ImpreciseState)
            return collage_neuron.compile(AdamW(params, **options), strategy=strategy, validate="off", verbose=False)

    def value(optimizer: Optimizer, p: Parameter) -> Tensor:
        return collage_neuron.exact_value(optimizer, p)

    return Contender(f"{first} and {second}", "collage_neuron", build, value)
