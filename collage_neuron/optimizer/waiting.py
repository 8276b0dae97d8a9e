"""The models that were given to `compile` without an optimizer, and wait for one over their parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer

from collage_neuron.settings import Settings

CompileOptimizer = Callable[[Optimizer, Settings], None]


@dataclass
class Pending:
    """A waiting model: its settings, and the fp32 values of the parameters that were rounded."""

    settings: Settings
    stay: frozenset[str]
    """The names of the parameters that were left in fp32."""
    compile_optimizer: CompileOptimizer
    """A function that compiles an optimizer over its parameters, called when one first steps."""
    originals: dict[str, tuple[torch.Tensor, torch.Tensor, int]] = field(default_factory=dict)
    """By name: the fp32 value, the parameter, and the parameter's version after it was rounded."""
    memories: list[StorageWeakRef] = field(default_factory=list)
    """The memory that the parameters had before; a weak reference keeps its identity from being used again."""


models: WeakKeyDictionary[torch.nn.Module, Pending] = WeakKeyDictionary()
"""All waiting models; each stays as long as it is alive, since further optimizers may be built over it."""


def models_of(optimizer: Optimizer) -> list[torch.nn.Module]:
    """The models given to `compile` alone that `optimizer` has parameters of."""
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [model for model in models if not owned.isdisjoint(map(id, model.parameters()))]


def settings_for(optimizer: Optimizer) -> Settings | None:
    """The settings of the first of these models; None if there is none."""
    return next((models[model].settings for model in models_of(optimizer)), None)


def is_compiled(optimizer: object) -> bool:
    """Returns True for an instance of a compiled class, like `isinstance(optimizer, Compiled)`.

    It does not import `Compiled`, which would import the whole compiler.
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
