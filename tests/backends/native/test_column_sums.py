"""Sums over tensors, and over rows and columns in one pass, of several parameters at once: the reference's bits."""

from __future__ import annotations

import platform
from typing import Any

import pytest
import torch
from as_written import run
from natively import copies_of
from planned import plan, plan_update
from rowed import Came, Factored
from staged import Chained, Lamb
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.optimizer import launches
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.backends.native.backend import Engine, Native
from collage_neuron.passes.backends.native.machine import Target
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=str(NATIVE.missing()))

SHAPES = ((65, 1184), (2, 3, 96), (130, 160), (130, 160), (3, 40), (65, 1184))
"""More than a strip of columns, and the last run of it not full; matrices; pairs; columns that are no whole steps."""
ANY_SHAPES = ((300, 129), (16,), (), (0, 3), (128,))


def compiled(make: Any, shapes: Any, **settings: Any) -> tuple[Any, list[Parameter]]:
    g = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=g).bfloat16()) for shape in shapes]
    return collage_neuron.compile(make(params), verbose=False, validate="off", **settings), params


def launched(make: Any, shapes: Any = SHAPES) -> list[Launch]:
    """The third step."""
    optimizer, params = compiled(make, shapes, strategy="plus", backend="reference")
    run(optimizer, 2)
    group, ranks = optimizer.param_groups[0], {len(s) for s in shapes}
    jobs = plan(make, optimizer, group, 0)
    if make in (Came, Factored):  # whose steps tell parameters of different ranks apart
        jobs = [plan_update(make, optimizer, group, [p for p in params if p.dim() == n]) for n in ranks]
    return [launches.launch(optimizer, job) for job in jobs]


def found(launch: Launch) -> list[Tensor]:
    return [t for row in launch.writes for t in row] + [t for states in launch.small for t in states.values()]


@pytest.mark.parametrize("width", [4, 8, None])
@pytest.mark.parametrize("make", [Came, Factored, Lamb, Chained])
def test_they_have_the_bits_of_the_reference(make: Any, width: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if width and platform.machine() != "x86_64":
        pytest.skip("narrower vectors of x86")
    backend = Native()
    backend._engine = Engine(Target("x86_64-unknown-linux-gnu", "x86-64-v3", "", width) if width else None)
    for given in launched(make, SHAPES if make in (Came, Factored) else ANY_SHAPES):
        (own,), (wanted,) = copies_of([given]), copies_of([given])
        REFERENCE.run([wanted])
        with monkeypatch.context() as patch:  # nothing is left to the reference
            patch.setattr(type(REFERENCE), "run_one", None)
            patch.setattr(type(REFERENCE), "group_sums", None)
            backend.run([own])
        for ours, theirs, before in zip(found(own), found(wanted), found(given), strict=True):
            assert torch.equal(ours, theirs)
            assert ours.dtype != torch.float32 or not torch.equal(ours, before)
