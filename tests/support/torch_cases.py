"""What torch.optim exports, and how the tests and docs/make_coverage.py drive it: cases, runs, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from planned import plan_update
from torch import Tensor, optim
from torch.optim import Optimizer

import collage_neuron
from collage_neuron import exact_value
from collage_neuron.optimizer import compiled_step
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.runtime import update_formats
from collage_neuron.settings import Settings
from collage_neuron.states.store import read_exact
from collage_neuron.trace.meta_copy import SWITCHES

STRATEGIES = ("light", "plus", "full")
"""Strategies that keep parameters as hi + lo."""


class Case(NamedTuple):
    """A class of torch.optim with options; `measured` if docs/development/coverage.md has a row of its errors."""

    base: type[Optimizer]
    options: Mapping[str, Any]
    measured: bool = True

    def of(self, p: Tensor) -> Optimizer:
        return self.base([p], **self.options)

    def plain(self, p: Tensor) -> Optimizer:
        """The same update by torch's loop over single tensors, which computes in the dtype of `p`."""
        options: dict[str, Any] = {k: v for k, v in self.options.items() if k not in SWITCHES}
        options["foreach"] = False
        return self.base([p], **options)


def double(x: float) -> Tensor:
    return torch.tensor(x, dtype=torch.float64)


CASES: dict[str, Case] = {
    "adadelta": Case(optim.Adadelta, {"lr": 0.1}),
    "adadelta_options": Case(
        optim.Adadelta, {"lr": 1.0, "rho": 0.95, "eps": 1e-5, "weight_decay": 0.1, "maximize": True, "capturable": True}
    ),
    "adadelta_foreach": Case(optim.Adadelta, {"foreach": True}, measured=False),
    "adagrad": Case(optim.Adagrad, {"lr": 1e-2}),
    "adagrad_options": Case(
        optim.Adagrad,
        {"lr": 2e-2, "lr_decay": 1e-3, "weight_decay": 0.1, "initial_accumulator_value": 1e-4, "eps": 1e-8,
         "maximize": True},
    ),
    "adagrad_foreach": Case(optim.Adagrad, {"foreach": True}, measured=False),
    "adagrad_fused": Case(optim.Adagrad, {"fused": True}, measured=False),
    "adam": Case(optim.Adam, {"lr": 1e-3}),
    "adam_l2": Case(optim.Adam, {"lr": 1e-3, "weight_decay": 0.1}),
    "adam_amsgrad": Case(optim.Adam, {"lr": 1e-3, "amsgrad": True}),
    "adam_decoupled": Case(
        optim.Adam, {"lr": 1e-3, "weight_decay": 0.1, "decoupled_weight_decay": True, "betas": (0.9, 0.95), "eps": 1e-6}
    ),
    "adam_maximize": Case(optim.Adam, {"maximize": True}, measured=False),
    "adam_tensors": Case(
        optim.Adam, {"lr": double(1e-3), "betas": (double(0.9), double(0.999))}, measured=False
    ),
    "adam_foreach": Case(optim.Adam, {"foreach": True}, measured=False),
    "adam_fused": Case(optim.Adam, {"fused": True}, measured=False),
    "adam_capturable": Case(optim.Adam, {"capturable": True}, measured=False),
    "adamax": Case(optim.Adamax, {"lr": 2e-3}),
    "adamax_options": Case(
        optim.Adamax,
        {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-7, "weight_decay": 0.1, "maximize": True, "capturable": True},
    ),
    "adamax_foreach": Case(optim.Adamax, {"foreach": True}, measured=False),
    "adamw": Case(optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1}),
    "adamw_amsgrad": Case(optim.AdamW, {"lr": 1e-3, "weight_decay": 0.1, "amsgrad": True}),
    "adamw_options": Case(
        optim.AdamW,
        {"lr": double(1e-3), "betas": (0.9, 0.95), "eps": 1e-6, "maximize": True, "capturable": True},
        measured=False,
    ),
    "adamw_foreach": Case(optim.AdamW, {"foreach": True}, measured=False),
    "adamw_fused": Case(optim.AdamW, {"fused": True}, measured=False),
    "asgd": Case(optim.ASGD, {"lr": 1e-2, "t0": 4.0}),
    "asgd_options": Case(
        optim.ASGD,
        {"lr": 2e-2, "lambd": 1e-2, "alpha": 0.5, "t0": 1e6, "weight_decay": 0.1, "maximize": True, "capturable": True},
    ),
    "asgd_foreach": Case(optim.ASGD, {"foreach": True}, measured=False),
    "nadam": Case(optim.NAdam, {"lr": 2e-3}),
    "nadam_l2": Case(optim.NAdam, {"lr": 2e-3, "weight_decay": 0.1, "momentum_decay": 1e-2}, measured=False),
    "nadam_options": Case(
        optim.NAdam,
        {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "decoupled_weight_decay": True,
         "maximize": True, "capturable": True},
    ),
    "nadam_foreach": Case(optim.NAdam, {"foreach": True}, measured=False),
    "radam": Case(optim.RAdam, {"lr": 1e-3}),
    "radam_l2": Case(optim.RAdam, {"lr": 1e-3, "weight_decay": 0.1}, measured=False),
    "radam_options": Case(
        optim.RAdam,
        {"lr": 2e-3, "betas": (0.9, 0.99), "eps": 1e-6, "weight_decay": 0.1, "decoupled_weight_decay": True,
         "maximize": True, "capturable": True},
    ),
    "radam_foreach": Case(optim.RAdam, {"foreach": True}, measured=False),
    "rmsprop": Case(optim.RMSprop, {"lr": 1e-3}),
    "rmsprop_centered": Case(optim.RMSprop, {"lr": 1e-3, "centered": True}),
    "rmsprop_momentum": Case(optim.RMSprop, {"lr": 1e-3, "momentum": 0.9}),
    "rmsprop_options": Case(
        optim.RMSprop,
        {"lr": 1e-3, "alpha": 0.95, "eps": 1e-6, "weight_decay": 0.1, "momentum": 0.9, "centered": True,
         "maximize": True, "capturable": True},
    ),
    "rmsprop_foreach": Case(optim.RMSprop, {"foreach": True}, measured=False),
    "rprop": Case(optim.Rprop, {"lr": 1e-3}),
    "rprop_options": Case(
        optim.Rprop,
        {"lr": 1e-3, "etas": (0.6, 1.1), "step_sizes": (1e-5, 1e-2), "maximize": True, "capturable": True},
    ),
    "rprop_foreach": Case(optim.Rprop, {"foreach": True}, measured=False),
    "sgd": Case(optim.SGD, {"lr": 1e-2}),
    "sgd_momentum": Case(optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "sgd_nesterov": Case(optim.SGD, {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "sgd_options": Case(
        optim.SGD, {"lr": double(1e-2), "momentum": 0.9, "dampening": 0.1, "weight_decay": 1e-2, "maximize": True}
    ),
    "sgd_foreach": Case(optim.SGD, {"foreach": True, "momentum": 0.9}, measured=False),
    "sgd_fused": Case(optim.SGD, {"fused": True, "momentum": 0.9}, measured=False),
}  # fmt: skip
"""Every elementwise class of torch.optim with every option it has."""


class Refusal(NamedTuple):
    """A class whose update cannot be captured: the reason, and what the message of the refusal says of it."""

    make: Callable[[Tensor], Optimizer]
    reason: str
    message: str
    as_written: bool = False
    """True if it runs as written on fp32 values (tests/eager/test_packages.py)."""


STAGED = ("Adafactor",)
"""Classes that are captured in stages (tests/optimizers/test_items.py)."""

REFUSED: dict[str, Refusal] = {
    "LBFGS": Refusal(
        lambda p: optim.LBFGS([p]),
        "it evaluates the closure several times a step, and its direction is made of dot products over all parameters",
        "LBFGS cannot be compiled: a closure sees the weights; nothing was updated",
        as_written=True,
    ),
    "Muon": Refusal(
        lambda p: optim.Muon([p]),
        "it orthogonalizes the momentum by matrix products, starting from its norm",
        "Muon cannot be compiled.*makes a tensor of torch.bfloat16",
        as_written=True,
    ),
    "SparseAdam": Refusal(
        lambda p: optim.SparseAdam([p]),
        "it updates by index, from sparse gradients only",
        "SparseAdam cannot be compiled.*does not support dense gradients",
    ),
}
"""The classes of torch.optim that are refused: not even `light` helps, since what fails is to record the update."""


def exported() -> dict[str, type[Optimizer]]:
    """The optimizer classes of torch.optim, in alphabetical order, without their base class."""
    found = {k: v for k, v in vars(optim).items() if inspect.isclass(v) and issubclass(v, Optimizer)}
    return {k: found[k] for k in sorted(found) if k != "Optimizer"}


def set_learning_rate(optimizer: Optimizer, factor: float) -> None:
    """`factor` times the learning rate that the optimizer was built with."""
    for group in optimizer.param_groups:
        initial = group.setdefault("initial_lr", group["lr"])
        group["lr"] = initial * factor


def gradients(steps: int, shape: Sequence[int]) -> Iterator[Tensor]:
    """bf16 gradients: for each element a mean of random sign, under Gaussian noise twice as large."""
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(shape, generator=generator).sign()
    for _ in range(steps):
        yield (mean * 5e-2 + torch.randn(shape, generator=generator) * 1e-1).bfloat16()


def weights(shape: Sequence[int]) -> Tensor:
    """theta ~ N(0, 0.02), bf16 numbers."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 0.02).bfloat16()


def parameter(value: Tensor, dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(value.to(dtype, copy=True))


FORMAT_RATIO = 2**7
"""The half ulp of bf16x2 over that of fp32, 2**-17 / 2**-24, each relative to the value: an error that is made of
independent roundings of the stores cannot be nearer to fp32's than this, for a random value 2**7 * sqrt(4 / 7) = 97.

hi + lo has 8 + 8 + 1 bits for the value whose lo is largest. Of low words (uniform in half an ulp of hi) half lie in
the top binade, a quarter in the next, ...: the mean square of a rounding is (1/2 + 1/4/4 + 1/8/16 + ...) = 4/7 of the
top binade's.
"""


class Runs(NamedTuple):
    """The parameter after some steps: of the rewritten update by strategy, and of torch's own by dtype."""

    start: Tensor
    exact: Tensor
    compiled: dict[str, Tensor]
    plain: dict[str, Tensor]
    states: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    """||s - s64|| / ||s64|| of each state s, by name and strategy."""

    @property
    def travelled(self) -> float:
        """||theta64 - theta0|| / ||theta0||: how far it went, compared with where it started."""
        return float((self.exact - self.start).norm() / self.start.norm())

    def errors(self) -> dict[str, float]:
        """||theta - theta64|| / ||theta64 - theta0||, the error as a fraction of the distance travelled."""
        travelled = (self.exact - self.start).norm()
        return {k: float((v - self.exact).norm() / travelled) for k, v in (self.compiled | self.plain).items()}


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def run(case: Case, steps: int, shape: Sequence[int], strategies: Sequence[str] = STRATEGIES) -> Runs:
    """Runs `case` from the same bf16 weights on the same bf16 gradients in every way there is.

    Strategies differ in how a step is rewritten, not in what is recorded of it: one recording serves them all.
    """
    theta = weights(shape)
    plain = {name: parameter(theta, dtype) for name, dtype in DTYPES.items()}
    torchs = {name: case.plain(p) for name, p in plain.items()}
    params = {strategy: parameter(theta, torch.bfloat16) for strategy in strategies}
    compiled = {s: collage_neuron.compile(case.of(p), strategy=s) for s, p in params.items()}
    for g in gradients(steps, shape):
        for p in (*plain.values(), *params.values()):
            p.grad = g.to(p.dtype)
        for optimizer in torchs.values():
            optimizer.step()
        step_together(case.base, compiled)
    exact = plain.pop("fp64")
    kept = {s: compiled[s].state[p] for s, p in params.items()}
    states = {
        name: {s: state_error(read_exact(params[s], kept[s], name), value) for s in strategies}
        for name, value in torchs["fp64"].state[exact].items()
        if isinstance(value, Tensor) and value.shape == theta.shape
    }
    return Runs(
        theta.double(),
        exact.detach(),
        {s: exact_value(compiled[s], p).double() for s, p in params.items()},
        {name: p.detach().double() for name, p in plain.items()},
        states,
    )


def state_error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def step_together(base: type[Optimizer], optimizers: Mapping[str, Optimizer]) -> None:
    """`step()` of equal compiled optimizers of one parameter that differ in strategy, recorded once."""
    leader = next(iter(optimizers.values()))
    (p,) = leader.param_groups[0]["params"]
    job = plan_update(base, leader, leader.param_groups[0], [p])
    for optimizer in optimizers.values():
        (group,) = optimizer.param_groups
        settings = Settings.of(group)
        formats = update_formats.formats_of(job.recording, settings, torch.bfloat16)
        update = rewrite(job.recording.captured, formats, settings.arithmetic)
        with torch.no_grad():
            compiled_step.take(optimizer, [replace(job, group=group, params=group["params"], update=update)], None)
