"""Traced steps on an XLA device with `nonfinite="skip"`: the host waits for nothing that the step does not read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from as_written import Written
from foreign import TransformersAdamW
from xla_runs import compiled, met, run, torch_xla

import collage_neuron


class Reading(Written):
    """SGD with momentum, clipped by a number on the host in the steps that say so."""

    reads = False

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.read: list[float] = []

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state, size = state, g.norm().item() if self.reads else 1.0
        self.read.append(size)
        if not state:
            state["m"] = torch.zeros_like(p)
        state["m"].mul_(0.9).add_(g, alpha=1 / (1 + size))
        p.sub_(state["m"], alpha=0.1)


def begun(make: Any, device: torch.device, steps: int) -> tuple[Any, list[Any]]:
    """An optimizer that has taken so many steps, with the gradients of the last one."""
    optimizer = compiled(make, ((5, 3), (7,)), device, strategy="plus", backend="xla", nonfinite="skip")
    run(optimizer, steps)
    return optimizer, optimizer.param_groups[0]["params"]


def step(optimizer: Any) -> None:
    optimizer.step()
    torch_xla.sync(wait=True)


def exact(optimizer: Any, params: list[Any]) -> list[torch.Tensor]:
    words = [x for p in params for x in optimizer.state[p].values() if isinstance(x, torch.Tensor)]
    return [x.detach().cpu() for x in (*params, *words)]


def reads() -> int:
    data = met.metric_data("TransferFromDeviceTime")
    return 0 if data is None else int(data[0])


@pytest.mark.parametrize("make", [TransformersAdamW, Reading])
def test_the_host_waits_for_nothing(make: Any, xla: torch.device) -> None:
    """Of the second of three steps a gradient is infinite."""
    optimizer, params = begun(make, xla, 4)
    for bad in (False, True, False):
        before = exact(optimizer, params)
        if bad:
            params[1].grad[2] = torch.inf
        torch_xla.sync(wait=True)
        count = reads()
        step(optimizer)
        assert reads() == count
        assert all(map(torch.equal, before, exact(optimizer, params))) == bad
        params[1].grad = torch.ones_like(params[1])
    assert collage_neuron.skipped_steps(optimizer) == 1
    assert not optimizer._collage_bookkeeping.traces.misses


def test_a_step_that_reads_a_number_is_not_begun(xla: torch.device, recwarn: pytest.WarningsRecorder) -> None:
    """What it did before is undone: no number on the host is that of a gradient which is not finite."""
    optimizer, params = begun(Reading, xla, 4)
    before, known = exact(optimizer, params), list(optimizer.read)
    optimizer.reads = True
    params[0].grad.fill_(torch.nan)
    step(optimizer)
    assert not recwarn.list  # nothing runs as written
    assert optimizer.read == known
    assert collage_neuron.skipped_steps(optimizer) == 1
    assert all(map(torch.equal, before, exact(optimizer, params)))
    params[0].grad.fill_(1.0)
    step(optimizer)
    assert len(optimizer.read) == len(known) + 2
    assert collage_neuron.skipped_steps(optimizer) == 1
