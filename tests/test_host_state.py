"""Host objects that a step changes: compiling and recording leave no trace, a compiled step that of one plain step."""

from __future__ import annotations

import itertools
import random
from typing import Any

import torch
from torch.optim import SGD

from collage_neuron.passes.host_state import untraced


class Clock:
    """Counts its calls, in itself and in its class."""

    calls = 0

    def __init__(self) -> None:
        self.now = 0

    def next(self) -> int:
        self.now += 1
        Clock.calls += 1
        return self.now


class Clocked(SGD):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.clock, self.count, self.seen = Clock(), itertools.count(), [1.0]


def use(optimizer: Any) -> list[Any]:
    optimizer.seen.append(2.0)
    return [optimizer.clock.next(), next(optimizer.count), random.random(), float(torch.rand(())), len(optimizer.seen)]


def test_what_runs_untraced_leaves_no_trace() -> None:
    optimizer = Clocked([torch.nn.Parameter(torch.zeros(2))])
    clock, seen, generator = optimizer.clock, optimizer.seen, torch.get_rng_state()
    used = []
    for _ in range(2):
        with untraced(Clocked, optimizer) as host:
            used.append(use(optimizer))
            assert {"optimizer.clock", "optimizer.count", "optimizer.seen"} <= set(host.changes())
    assert used[0] == used[1]
    assert optimizer.clock is clock
    assert (clock.now, Clock.calls) == (0, 0)
    assert optimizer.seen is seen
    assert seen == [1.0]
    assert next(optimizer.count) == 0
    assert torch.equal(torch.get_rng_state(), generator)
