"""How much of small steps, and of a small decay, a storage format of parameters loses; which strategy loses nothing.

A parameter that is kept in further words rounds each step by up to half of its last place, `2**-digits` of the weight:
2**-17 under the paper's pair, 2**-15 with one byte beside bf16. Steps of equal size and sign round alike, so that what
is lost does not average out. `tests/conversion/test_update_underflow.py` runs AdamW with parameters in these formats
and everything else exact. With r = learning rate / rounding, the share of the way that is lost at a
constant rate follows 1 / (1 + r**2 / 2) within a factor of four from r = 1/4 to 8: two thirds at 1, a third at 2, a
thirtieth at 8.

A decay shrinks a weight by a fixed share of itself. Where the gradient is zero (unused rows of an embedding, idle
experts, masks) nothing else moves the weight. With less than half a rounding, nothing of the decay arrives, or up to a
quarter where the low word is a float; from one rounding on, four fifths or more. Beside larger steps it is not lost.

`bf16+int16`, the format of the default, rounds as fp32 does, and is not looked at. Nor is pure bf16, by which a user
chooses to lose most of each step.

Rounding errors are measured on the formats themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.strategies import STRATEGIES, bytes_with_adam

SMALL = 2.0**-124
"""An absolute term: near the end of the range words are subnormal, and devices flush those to zero."""


def rounding(fmt: Format, size: Tensor) -> Tensor:
    """The largest error of storing values of magnitude `size`: half an ulp, or one if rounding is stochastic."""
    if fmt.error is not None:
        return 1.01 * fmt.error(size) + SMALL
    relative = 2.0 ** -digits(fmt) * (1 if fmt.draw is None else 2)
    return 1.01 * relative * size + SMALL


@cache
def leading(fmt: Format) -> float | None:
    """The relative error of the first component alone; None if it does not approximate the value.

    For a parameter, the first component is the number with which the model computes.
    """
    x = 1 + _steps() * 2.0**-12
    first = fmt.encode(x)[0]
    if not isinstance(first, Tensor) or not first.is_floating_point():
        return None
    off = float((first.float() - x).abs().max())
    return 2.02 * off if off < 2.0**-2 else None


@cache
def digits(fmt: Format) -> int:
    """The precision of a format: its relative error is at most 2**-digits. Measured: bf16 8, hi + lo 17, fp32 24."""
    # A binade in steps of 2**-12, with other lower bits in each, so that no format holds all of them by chance.
    x = 1 + _steps() * 2.0**-12 + 2.0**-23 * _steps()
    error = (fmt.decode(fmt.encode(x)) - x).abs().max().item()
    return 24 if error == 0 else -int(torch.tensor(error, dtype=torch.float32, device="cpu").log2().ceil())


def _steps() -> Tensor:
    return torch.arange(1 << 12, dtype=torch.float32, device="cpu")


LOST = 0.03
"""The share of the way that may be lost without a warning: learning rates of eight roundings."""

RUN = 100
"""The least number of steps at its largest rate that a run is taken to have, of which a part may not be seen here."""


@dataclass(frozen=True)
class Scale:
    """What a group asks of the format of its parameters."""

    rate: float
    """The size of a step of one element; 0.0 if the learning rate does not tell it (SGD)."""
    size: float
    """The root mean square of the parameter that is largest, among those that are looked at."""
    decay: float
    """The share of itself by which a step shrinks a weight without a gradient; 0.0 if it does not."""

    def lost(self, fmt: Format) -> float:
        """The share of the way that `fmt` loses at this rate, by the law above."""
        return lost(self.rate, 2.0 ** -digits(fmt) * self.size)

    def loses_decay(self, fmt: Format) -> bool:
        """Returns True if `fmt` loses more than a fifth of a decay that fp32 holds."""
        return 2.0 ** -digits(format_named("fp32")) <= self.decay < 2.0 ** -digits(fmt)

    def fits(self, fmt: Format) -> bool:
        """Returns True if `fmt` loses neither."""
        return self.lost(fmt) <= LOST and not self.loses_decay(fmt)


def lost(rate: float, rounding: float) -> float:
    """The share of steps of size `rate` that is lost where each may be rounded by `rounding`; none of no steps."""
    return 1 / (1 + (rate / rounding) ** 2 / 2) if rate > 0 < rounding else 0.0


@dataclass
class Pace:
    """The way of a group under a schedule, in sums over its steps of the learning rate."""

    size: float
    rate: float
    largest: float
    step: int
    """The step in which the rate became `rate`."""
    gone: float = 0.0
    lost: float = 0.0

    def advance(self, rate: float, step: int, rounding: float) -> None:
        """Adds the steps that were taken at the last rate, before it becomes `rate` in `step`."""
        # The last rate held until now: schedulers change it between steps.
        way = self.rate * (step - self.step)
        self.gone += way
        self.lost += way * lost(self.rate, rounding)
        self.rate, self.step, self.largest = rate, step, max(self.largest, rate)

    def share(self) -> float:
        """The share of the way that was lost, at least of that of a short run at the largest rate."""
        return self.lost / max(self.gone, RUN * self.largest) if self.largest else 0.0


def is_short(fmt: Format) -> bool:
    """Returns True for a parameter with a low word that rounds more than fp32, as measured (`digits`)."""
    return len(fmt.components) > 1 and digits(fmt) < digits(format_named("fp32"))


def cheapest(scale: Scale) -> str | None:
    """The strategy of the fewest bytes, with Adam, whose parameters lose nothing at `scale`; None if fp32 does too."""
    formats = {name: format_named(strategy.param) for name, strategy in STRATEGIES.items()}
    fitting = [name for name, fmt in formats.items() if len(fmt.components) > 1 and scale.fits(fmt)]
    return min(fitting, key=bytes_with_adam, default=None)
