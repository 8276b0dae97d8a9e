"""Kernels for Trainium of common optimizers, which `kernel_files.py` keeps and `kernel_tables.py` estimates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from collage_neuron.api import compile
from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.ir.update import Update
from collage_neuron.runtime import step_plan
from collage_neuron.states.inner_optimizers import base_of
from collage_neuron.trace import dry_run, replayed_steps

Params = list[torch.nn.Parameter]


class Lion(Optimizer):
    """Lion, written as a user would: the sign of an average of gradients (Chen et al., 2023, algorithm 2)."""

    def __init__(self, params: Any, lr: float = 1e-4, betas: tuple[float, float] = (0.9, 0.99), decay: float = 0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                beta1, beta2 = group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.sign(m * beta1 + p.grad * (1 - beta1)), alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1 - beta2)


class Entry(NamedTuple):
    """A kernel: an optimizer, and how it is compiled."""

    make: Callable[[Params], Optimizer]
    strategy: StrategyLike
    arithmetic: str = "fp32"


def adamw(ps: Params) -> Optimizer:
    """AdamW with decay, so that its kernel has that too."""
    return AdamW(ps, weight_decay=0.1)


KERNELS: Mapping[str, Entry] = {
    "adamw_light": Entry(adamw, "light"),
    "adamw_plus": Entry(adamw, "plus"),
    "adamw_full": Entry(adamw, "full"),
    "adamw_split433": Entry(adamw, "split433"),
    "adamw_plus_bf16": Entry(adamw, "plus", "bf16"),
    "adam_plus": Entry(Adam, "plus"),
    "sgd_momentum_light": Entry(lambda ps: SGD(ps, lr=1e-2, momentum=0.9, weight_decay=1e-4), "light"),
    "lion_light": Entry(Lion, "light"),
}
"""By the name of the file and of its function."""

FOLDERS = {"trn1": ("trn1", "nki"), "trn1_beta1": ("trn1", "beta1"), "trn2": ("trn2", "nki"), "trn3": ("trn3", "nki")}
"""Folder -> target and dialect."""


@cache
def job(name: str) -> step_plan.Job:
    """The plan of the second step of an entry's optimizer: the captured and the rewritten update."""
    return job_of(KERNELS[name])


def job_of(entry: Entry, measured: bool = False) -> step_plan.Job:
    """The same of another entry, or of a step that a monitor measures."""
    made = entry.make([_parameter()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of formats and settings, which are for those who train
        optimizer = compile(made, strategy=entry.strategy, arithmetic=entry.arithmetic, verbose=False)
        optimizer.step()
    base = base_of(type(optimizer))
    foreseen = replayed_steps.records(base, optimizer, dry_run.known(base, optimizer))
    (planned,) = step_plan.plan(base, optimizer, optimizer.param_groups[0], 0, foreseen, measured)
    return planned


@cache
def kernel(name: str, target: str) -> Kernel:
    """The kernel of KERNELS called `name`, for a target, in the newer dialect."""
    optimizer = type(KERNELS[name].make([_parameter()])).__name__
    title = [
        f"{optimizer}, strategy {KERNELS[name].strategy}, {KERNELS[name].arithmetic} arithmetic: one step, fused.",
        "",
        "The update as it was captured; s0, s1, ... are numbers of the step:",
        "",
        *(f"  {line}" for line in format_graph(job(name).recording.captured.graph).splitlines()),
    ]
    return lower_to_nki(job(name).update, target, name=name, title="\n".join(title))


def _parameter() -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16, device="cpu"))
    p.grad = torch.zeros_like(p)
    return p


def source(folder: str, name: str) -> str:
    """The text of a kernel, for the target and in the dialect of a folder."""
    target, dialect = FOLDERS[folder]
    return kernel(name, target).in_dialect(dialect).source


@cache
def adamw_update(strategy: str) -> Update:
    """The rewritten update of AdamW under a strategy."""
    return job_of(Entry(adamw, strategy)).update


def adamw_kernel(strategy: str, target: str) -> Kernel:
    """AdamW's kernel under a strategy: one of `KERNELS`, or one that has no docstring of its own."""
    name = f"adamw_{strategy}"
    return kernel(name, target) if name in KERNELS else lower_to_nki(adamw_update(strategy), target, name=name)
