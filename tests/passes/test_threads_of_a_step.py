"""A step that starts threads is not captured, since what they do is not recorded; on copies it runs as it is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from as_written import Written, compiled, equal, in_fp32, run, values
from torch import Tensor

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.bookkeeping import bookkeeping


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


class SavesInAThread(Written):
    """What else the class can do does not matter."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"])

    def save(self, path: str) -> None:
        threading.Thread(target=torch.save, args=(self.state_dict(), path)).start()


WHERE = {OneState: "Thread in elsewhere", Pool: "ThreadPoolExecutor in Pool.step"}


@pytest.mark.parametrize("make", WHERE)
@pytest.mark.parametrize("validate", ["auto", "off"])
def test_a_step_with_threads_is_not_captured(make: Any, validate: str) -> None:
    options = {} if validate == "auto" else {"validate": validate}
    with pytest.raises(UnsupportedUpdate, match=rf"starts a thread \({WHERE[make]}\(\)\), and what another thread"):
        run(compiled(make, unsupported="error", **options)[0], 1)
    optimizer, params = compiled(make, **options)
    run(optimizer, 4)
    assert bookkeeping(optimizer).twin
    assert equal(values(optimizer, params), in_fp32(make, 4))


def test_a_method_that_the_step_does_not_call_may_start_one() -> None:
    optimizer, _ = compiled(SavesInAThread, unsupported="error")
    run(optimizer, 2)
    assert not bookkeeping(optimizer).twin
