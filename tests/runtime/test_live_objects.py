"""Objects that only the garbage collector knows are found, unnoticed by other threads; recordings are not collected."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import collage_neuron
from collage_neuron.runtime.step_call import CollectorPaused
from collage_neuron.states.live_objects import objects_of


class Base:
    """A class whose objects are looked for."""


def test_a_tuple_that_another_thread_is_filling_is_left_alone() -> None:
    """Python raises SystemError there if somebody else refers to it."""
    stop, failed = threading.Event(), list[BaseException]()

    def fill() -> None:
        try:
            while not stop.is_set():
                tuple(i for i in range(1000))
        except SystemError as error:
            failed.append(error)

    threads = [threading.Thread(target=fill) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(30):
        objects_of([Base])
    stop.set()
    for thread in threads:
        thread.join()
    assert not failed


def test_nothing_is_held_afterwards() -> None:
    """Not even what a generator's caller is filling."""

    def numbers() -> Iterator[int]:
        yield 1
        objects_of([Base])
        yield 2

    assert tuple(numbers()) == (1, 2)


class Asking(torch.optim.Optimizer):
    """Notes whether the collector is on, and does something to it."""

    def __init__(self, params: list[torch.nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> Any:
        seen.append((gc.isenabled(), gc.get_threshold()[0]))
        does[0]()
        for group in self.param_groups:
            for p in group["params"]:
                p.data.sub_(p.grad, alpha=group["lr"])


seen: list[tuple[bool, int]] = []
does: list[Callable[[], object]] = [bool]


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    enabled, threshold = gc.isenabled(), gc.get_threshold()
    seen.clear()
    yield
    (gc.enable if enabled else gc.disable)()
    gc.set_threshold(*threshold)
    does[0] = bool


def stepped() -> None:
    p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(Asking([p]), verbose=False)
    p.grad = torch.ones_like(p)
    seen.clear()
    optimizer.step()


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_in_a_step_and_after_it(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    before = gc.get_threshold()
    stepped()
    assert set(seen) == {(enabled, 0)}
    assert gc.isenabled() == enabled
    assert gc.get_threshold() == before
    with pytest.raises(KeyError), CollectorPaused():
        raise KeyError
    assert gc.get_threshold() == before
