"""Takes a step again on a sample in fp32, and estimates how much rounding may change its results."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.rounding import rounding
from collage_neuron.validation.perturbation import Perturbation
from collage_neuron.validation.sample import STACKED, Expected, Sample

RUNS = 12
"""Number of perturbed copies of a sample that are stepped one by one, if the shape matters (else `STACKED`)."""
AMOUNT = {"fp32": 2.0**-20, "bf16": 2.0**-6}
"""Relative perturbation of a result: 16 roundings of fp32, or 4 of bf16. The rewritten update rounds at most three
times for one operation of the user's (FP32 in tests/support/bounds.py), torch once or twice; the rest allows for the
sum of roundings of several operations, which some of the copies show only in part."""
SPREAD = {"fp32": 2.0, "bf16": 4.0}
"""Factor on the largest deviation among the copies. Copies are independent: the largest of 12 is below half of a
standard deviation once in 10**5 elements, and the perturbations are 4 to 16 times the real roundings. In bf16
arithmetic a cancellation may lead to a value that no copy has reached."""
NEGLIGIBLE = {"fp32": 2, "bf16": 16}
"""Limit of a useful bound, in roundings of the format; a quarter of the change of a value is useful too. Values with a
wider bound are left out."""
OWN = {"fp32": 2.0**-21, "bf16": 2.0**-6}
"""Relative rounding of additions to the value itself; `PAIR` for expansions in bf16 arithmetic."""
PAIR = 2.0**-13


def expected(twin: InFp32) -> Expected:
    """The results of a step in fp32 for its sample, with bounds from perturbed copies."""
    if twin.taken.plan.flat:
        return _expected(twin, twin.run(STACKED, stacked=True))
    runs = [twin.run(1, stacked=False, plain=i == 0) for i in range(1 + RUNS)]
    after, moved, added = (_joined(r) for r in zip(*(r[:3] for r in runs), strict=True))
    return _expected(twin, Ran(after, moved, added, torch.cat([r.overflowed for r in runs])))


def _joined(runs: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([run[name] for run in runs]) for name in runs[0]}


class Ran(NamedTuple):
    """A step of the twin; the first dimension of each tensor counts the copies, of which the first is not perturbed."""

    after: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]
    """The perturbation of each value itself (`Perturbation.moved`)."""
    added: Mapping[str, Tensor]
    overflowed: Tensor


def _expected(twin: InFp32, ran: Ran) -> Expected:
    taken = twin.taken
    arithmetic, before = taken.job.settings.arithmetic, taken.values()
    values, bounds, unsure = {}, {}, {}
    for name, fmt in taken.formats.items():
        new, old = ran.after[name][0], before[name]
        # The perturbation of a value itself is subtracted: only its effect through the step counts.
        off = (ran.after[name][1:] - new - ran.moved[name][1:]).abs().amax(dim=0)
        own = _own(arithmetic, fmt) * torch.maximum(old.abs(), new.abs()) + AMOUNT[arithmetic] * ran.added[name][0]
        bound = SPREAD[arithmetic] * off + own
        values[name], bounds[name] = new, bound
        stored = NEGLIGIBLE[arithmetic] * rounding(fmt, new.abs()) + 2.0**-15 * new.abs()
        small = (bound <= (new - old).abs() / 4) | (bound <= stored)
        unsure[name] = new.isfinite() & ~small & (bound != 0)
    return Expected(values, bounds, unsure, ran.overflowed.any(dim=0))


def _own(arithmetic: str, fmt: Format) -> float:
    return PAIR if arithmetic == "bf16" and len(fmt.components) > 1 else OWN[arithmetic]


class NoSample(Exception):  # a result rather than an error
    """The step cannot run on a sample, whose shape is another one: code may name sizes (`grad.view(12, -1)`)."""


class InFp32(ABC):
    """Takes the step of a sample again: in fp32, on copies of its values, without the compiler."""

    def __init__(self, taken: Sample, g: torch.Generator) -> None:
        self.taken, self._generator = taken, g
        self._values = taken.values() | {"grad": taken.grad.float()}

    @abstractmethod
    def run(self, copies: int, stacked: bool, plain: bool = False, steps: int = 1) -> Ran:
        """Takes a step of `copies` at once; `plain`: not perturbed.

        Raises:
            NoSample: the step cannot run on a sample.
        """

    def after(self, steps: int) -> dict[str, Tensor]:
        """The values after `steps` steps with the same gradient, not perturbed."""
        stacked = self.taken.plan.flat  # a plan holds for the shape that it was made for
        ran = self.run(STACKED if stacked else 1, stacked, plain=True, steps=steps)
        return {name: x[0] for name, x in ran.after.items()}

    def _copies(self, copies: int, stacked: bool) -> dict[str, Tensor]:
        """Copies of the values before the step."""
        return {k: v.expand(copies, *v.shape).clone() if stacked else v.clone() for k, v in self._values.items()}

    def _perturbation(self, inputs: Mapping[str, Any], stacked: bool, plain: bool) -> Perturbation:
        """The mode in which the step runs, which follows the parameter, its gradient and its states among `inputs`."""
        arithmetic, seen = self.taken.job.settings.arithmetic, self.taken.job.recording.captured.shapes
        amount, shape = 0.0 if plain else AMOUNT[arithmetic], inputs["param"].shape
        mode = Perturbation(shape, amount, self._fills(), self._generator, stacked, arithmetic == "bf16")
        for name, x in inputs.items():
            if isinstance(x, Tensor) and (x.shape == shape or name in seen) and x.is_floating_point():
                mode.follow(name, x)
        return mode

    def _ran(self, mode: Perturbation, left: Mapping[str, Any], stacked: bool) -> Ran:
        """What a step has `left` of its values, of which those with formats are compared."""
        found = {name: left[name].detach() for name in self.taken.formats}
        if stacked and len({x.shape for x in found.values()}) > 1:  # `grad.view(1, -1)` takes all copies for one
            raise NoSample
        after = {k: _as_copies(x, stacked).float() for k, x in found.items()}

        def of_all(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
            return {k: _as_copies(x[k], stacked) if k in x else torch.zeros_like(v) for k, v in after.items()}

        return Ran(after, of_all(mode.moved), of_all(mode.added), _as_copies(mode.overflowed, stacked))

    def _fills(self) -> float:
        """The relative error of storing a number with which a state is filled."""
        recording, formats = self.taken.job.recording, self.taken.formats
        lost = [0.0]
        for name, value in recording.captured.fresh.items():
            x = torch.tensor([value], dtype=torch.float32, device="cpu")
            stored = float(formats[name].decode(formats[name].encode(x)))
            lost.append(abs(stored - value) / abs(value) if value and math.isfinite(stored / value) else 0.0)
        return 1.01 * max(lost)


def _as_copies(x: Tensor, stacked: bool) -> Tensor:
    return x if stacked else x[None]
