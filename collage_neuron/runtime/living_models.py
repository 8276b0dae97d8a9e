"""Living models that have the parameters of an optimizer, and copies of these models: no optimizer knows its model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.states.live_objects import objects_of, with_subclasses

AVERAGES_EXACTLY = "_collage_averages_exactly"
"""An attribute of the class of modules whose copy of a model is no concern."""


def outermost(held: set[int]) -> list[torch.nn.Module]:
    """The living modules with a parameter among `held`, by identity, that are in no other module."""
    return _outermost(_modules(objects_of(with_subclasses(torch.nn.Module))), held)


def smallest(model: torch.nn.Module, held: set[int]) -> torch.nn.Module:
    """The innermost module with all the parameters among `held` that `model` has: others are not the optimizer's."""
    return list(_nested(model, held))[-1]


def copies(held: set[int]) -> list[tuple[torch.nn.Module, torch.nn.Module]]:
    """The models that have parameters among `held`, each with another module of its class and shapes.

    The copy of an outer module stands for those in it. Copies that an optimizer trains are not among them.
    """
    living = objects_of(with_subclasses(torch.nn.Module) | with_subclasses(Optimizer))  # at once: it takes long
    modules, optimizers = _modules(living), [o for o in living if isinstance(o, Optimizer)]
    known = held | {id(p) for o in optimizers for group in groups_of(o) for p in group["params"]}
    known |= {id(p) for m in modules if hasattr(type(m), AVERAGES_EXACTLY) for p in m.parameters()}
    found = []
    for model in (m for outer in _outermost(modules, held) for m in _nested(outer, held)):
        alike = [m for m in modules if type(m) is type(model) and known.isdisjoint(map(id, m.parameters()))]
        for copy in (m for m in alike if _shapes(m) == _shapes(model)):
            found.append((model, copy))
            known.update(map(id, copy.parameters()))
    return found


def _modules(living: Iterable[object]) -> list[torch.nn.Module]:
    """All modules but those without `training`, which are being built or wrap another, and torch's scripted ones."""
    modules = [m for m in living if isinstance(m, torch.nn.Module) and not isinstance(m, torch.jit.ScriptModule)]
    return [m for m in modules if "training" in vars(m)]


def _outermost(living: list[torch.nn.Module], held: set[int]) -> list[torch.nn.Module]:
    inside = {id(child) for m in living for child in m.children()}
    return [m for m in living if id(m) not in inside and _of(m, held)]


def _nested(model: torch.nn.Module, held: set[int]) -> Iterator[torch.nn.Module]:
    """`model`, and inside of one another the modules that have all the parameters among `held` that it has."""
    yield model
    whole = _of(model, held)
    inner = next((child for child in model.children() if _of(child, held) == whole), None)
    if inner is not None:
        yield from _nested(inner, held)


def _of(model: torch.nn.Module, held: set[int]) -> set[int]:
    return held.intersection(map(id, model.parameters()))


def _shapes(model: torch.nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in model.named_parameters()]


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """The groups of an optimizer among all living ones: one may have none yet, or be the shell of a step or method."""
    # Groups of another type are those that a method runs with (`optimizer/methods.py`).
    return [group for group in vars(optimizer).get("param_groups", ()) if type(group) is dict]
