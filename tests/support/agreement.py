"""A compiled optimizer beside itself in float64: same gradients, and every element within its derived bound."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bounds import STORED, Bounds, stored, stored_state
from models import step_with
from planned import plan
from torch import Tensor
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.optimizer.compiled import base_of
from collage_neuron.passes.analysis.state_roles import structure
from collage_neuron.runtime.step_plan import Job

Make = Callable[[list[torch.nn.Parameter]], Optimizer]

SHAPE = (8, 12)
"""Of the parameter: a matrix, since many optimizers treat vectors more simply."""


@dataclass
class Agreement:
    """What a comparison found, beside that all was within the bound."""

    graphs: int
    """Distinct update graphs over the run: what a backend compiles."""
    states: frozenset[str]
    squares: frozenset[str]
    sums: frozenset[str]
    """States that are tensors; those seen to be running sums or averages of squares; other sums, and parameters."""
    formats: dict[str, set[str]]
    """Storage formats that the parameter and each state had: more than one if they change from step to step."""
    looseness: float
    """Median over elements of the parameter's bound, as a fraction of the distance it moved: below 1 says something."""
    error: float
    """The same of the parameter's error."""
    unbounded: float
    """Fraction of elements, of the parameter and the states, of which nothing could be said."""


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


UNDERFLOW = 2.0**-120
"""Below 2**-126 numbers have fewer digits than their format, and XLA has none of them."""


class Twins:
    """A compiled optimizer and the same one in float64 under `Bounds`."""

    def __init__(self, make: Make, strategy: StrategyLike, arithmetic: str, device: torch.device) -> None:
        start = initial()
        self.p = torch.nn.Parameter(start.to(device))
        settings: Any = {"strategy": strategy, "arithmetic": arithmetic, "validate": "off"}  # the bounds are narrower
        self.compiled = collage_neuron.compile(make([self.p]), **settings)
        self.p64 = torch.nn.Parameter(start.double())
        self.exact = make([self.p64])
        self.bounds = Bounds(arithmetic)
        self.radii: dict[str, Tensor] = {}
        self.graphs: set[int] = set()
        self.formats: dict[str, Any] = {}
        self.small = set[str]()
        """The names of states of one number that the step computes from tensors: they have a radius too."""

    def step(self, gradient: Tensor) -> Job:
        """Steps both, then holds every element of the parameter and the states to its radius."""
        self.p.grad = gradient.to(self.p.device, copy=True)  # some steps write to it
        (job,) = plan(base_of(type(self.compiled)), self.compiled, self.compiled.param_groups[0], 0)
        self.compiled.step()
        if self.p.device.type == "xla":
            _sync()
        self.graphs.add(id(job.recording.captured))
        self.formats = {name: fmt.name for name, fmt in job.update.formats.items()}
        self.small |= set(job.recording.captured.small)
        self.formats |= dict.fromkeys(self.small, "fp32")
        self._step_exact(gradient.double())
        self._check(job)
        return job

    def _step_exact(self, gradient: Tensor) -> None:
        self.p64.grad = gradient
        self.bounds.forget()
        self.bounds.fill = max((STORED[f] for name, f in self.formats.items() if name != "param"), default=0.0)
        for name, t in self.exact_values().items():
            self.bounds.start(t, self.radii.get(name, 0.0), self.formats[name] == "bf16x2", name == "param")
        with self.bounds:
            self.exact.step()

    def exact_values(self) -> dict[str, Tensor]:
        """The parameter and its states in float64 that are tensors: of its shape, or of one computed number."""
        state = {k: v for k, v in self.exact.state[self.p64].items() if isinstance(v, Tensor)}
        shaped = {k: v for k, v in state.items() if v.shape == self.p64.shape or k in self.small}
        return {"param": self.p64.detach()} | shaped

    def host_scalars(self, optimizer: Optimizer, p: torch.nn.Parameter) -> dict[str, Any]:
        """The numbers that the optimizer keeps in the state and in the group: what Python computed, exactly."""
        state = {k: float(v) if isinstance(v, Tensor) else v for k, v in optimizer.state[p].items()
                 if k not in self.small and (not isinstance(v, Tensor) or v.dim() == 0)}  # fmt: skip
        group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params" and not k.startswith("collage_")}
        return {"state": state, "group": group}

    def compiled_values(self, job: Job) -> dict[str, Tensor]:
        """What the compiled optimizer keeps, read from the components that its formats promise."""
        tensors = {**self.compiled.state[self.p], "param": self.p.detach()}
        read = {k: v.cpu() for k, v in tensors.items() if isinstance(v, Tensor)}
        values = {
            name: fmt.decode([read[k] for k in fmt.keys(name)]).double() for name, fmt in job.update.formats.items()
        }
        return values | {name: read[name].double() for name in self.small}

    def _check(self, job: Job) -> None:
        values, exact = self.compiled_values(job), self.exact_values()
        assert values.keys() == exact.keys()
        assert self.host_scalars(self.compiled, self.p) == self.host_scalars(self.exact, self.p64)
        for name, value in values.items():
            ball = self.bounds.ball(exact[name])
            radius = (stored if name == "param" else stored_state)(ball, self.formats[name])
            overflows = ~(exact[name].abs() + radius < torch.finfo(torch.float32).max)
            radius = torch.where(overflows, torch.inf, radius)
            self.radii[name] = radius
            error = (value - exact[name]).abs()
            within = (error <= radius + UNDERFLOW) | radius.isinf()
            worst = int(torch.where(within, 0.0, error / radius).nan_to_num(torch.inf).argmax())
            found, wanted, allowed = (float(t.flatten()[worst]) for t in (value, exact[name], radius))
            assert within.all(), (
                f"element {worst} of {name} is {found!r}, in float64 {wanted!r}: further than {allowed:.3g} off"
            )


def _sync() -> None:
    import torch_xla

    torch_xla.sync()


def compare(
    make: Make, strategy: StrategyLike, arithmetic: str = "fp32", device: str | torch.device = "cpu", steps: int = 8
) -> Agreement:
    """Steps the optimizer and its compiled self side by side; AssertionError where they differ by more than rounding.

    Raises:
        UnsupportedUpdate: the optimizer is refused.
    """
    twins = Twins(make, strategy, arithmetic, torch.device(device))
    start = twins.p64.detach().clone()
    squares, sums = frozenset[str](), frozenset[str]()
    formats: dict[str, set[str]] = {}
    for gradient in gradients(steps):
        job = twins.step(gradient)
        graph = job.recording.captured.graph
        squares |= structure(graph).magnitudes
        sums |= structure(graph).sums - structure(graph).magnitudes - structure(graph).idle
        for name, fmt in twins.formats.items():
            formats.setdefault(name, set()).add(fmt)
    values, exact = twins.compiled_values(job), twins.exact_values()
    distance = (exact["param"] - start).abs().clamp(min=1e-30)
    return Agreement(
        graphs=len(twins.graphs),
        states=frozenset(values) - {"param"},
        squares=squares,
        sums=sums - squares,
        formats=formats,
        looseness=float((twins.radii["param"] / distance).median()),
        error=float(((values["param"] - exact["param"]).abs() / distance).median()),
        unbounded=float(torch.cat([r.isinf().flatten() for r in twins.radii.values()]).double().mean()),
    )
