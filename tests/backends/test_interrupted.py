"""Backends that fail in the middle of a step, or return nothing."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from running import registered
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import exact_value
from collage_neuron.errors import StepInterrupted
from collage_neuron.passes.backends.protocol import ByParameter, Launch, Measure
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.ir.update import Update


class Fragile(ByParameter):
    """Runs as the reference does, until it fails before the parameter number `fails_at` of a step."""

    name = "fragile"
    devices = ("cpu",)
    measures = True
    fails_at: int | None = None
    error: BaseException = RuntimeError("device lost")
    returns_nothing = False

    def __init__(self) -> None:
        """Does not call that of its base."""

    def lower(self, update: Update) -> ReferenceUpdate:
        return ReferenceUpdate(update)

    def run(self, launches: Sequence[Launch]) -> Any:
        measured: list[Measure] = []
        number = 0
        for launch in launches:
            for reads, writes in zip(launch.reads, launch.writes, strict=True):
                if number == self.fails_at:
                    raise self.error
                number += 1
                measured += super().run([launch._replace(reads=[reads], writes=[writes])])
        return None if self.returns_nothing else measured


@pytest.fixture
def fragile() -> Iterator[Fragile]:
    with registered(Fragile()) as backend:
        yield backend


def made(backend: str = "fragile", **settings: Any) -> tuple[list[torch.nn.Parameter], Optimizer]:
    params = [torch.nn.Parameter(torch.linspace(-1, 1, n)) for n in (5, 7)]
    return params, collage_neuron.compile(AdamW(params, lr=1e-2), backend=backend, **settings)


def train(params: list[torch.nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        for p in params:
            p.grad = torch.full_like(p, 0.5 + step)
        optimizer.step()


@pytest.mark.parametrize("validate", ["on", "off"])
def test_half_a_step_is_told_and_no_step_follows_before_a_checkpoint_is_loaded(validate: str, fragile: Fragile) -> None:
    params, optimizer = made(validate=validate)
    train(params, optimizer, range(2))
    saved, weights = copy.deepcopy(optimizer.state_dict()), [p.detach().clone() for p in params]
    told = r"interrupted by an error \(RuntimeError: device lost\): .* load the last checkpoint"
    fragile.fails_at = 1
    with pytest.raises(StepInterrupted, match=told) as raised:
        train(params, optimizer, range(2, 3))
    assert raised.value.__cause__ is fragile.error
    assert [optimizer.state[p]["step"].item() for p in params] == [2, 2]
    fragile.fails_at = None
    half = [exact_value(optimizer, p) for p in params]
    copies = copy.deepcopy((params, optimizer)), pickle.loads(pickle.dumps((params, optimizer)))
    for some, of_them in ((params, optimizer), *copies):
        with pytest.raises(StepInterrupted, match=told):
            train(some, of_them, range(2, 3))
        assert all(torch.equal(exact_value(of_them, p), x) for p, x in zip(some, half, strict=True))

    with torch.no_grad():
        for p, x in zip(params, weights, strict=True):
            p.copy_(x)
    optimizer.load_state_dict(saved)
    train(params, optimizer, range(2, 4))
    wanted_params, wanted = made("reference")
    train(wanted_params, wanted, range(4))
    for p, q in zip(params, wanted_params, strict=True):
        assert torch.equal(exact_value(optimizer, p), exact_value(wanted, q))


@pytest.mark.parametrize("error", [RuntimeError("out of memory"), ValueError("no kernel"), KeyboardInterrupt()])
def test_an_error_before_anything_is_written_stays_what_it_is(error: BaseException, fragile: Fragile) -> None:
    params, optimizer = made(validate="off")
    train(params, optimizer, range(1))
    fragile.fails_at, fragile.error = 0, error
    with pytest.raises(type(error)) as raised:
        train(params, optimizer, range(1, 2))
    assert raised.value is error
    fragile.fails_at = None
    train(params, optimizer, range(1, 3))
    wanted_params, wanted = made("reference")
    train(wanted_params, wanted, range(3))
    for p, q in zip(params, wanted_params, strict=True):
        assert torch.equal(exact_value(optimizer, p), exact_value(wanted, q))


def test_no_measurements_may_be_none_and_missing_ones_are_told(fragile: Fragile) -> None:
    params, optimizer = made(validate="off")
    fragile.returns_nothing = True
    train(params, optimizer, range(2))
    collage_neuron.monitor(optimizer, every=1)
    with pytest.raises(StepInterrupted, match=r"backend 'fragile' returned 0 measurements, not 2: `run` returns one"):
        train(params, optimizer, range(2, 3))
