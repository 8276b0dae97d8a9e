"""Updates that see a parameter in another shape (Adam-mini), on torch_xla's device: captured, reshaped in the HLO."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from headed import ALL, Flat, Fused, Mini, Moments, Vectors
from staged import Novograd
from torch import Tensor
from xla_runs import both, compiled, differing, run

import collage_neuron
from collage_neuron.states.bookkeeping import bookkeeping

pytestmark = [pytest.mark.usefixtures("rejecting")]

SHAPES = ((6, 10), (2, 6, 130))
"""Heads begin and end within rows; runs of a sum end within them."""


CASES = [*((make, "split433") for make in ALL), (Mini, "plus"), (Flat, "stochastic"), (Moments, "full")]


@pytest.mark.sampled(of=3, each=False)  # XLA compiles for seconds what test_heads.py has whole
@pytest.mark.parametrize(("make", "strategy"), CASES)
def test_steps_have_the_bits_and_the_shapes_of_the_reference(xla: torch.device, make: Any, strategy: str) -> None:
    shapes = (*SHAPES, (40, 1)) if make is Vectors else SHAPES  # heads of ten elements, of which each row has one
    ours, theirs = (compiled(make, shapes, d, strategy=strategy, backend=b) for d, b in both(xla))
    for optimizer in (ours, theirs):
        run(optimizer, 3)
        assert not bookkeeping(optimizer).as_written
    assert differing(ours, theirs) == []
    for optimizer in (ours, theirs):
        run(optimizer, 1, first=3, special=math.nan)
    assert differing(ours, theirs) == []
    for p, q in zip(*(o.param_groups[0]["params"] for o in (ours, theirs)), strict=True):
        assert torch.equal(p.grad.cpu().nan_to_num(7), q.grad.nan_to_num(7))


@pytest.mark.sampled(of=3, each=False)
@pytest.mark.parametrize(("make", "strategy"), [(Mini, "full"), (Fused, "split433"), (Novograd, "full")])
def test_a_checkpoint_goes_from_one_device_to_the_other_and_resumes(
    xla: torch.device, make: Any, strategy: str
) -> None:
    ours, again, theirs = (compiled(make, SHAPES[:2], d, strategy=strategy) for d in (xla, xla, "cpu"))
    run(ours, 2)
    saved = ours.state_dict()
    saved["state"] = {i: {k: v.cpu() if isinstance(v, Tensor) else v for k, v in s.items()}
                      for i, s in saved["state"].items()}  # fmt: skip
    for other in (again, theirs):
        for to, p in zip(other.param_groups[0]["params"], ours.param_groups[0]["params"], strict=True):
            with torch.no_grad():
                to.copy_(p.cpu())
        other.load_state_dict(saved)
    for optimizer in (ours, again, theirs):
        run(optimizer, 1, first=2)
    assert differing(ours, again) == []
    assert differing(ours, theirs) == []


def test_a_skipped_step_changes_nothing_and_a_monitor_measures(xla: torch.device) -> None:
    found = []
    for device, backend in both(xla):
        optimizer = compiled(Fused, SHAPES[:1], device, strategy="full", backend=backend, nonfinite="skip")
        monitor = collage_neuron.monitor(optimizer, every=1)
        run(optimizer, 1)
        before = copy.deepcopy(optimizer)
        run(optimizer, 1, first=1, special=math.inf)
        assert differing(before, optimizer) == []
        run(optimizer, 1, first=2)
        assert monitor.latest() is not None
        found.append(optimizer)
    assert differing(*found) == []
