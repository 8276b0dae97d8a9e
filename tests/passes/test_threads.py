"""Other threads while steps are recorded: the generators of the process are theirs too."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import hosted
import numpy as np
import pytest
import torch

import collage_neuron
from collage_neuron.passes.capture.host_state import HostState
from collage_neuron.passes.capture.reach import Reach

Class = Any  # a class of optimizers; each has a constructor of its own

DRAWS: dict[str, Callable[[], float]] = {
    "python": random.random,
    "torch": lambda: torch.rand(()).item(),
    "numpy": lambda: float(np.random.rand()),
}

gauss, sampled, Noise = random.gauss, torch.rand, torch.nn.Dropout


def seed() -> None:
    random.seed(1), np.random.seed(1), torch.manual_seed(1)


class ReadsOnly(hosted.Descent):
    """Has code of its own, which draws nothing."""


def reach(cls: Class) -> Reach:
    optimizer = cls([torch.nn.Parameter(torch.ones(3))])
    return Reach(cls, optimizer, {})


@pytest.mark.parametrize("name", DRAWS)
def test_a_thread_that_draws_while_steps_are_recorded_draws_the_numbers_of_plain_torch(name: str) -> None:
    draw, drawn, stop = DRAWS[name], list[float](), threading.Event()
    asked, done = threading.Semaphore(0), threading.Semaphore(0)

    def loader() -> None:
        while asked.acquire() and not stop.is_set():
            drawn.append(draw())
            done.release()

    seed()
    plain = [draw() for _ in range(6)]
    seed()
    thread = threading.Thread(target=loader)
    thread.start()
    try:
        optimizer = ReadsOnly([torch.nn.Parameter(torch.ones(3))])
        for _ in range(3):
            with HostState(ReadsOnly, optimizer) as host:
                for _ in range(2):
                    asked.release()
                    assert done.acquire(timeout=60)
                assert host.changes() == []
    finally:
        stop.set()
        asked.release()
        thread.join()
    assert drawn == plain


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("cls", [hosted.Random, hosted.TorchRandom, hosted.NumpyRandom])
def test_what_the_step_draws_is_restored_beside_a_thread_too(cls: Class, beside: bool) -> None:
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait)
    if beside:
        thread.start()
    try:
        seed()
        optimizer = cls([torch.nn.Parameter(torch.ones(3))])
        rates = []
        for _ in range(2):
            with HostState(cls, optimizer) as host:
                rates.append(optimizer.rate())
                assert len(host.changes()) == 1
    finally:
        stop.set()
        if beside:
            thread.join()
    assert rates[0] == rates[1]


def test_without_other_threads_even_an_unseen_draw_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading, "active_count", lambda: 1)  # the test runner may have threads of its own
    optimizer = ReadsOnly([torch.nn.Parameter(torch.ones(3))])
    before = random.getstate()
    with HostState(ReadsOnly, optimizer):
        random.random()
    assert random.getstate() == before


class Renamed(hosted.Descent):
    def rate(self) -> Any:
        return sampled(()).item()


class ByText(hosted.Descent):
    def rate(self) -> Any:
        return getattr(torch, "rand")(()).item()  # noqa: B009


class OfAModule(hosted.Descent):
    def begin(self) -> None:
        self.noise = Noise()


class Imports(hosted.Descent):
    def rate(self) -> Any:
        import random as r

        return r.betavariate(1, 1)


class OfAPackage(hosted.Descent):
    def rate(self) -> Any:
        return pytest.approx(1.0).expected


@pytest.mark.parametrize("cls", [hosted.Random, Renamed, ByText, OfAModule, Imports, OfAPackage])
def test_code_that_may_draw_is_recognised(cls: Class) -> None:
    assert reach(cls).may_draw


@pytest.mark.parametrize("cls", [ReadsOnly, hosted.Attribute, hosted.Global, hosted.Closure, torch.optim.AdamW])
def test_code_that_draws_nothing_is_recognised(cls: Class) -> None:
    assert not reach(cls).may_draw


def test_a_compiled_class_steps_beside_a_thread_that_draws() -> None:
    """Draws of the thread are not taken for changes by the step, which would be rejected."""
    stop = threading.Event()

    def loader() -> None:
        while not stop.wait(0.0002):
            random.random()

    thread = threading.Thread(target=loader)
    thread.start()
    try:
        p = torch.nn.Parameter(torch.ones(3))
        optimizer = collage_neuron.compile(hosted.Attribute([p]))
        for _ in range(6):
            p.grad = torch.ones_like(p)
            optimizer.step()
    finally:
        stop.set()
        thread.join()
