"""Checks that a model's matmuls can run in fp8, and puts `Fp8Forward` in the place of its forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from collage_neuron import torch_privates
from collage_neuron.matmuls.forward import Fp8Forward, begin_fp8_call
from collage_neuron.matmuls.requirements import spread_advice, spread_part

RESCALE = 50


def check_matmul(
    target: object, matmul: str | None, keep: Iterable[str] | None, rescale: object
) -> tuple[str, ...] | None:
    """The names of layers to keep, as a tuple; None for the default. Changes nothing.

    Raises:
        ValueError: an unknown choice, or one without a model; names that no module and no parameter has; a model whose
            forward cannot be exchanged.
    """
    if matmul is None:
        if keep is not None or rescale != RESCALE:
            raise ValueError("keep and rescale are about matmul='fp8': write it too, or leave them out")
        return None
    if matmul != "fp8":
        raise ValueError(f"unknown matmul {matmul!r}; choose 'fp8', or leave it out")
    if not isinstance(target, torch.nn.Module):
        raise ValueError("matmul='fp8' rewrites the layers of a model: write compile(model, optimizer, matmul='fp8')")
    if not isinstance(rescale, int) or rescale < 0:
        raise ValueError(f"rescale is {rescale!r}; give a number of forward calls, or 0 to never measure")
    model = inner(target)
    _check_model(model)
    return None if keep is None else _names(model, keep)


def install(target: torch.nn.Module, keep: tuple[str, ...] | None, rescale: int) -> None:
    """Makes the model run its matmuls in fp8 from its next forward on."""
    model = inner(target)
    if not torch_privates.has_pre_hook(model, begin_fp8_call):  # one that is compiled again has the hooks
        model.register_forward_pre_hook(begin_fp8_call)
        model.register_load_state_dict_post_hook(loaded)
    vars(model)["forward"] = Fp8Forward(model, keep, rescale)


def loaded(model: torch.nn.Module, keys: object) -> None:
    """A hook of `load_state_dict`: scales are measured anew."""
    # A function that finds the forward, and does not hold it: the hook is copied with the model.
    forward = forward_of(model)
    if forward is not None:
        forward.backend.restart()


def inner(model: torch.nn.Module) -> torch.nn.Module:
    """The model in DDP: gradients are reduced around what is compiled."""
    return model.module if isinstance(model, torch.nn.parallel.DistributedDataParallel) else model


def forward_of(model: torch.nn.Module) -> Fp8Forward | None:
    """The forward of a model that was compiled with matmul='fp8', else None."""
    model = inner(model)
    found = vars(model).get("forward")
    return found.of(model) if isinstance(found, Fp8Forward) else None


def _check_model(model: torch.nn.Module) -> None:
    kind = type(model).__name__
    if isinstance(model, (torch.jit.ScriptModule, torch.fx.GraphModule)) or not hasattr(type(model), "forward"):
        raise ValueError(f"matmul='fp8' captures the forward of a module in Python, and {kind} has none")
    own = vars(model).get("forward")
    if own is not None and not isinstance(own, Fp8Forward):
        raise ValueError(
            f"the forward of this {kind} was replaced by {getattr(own, '__qualname__', type(own).__name__)}, which "
            "matmul='fp8' would skip: compile first, and wrap or prepare the model after that"
        )
    if spread := spread_part(model):
        raise ValueError(spread_advice(spread))


def _names(model: torch.nn.Module, keep: Iterable[str]) -> tuple[str, ...]:
    asked: tuple[Any, ...] = (keep,) if isinstance(keep, str) else tuple(keep)
    modules = model.named_modules(remove_duplicate=False)  # what is tied has several names
    there = {n for n, _ in modules} | {n for n, _ in model.named_parameters(remove_duplicate=False)}
    unknown = [name for name in asked if not isinstance(name, str) or name not in there or not name]
    if unknown:
        raise ValueError(
            f"keep names {unknown[0]!r}, and the model has no such module or parameter; its modules begin with "
            f"{', '.join(sorted(n for n in there if n)[:6])}"
        )
    return asked
