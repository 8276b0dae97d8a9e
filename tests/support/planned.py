"""The next step of an optimizer, as it is foreseen: recordings and jobs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.passes.ir.update import Recording
from collage_neuron.runtime import step_plan as plans
from collage_neuron.runtime.step_plan import Job
from collage_neuron.states.visible_states import ParamShaped
from collage_neuron.trace import dry_run, replayed_steps


def plan(
    base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], index: int, measured: bool = False
) -> list[Job]:
    return plans.plan(
        base, optimizer, group, index, replayed_steps.records(base, optimizer, dry_run.known(base, optimizer)), measured
    )


def plan_update(base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], params: list[Any]) -> Job:
    return plans.plan_update(
        base, optimizer, group, params, replayed_steps.records(base, optimizer, dry_run.known(base, optimizer))
    )


def capture(
    base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], p: Any, state: Mapping[str, Any]
) -> Recording:
    """The step from a state, of which tensors of the parameter's shape are `ParamShaped`."""
    if state:
        optimizer.state[p] = {k: torch.zeros_like(p) if isinstance(v, ParamShaped) else v for k, v in state.items()}
    return replayed_steps.records(base, optimizer, dry_run.known(base, optimizer))(group, p)
