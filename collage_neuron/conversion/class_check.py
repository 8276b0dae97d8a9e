"""Checks an optimizer class before there is an object: records its step on a parameter without data."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.eager import limits
from collage_neuron.errors import UnknownUpdate, UnsupportedUpdate
from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.runtime.bucketing import naming
from collage_neuron.runtime.closures import check_arguments
from collage_neuron.runtime.preconditions import check_differentiable
from collage_neuron.runtime.wrappers import check_stepper
from collage_neuron.settings import Settings
from collage_neuron.states import inner
from collage_neuron.torch_privates import unhooked_step
from collage_neuron.trace import dry_run
from collage_neuron.trace.undone import undone


def check_class(base: Any, settings: Settings) -> None:
    """Raises UnsupportedUpdate for a class whose update, with its default settings, cannot be rewritten.

    Accepts a class that cannot be built from a list of parameters alone, and one whose step raises an error of its own,
    since it may need a preparation: such classes are rejected at their first step if necessary. So are those that may
    run as written (`eager`) by their `settings`.
    """
    check_stepper(base)
    if settings.unsupported != "twin":
        check_arguments(base)
        _check_closure(base)
    with undone([base]):  # constructors count, draw and register too
        _try(base, settings)


def _try(base: Any, settings: Settings) -> None:
    optimizer = _made(base)
    if optimizer is None:
        return
    inner.check(optimizer)
    (group,) = optimizer.param_groups
    check_differentiable(group, 0)
    try:
        with naming(base):
            captured = dry_run.foreseen(base, optimizer)(group, group["params"][0]).captured
            rewrite(captured, dict.fromkeys(("param", *captured.states), format_named("fp32")), "fp32")
    except UnsupportedUpdate as refusal:
        if "dense gradients" in str(refusal.__cause__):  # SparseAdam's own words
            raise UnsupportedUpdate(
                f"{base.__name__} takes sparse gradients only, and updates the rows that these have; only "
                "updates of dense gradients can be rewritten: leave it uncompiled, or use sparse=False and another"
            ) from refusal
        if settings.unsupported == "twin" or isinstance(refusal, UnknownUpdate):
            limits.check_class(base, optimizer, refusal)
        elif refusal.__cause__ is None or isinstance(refusal.__cause__, UnsupportedUpdate):
            raise UnsupportedUpdate(
                f"{refusal}. This is with its default settings; if other settings would work, compile the optimizer "
                "object, or a subclass that has them as its defaults"
            ) from refusal


def _check_closure(base: Any) -> None:
    required = [p.name for p in inspect.signature(unhooked_step(base)).parameters.values() if p.default is p.empty]
    if "closure" in required[1:]:
        raise UnsupportedUpdate(
            f"{base.__name__} cannot be compiled without a closure, which its step() calls itself; leave it uncompiled"
        )


def _made(base: Any) -> Optimizer | None:
    """An optimizer with default settings over one matrix without data, in training mode if the class has modes."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer: Any = base([torch.nn.Parameter(torch.empty(2, 3, device="meta", dtype=torch.float32))])
            getattr(optimizer, "train", lambda: None)()
    except Exception:  # whatever user code raises
        return None
    return optimizer if len(optimizer.param_groups) == 1 else None
