"""Nothing is collected while a step is recorded, and afterwards the collector is as it was."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

import collage_neuron
from collage_neuron.states.collector import LISTING, paused


class Asking(torch.optim.Optimizer):
    """Notes whether the collector runs while its step does."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        seen.append(gc.isenabled())
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])


seen: list[bool] = []


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_after_a_step(enabled: bool) -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(Asking([p]), verbose=False)
    p.grad = torch.ones_like(p)
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        seen.clear()
        optimizer.step()
        assert seen
        assert not any(seen)
        assert gc.isenabled() == enabled
        with pytest.raises(KeyError), paused():
            raise KeyError
        assert gc.isenabled() == enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_it_is_not_switched_on_while_another_thread_lists_all_objects() -> None:
    def pause() -> None:
        with paused():
            began.set()

    began, before = threading.Event(), gc.isenabled()
    gc.enable()
    thread = threading.Thread(target=pause)
    try:
        with LISTING:
            thread.start()
            began.wait()
            thread.join(0.05)
            assert thread.is_alive()
            assert not gc.isenabled()
        thread.join()
        assert gc.isenabled()
    finally:
        (gc.enable if before else gc.disable)()
