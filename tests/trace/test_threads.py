"""What a thread that a step starts does with the step's tensors is not lost: the step is repeated as written."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from as_written import Written, compiled, equal, in_fp32, run, values
from running import compiled_only
from torch import Tensor

from collage_neuron.errors import UnsupportedUpdate


def elsewhere(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


class OneState(Written):
    """A thread moves the average, which the step then subtracts: without it the recording is that of no average."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        elsewhere(lambda: m.detach().lerp_(g, 0.1))
        p.sub_(m, alpha=group["lr"])


class Pool(Written):
    """A pool for the duration of a step, and a task for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self.one, [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]))

    @staticmethod
    def one(work: tuple[Any, dict[str, Any]]) -> None:
        p, group = work
        with torch.no_grad():
            p.sub_(p.grad, alpha=group["lr"])


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # of the first time
@pytest.mark.parametrize("make", [OneState, Pool])
@pytest.mark.parametrize("validate", ["on", "off"])
def test_what_a_thread_does_is_not_lost(make: Any, validate: str) -> None:
    optimizer, params = compiled(make, validate=validate)
    run(optimizer, 4)
    assert equal(values(optimizer, params), in_fp32(make, 4))


@pytest.mark.parametrize("make", [OneState, Pool])
def test_it_is_rejected_where_the_step_may_not_run_as_written(make: Any) -> None:
    with compiled_only(), pytest.raises(UnsupportedUpdate, match="starts threads"):
        compiled(make)
