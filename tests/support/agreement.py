"""A compiled optimizer beside itself in float64: the same gradients, numbers and states, and values as near as may be.

Each element is held to the bound of its operations by the package's own validation, which tests/validation trusts with
wrong rules; here errors are looked at after several steps, as a fraction of the way that the parameter went.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from models import step_with
from planned import plan
from torch import Tensor
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.passes.analysis.state_roles import structure
from collage_neuron.runtime.step_plan import Job
from collage_neuron.states.inner_optimizers import base_of

Make = Callable[[list[torch.nn.Parameter]], Optimizer]

SHAPE = (8, 12)
"""Of the parameter: a matrix, since many optimizers treat vectors more simply."""


@dataclass
class Agreement:
    """What a comparison found."""

    graphs: set[int] = field(default_factory=set)
    """Distinct update graphs over the run: what a backend compiles."""
    states: set[str] = field(default_factory=set)
    squares: set[str] = field(default_factory=set)
    sums: set[str] = field(default_factory=set)
    """States that are tensors; those seen to be running sums or averages of squares; other sums, and parameters."""
    formats: dict[str, set[str]] = field(default_factory=dict)
    """Storage formats that the parameter and each state had: more than one if they change from step to step."""
    error: float = 0.0
    """The parameter's error as a fraction of the distance that it moved, at the median element."""


def gradients(steps: int, seed: int = 0) -> Sequence[Tensor]:
    """bf16 gradients about means of both signs, of three magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1e-3, 0.1, 1.0]).repeat(SHAPE[1] // 3)
    mean = torch.randn(SHAPE, generator=generator)
    rows = [(mean + torch.randn(SHAPE, generator=generator)) * scale for _ in range(steps)]
    return [row.bfloat16() for row in rows]


def stepped(optimizer: Optimizer, steps: int = 3, seed: int = 0) -> Optimizer:
    """Steps with these gradients, in the dtype of each parameter."""
    for gradient in gradients(steps, seed):
        step_with(optimizer, lambda p, g=gradient: g.to(p.device, p.dtype, copy=True))  # type: ignore[misc]
    return optimizer


def initial() -> Tensor:
    """bf16 weights of both signs."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(7)).bfloat16()


class Twins:
    """A compiled optimizer and the same one in float64."""

    def __init__(self, make: Make, strategy: StrategyLike, arithmetic: str, device: str | torch.device) -> None:
        self.p, self.p64 = torch.nn.Parameter(initial().to(device)), torch.nn.Parameter(initial().double())
        settings: Any = {"strategy": strategy, "arithmetic": arithmetic}
        self.compiled, self.exact = collage_neuron.compile(make([self.p]), **settings), make([self.p64])
        self.found = Agreement()

    def step(self, gradient: Tensor) -> None:
        """Steps both."""
        self.p.grad, self.p64.grad = gradient.to(self.p.device, copy=True), gradient.double()
        (job,) = plan(base_of(type(self.compiled)), self.compiled, self.compiled.param_groups[0], 0)
        self.compiled.step()
        self.exact.step()
        self._note(job)
        small = job.recording.captured.small
        assert self._numbers(self.compiled, self.p, small) == self._numbers(self.exact, self.p64, small)

    def _note(self, job: Job) -> None:
        kinds, found = structure(job.recording.captured.graph), self.found
        found.graphs.add(id(job.recording.captured))
        found.squares |= kinds.magnitudes
        found.sums |= kinds.sums - kinds.magnitudes - kinds.idle
        found.states |= (job.update.formats.keys() | job.recording.captured.small) - {"param"}
        for name, fmt in job.update.formats.items():
            found.formats.setdefault(name, set()).add(fmt.name)
        value = collage_neuron.exact_value(self.compiled, self.p).cpu()
        distance = (self.p64.detach() - initial()).abs().clamp(min=1e-30)
        found.error = float(((value - self.p64.detach()).abs() / distance).median())

    def _numbers(self, optimizer: Optimizer, p: torch.nn.Parameter, small: Any) -> dict[str, Any]:
        """The numbers that the optimizer keeps in the state and in the group: what Python computed, exactly."""
        state = {k: float(v) if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()
                 if k not in small and (not isinstance(v, Tensor) or v.dim() == 0)}  # fmt: skip
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params" and not k.startswith("collage_")}
        return {"state": state, "group": group}


def compare(
    make: Make, strategy: StrategyLike, arithmetic: str = "fp32", device: str | torch.device = "cpu", steps: int = 8
) -> Agreement:
    """Steps the optimizer and its compiled self side by side, each step validated.

    Raises:
        UnsupportedUpdate: the optimizer is refused.
    """
    twins = Twins(make, strategy, arithmetic, device)
    for gradient in gradients(steps):
        twins.step(gradient)
    twins.found.sums -= twins.found.squares
    return twins.found
