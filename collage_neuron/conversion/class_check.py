"""Checks an optimizer class before there is an object: records its step on a parameter without data."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.eager import rejections
from collage_neuron.errors import UnknownUpdate, UnsupportedUpdate, naming
from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.runtime.preconditions import check_differentiable
from collage_neuron.runtime.wrappers import check_stepper
from collage_neuron.states import inner_optimizers
from collage_neuron.trace import dry_run
from collage_neuron.trace.side_effects import undone


def check_class(base: Any) -> None:
    """Raises UnsupportedUpdate for a class whose update, with its default settings, cannot be rewritten.

    Accepts a class that cannot be built from a list of parameters alone, and one whose step raises an error of its own,
    since it may need a preparation: such classes are rejected at their first step if necessary.
    """
    check_stepper(base)
    with ExitStack() as stack:
        try:
            stack.enter_context(undone([base]))  # constructors count, draw and register too
        except UnknownUpdate:
            return
        _try(base)


def _try(base: Any) -> None:
    optimizer = _made(base)
    if optimizer is None:
        return
    inner_optimizers.check(optimizer)
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
        rejections.check_class(base, optimizer, refusal)


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
