"""Updates that see a parameter in another shape (Adam-mini), on torch_xla's device: captured, reshaped in the HLO."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from as_written import Written
from headed import ALL, Flat, Fused, Mini, Vectors
from torch import Tensor
from xla_runs import both, compiled, counted, differing, met, run, torch_xla

import collage_neuron
from collage_neuron.errors import TranslationError
from collage_neuron.numerics import matrix_sums
from collage_neuron.passes.backends.registry import get
from collage_neuron.passes.backends.xla import sums
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.validation import validate

pytestmark = [pytest.mark.usefixtures("rejecting")]

SHAPES = ((6, 10), (2, 6, 130))
"""Heads begin and end within rows; runs of a sum end within them."""


class Moments(Written):
    """Each element by itself, in flat states, of which one is not read; it writes to the gradient too.

    No sum of products is in it, which XLA on the CPU contracts.
    """

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(m=g.new_zeros(g.numel()), last=g.new_zeros(1, g.numel()))
        g.view(-1).mul_(0.5)
        state["last"].copy_(g.view(1, -1))
        p.sub_(state["m"].add_(g.flatten()).view_as(p))


CASES = [*((make, "split433") for make in ALL), (Mini, "plus"), (Flat, "stochastic"), (Moments, "full")]


@pytest.mark.sampled(of=2)
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


@pytest.mark.parametrize(("make", "strategy"), [(Mini, "full"), (Moments, "stochastic")])
def test_native_code_on_lent_memory_has_the_same_bits(
    xla: torch.device, make: Any, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = ((xla, "xla_native"), ("cpu", "reference"))
    ours, theirs = (compiled(make, SHAPES, d, strategy=strategy, backend=b) for d, b in devices)
    run(theirs, 3)
    monkeypatch.setattr(type(get("xla")), "run", None)  # it would fail
    run(ours, 3)
    assert differing(ours, theirs) == []


def test_from_the_third_step_on_nothing_is_compiled_or_copied_and_no_step_waits(xla: torch.device) -> None:
    """Each component is written into its own buffer: views would not hinder it either, but add nodes to each step."""
    torch_xla.sync(wait=True)
    met.clear_all()
    optimizer = compiled(Mini, ((6, 10), (8, 8)), xla, strategy="full")
    run(optimizer, 2)
    torch_xla.sync(wait=True)
    (compilations, _), reused = counted(), met.metric_data("InputOutputAliasCount")
    for rate in (0.0, 1.0, 0.02):
        optimizer.param_groups[0]["lr"] = rate
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.full(p.shape, 0.1 + rate).bfloat16().to(xla)
        ran = counted()[1]
        optimizer.step()
        assert counted()[1] == ran
        torch_xla.sync(wait=True)
    assert counted()[0] == compilations
    assert [name for name in met.counter_names() if name.startswith("aten::")] == []
    assert [count for _, count, *_ in reused[2]][-1] == 2 * 5  # param, m, their low words, vmean


@pytest.mark.parametrize(("make", "strategy"), [(Mini, "full"), (Fused, "split433")])
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


@pytest.mark.validated
def test_validation_compares_all_and_notices_a_wrong_mean(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the second step too, of which states are drawn in their shapes."""
    optimizer = compiled(Mini, ((6, 10),), xla, backend="xla", validate="on")
    run(optimizer, 2)
    history = validate.history_of(optimizer)
    assert (history.compared, history.not_covered) == (2 * (2 * 60 + 4), 0)
    monkeypatch.setitem(sums.FINISH, matrix_sums.mean_to, lambda hlo, total, count: total)
    monkeypatch.setattr(get("xla"), "_lowered", {})
    with pytest.raises(TranslationError, match="of Mini was not taken"):
        run(optimizer, 2, first=2)
