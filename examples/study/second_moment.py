"""The second moment after 2000 steps, against float64: constant, random and decaying gradients at four decays."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from oracles import ELEMENTS, SQUARE_STREAMS, STEPS, Driver, Setting, bias, slots_of, spread, square_streams
from released_adamw import Words, released_second_moment
from torch import Tensor

from study.jobs import Job
from study.variants import RELEASED, VARIANTS

BETA2 = (0.95, 0.98, 0.99, 0.999)
SHAPE = (len(BETA2), len(SQUARE_STREAMS), ELEMENTS)


def jobs(quick: bool, _: Any) -> Iterator[Job]:
    for name in (*VARIANTS, RELEASED):
        yield Job("second_moment", name, {"variant": name, "steps": 100 if quick else STEPS, "seed": 0})


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Errors by decay and stream, and the share of states that a zero gradient does not make smaller.

    `curve` is the mean over the elements at the largest decay, for the decaying gradients.
    """
    exact = torch.zeros(SHAPE, dtype=torch.float64)
    beta2 = torch.tensor(BETA2, dtype=torch.float64)[:, None, None]
    moment = _Released() if settings["variant"] == RELEASED else _Driven(settings["variant"])
    curve: dict[str, list[float]] = {"step": [], "kept": [], "exact": []}
    for step, g in enumerate(islice(square_streams(), settings["steps"]), 1):
        exact = beta2 * exact + (1 - beta2) * g.double() ** 2
        moment.step(g)
        if step % (settings["steps"] // 50) == 0:
            values = (step, moment.value()[-1, -1].mean().item(), exact[-1, -1].mean().item())
            for key, value in zip(curve, values, strict=True):
                curve[key].append(value)
    v = moment.value()
    moment.step(torch.zeros(SHAPE[1:], dtype=torch.bfloat16))
    return {
        "relative error": _table((v - exact).div(exact).mean(-1)),
        "bias": _table(bias(v, exact)),
        "spread": _table(spread(v, exact)),
        "cannot decrease": _table((moment.value() >= v).double().mean(-1)),
        "step size": _table((exact / v).sqrt().mean(-1)),
        "curve": curve,
    }


def _table(values: Tensor) -> dict[str, dict[str, float]]:
    rows: Sequence[Sequence[float]] = values.tolist()
    return {f"{beta2:g}": dict(zip(SQUARE_STREAMS, row, strict=True)) for beta2, row in zip(BETA2, rows, strict=True)}


class _Driven:
    """The rewritten AdamW: one call steps every decay."""

    def __init__(self, name: str) -> None:
        variant = VARIANTS[name]
        self.slots = [slots_of(Setting(betas=(0.9, beta2)), range(1, 2))[0] for beta2 in BETA2]
        self.driver = Driver(torch.zeros(SHAPE), variant.strategy, variant.arithmetic)

    def step(self, g: Tensor) -> None:
        self.driver.step(g, self.slots)

    def value(self) -> Tensor:
        return self.driver.value("exp_avg_sq")


class _Released:
    """The second moment as released with the paper."""

    def __init__(self) -> None:
        exact = torch.tensor(BETA2, dtype=torch.float64)[:, None, None]
        self.hi = exact.bfloat16()
        self.lo = (exact - self.hi.double()).bfloat16()
        self.rest = (1 - exact).float()
        self.words = Words(*torch.zeros(2, *SHAPE, dtype=torch.bfloat16))

    def step(self, g: Tensor) -> None:
        self.words = released_second_moment(self.words, g, self.hi, self.lo, self.rest)

    def value(self) -> Tensor:
        return self.words.v.double()
