"""Models given to `compile` alone, which wait for an optimizer over their parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from collage_neuron.settings import Settings


@dataclass
class Pending:
    """A model without an optimizer yet: its settings, and the fp32 values of parameters that were rounded."""

    settings: Settings
    buffers: str
    originals: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=dict)
    """By name: the fp32 value, the parameter, and the version of what it holds instead."""


models: WeakKeyDictionary[torch.nn.Module, Pending] = WeakKeyDictionary()
"""Those that wait; each until nobody holds it any more, since further optimizers may step it."""


def models_of(optimizer: Optimizer) -> list[torch.nn.Module]:
    """The models given to `compile` alone that `optimizer` has parameters of."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [model for model in models if not owned.isdisjoint(map(id, model.parameters()))]


def settings_for(optimizer: Optimizer) -> Settings | None:
    """The settings of the first of these models; None if there is none."""
    return next((models[model].settings for model in models_of(optimizer)), None)


def is_compiled(optimizer: object) -> bool:
    """Returns True for an object of a compiled class, or of a subclass of one: what `isinstance(..., Compiled)` says.

    `Compiled` itself would bring the whole compiler along, to which this must be no door.
    """
    return hasattr(type(optimizer), "_collage_base")


def require_compiled(optimizer: object) -> None:
    """Raises TypeError for an optimizer that is not compiled, or that `compile(model)` has still to compile."""
    if is_compiled(optimizer):
        return
    name = type(optimizer).__name__
    if isinstance(optimizer, Optimizer) and settings_for(optimizer) is not None:
        raise TypeError(
            f"{name} is not compiled yet: after compile(model) an optimizer is compiled when it first steps; ask then, "
            "or give both to collage_neuron.compile(model, optimizer)"
        )
    raise TypeError(f"{name} is not compiled; pass it to collage_neuron.compile first")
