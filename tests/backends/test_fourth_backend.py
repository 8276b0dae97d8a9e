"""A backend from outside (`numpy_backend`, under 60 lines) does all that those of this project do, and nothing changes.

What it cannot do is rejected with its own reason, before anything changes.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy_backend
import pytest
import torch
from numpy_backend import NumPy
from running import registered
from sampling import part
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch_cases import CASES

import collage_neuron
from collage_neuron.cli import doctor
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.eft import sqrt
from collage_neuron.numerics.strategies import ARITHMETICS, STRATEGIES, possible
from collage_neuron.passes.backends import registry
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.ir.update import Update
from collage_neuron.runtime.rounding_probe import failures

pytestmark = pytest.mark.usefixtures("rejecting")

CPU = torch.device("cpu")
HANDWRITTEN = runpy.run_path(str(Path(__file__).parents[1] / "optimizers" / "test_handwritten.py"))
SETTINGS = [(s, "fp32") for s in STRATEGIES if "stochastic" not in s and "split" not in s]  # no operations on bits
SETTINGS += [(s, "bf16") for s, _ in SETTINGS if possible(s, "bf16")]


class Counted(NumPy):
    """Notes how many launches each step hands to it."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def run(self, launches: Sequence[Launch]) -> tuple[()]:
        self.steps.append(len(launches))
        return super().run(launches)

    def found(self) -> Iterator[Callable[[], torch.device]]:
        yield lambda: CPU


@pytest.fixture
def numpy() -> Iterator[Counted]:
    with registered(Counted()) as backend:
        yield backend


def parameters(shapes: Sequence[tuple[int, ...]] = ((3, 5), (40,), (), (0, 4))) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]


def train(optimizer: Optimizer, steps: int = 4) -> list[Tensor]:
    """The parameters and states after some steps."""
    generator = torch.Generator().manual_seed(1)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator).bfloat16()
        optimizer.step()
    return [t.detach() for p in params for t in (p, *optimizer.state[p].values()) if isinstance(t, Tensor)]


def assert_same_bits(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype
        assert torch.equal(x.nan_to_num(), y.nan_to_num())


def test_it_is_short() -> None:
    assert len(Path(numpy_backend.__file__).read_text().splitlines()) < 60


# What it does


def test_the_agreement_suite_runs_on_it_unmodified(numpy: Counted) -> None:
    """Optimizers that were written by hand, each beside itself in float64."""
    for name in part(HANDWRITTEN["CASES"], 2):
        for arithmetic in ARITHMETICS:
            numpy.steps.clear()
            HANDWRITTEN["test_it_is_near_its_float64_run"](name, "full", arithmetic)
            assert len(numpy.steps) >= 8  # a comparison takes as many


@pytest.mark.parametrize(("strategy", "arithmetic"), SETTINGS)
@pytest.mark.parametrize("name", ["adamw_amsgrad", "adadelta", "rprop", "sgd_nesterov"])
def test_training_has_the_bits_of_the_reference(name: str, strategy: str, arithmetic: str, numpy: Counted) -> None:
    base, options, _ = CASES[name]
    settings: dict[str, Any] = {"strategy": strategy, "arithmetic": arithmetic}
    found, wanted = (
        train(collage_neuron.compile(base(parameters(), **options), backend=backend, **settings))
        for backend in ("numpy", "reference")
    )
    assert_same_bits(found, wanted)


def test_auto_takes_it_where_it_suits_and_explain_names_it(numpy: Counted) -> None:
    optimizer = collage_neuron.compile(AdamW(parameters()), strategy="plus")
    assert "backend numpy" in collage_neuron.explain(optimizer)
    train(optimizer, 1)
    assert numpy.steps
    assert registry.choose("auto", torch.device("meta")).name == "reference"


def test_a_step_is_handed_to_it_as_a_whole(numpy: Counted) -> None:
    """Two groups with numbers of their own are two launches of one step; validation takes steps of its own."""
    groups: list[dict[str, Any]] = [{"params": parameters()}, {"params": parameters(), "lr": 0.1}]
    optimizer = collage_neuron.compile(AdamW(groups), strategy="plus", validate="off")
    numpy.steps.clear()  # the probe
    train(optimizer, 3)
    assert numpy.steps == [2, 2, 2]


def test_the_probe_and_the_doctor_ask_it(numpy: Counted) -> None:
    assert failures(numpy, CPU) == []
    (row,) = (row for row in doctor.probes() if row[0] == "numpy on cpu")
    assert row[2] == "ok"


# What it cannot do


def rejected(error: type[Exception], message: str, **settings: Any) -> None:
    """`compile` raises, and changes nothing."""
    model = torch.nn.Linear(2, 2)
    optimizer = AdamW(model.parameters())
    with pytest.raises(error, match=message):
        collage_neuron.compile(model, optimizer, **settings)
    assert (type(optimizer), model.weight.dtype) == (AdamW, torch.float32)


def test_what_it_cannot_draw_is_rejected(numpy: Counted) -> None:
    """`auto` would take it too, so that the remedy is another one."""
    message = r"backend 'numpy' does not store stochastically yet; use backend='(native|reference)'"
    for backend in ("numpy", "auto"):
        rejected(UnsupportedUpdate, message, strategy="stochastic", backend=backend)


class NoRoots(NumPy):
    """Has no square root."""

    name = "no roots"

    def supports(self, update: Update) -> str | None:
        if any(node.target is sqrt for node in update.graph.graph.nodes):
            return "no roots here; use backend='reference'"
        return super().supports(update)


def test_its_own_reason_is_what_the_user_reads() -> None:
    with registered(NoRoots()):
        rejected(UnsupportedUpdate, "be compiled: no roots here; use backend='reference'$", backend="no roots")
        train(collage_neuron.compile(SGD(parameters(), lr=0.1), strategy="plus", backend="no roots"))
        optimizer = collage_neuron.compile(AdamW(parameters()), strategy="plus", backend="reference")
        optimizer.param_groups[0]["collage_backend"] = "no roots"
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        with pytest.raises(UnsupportedUpdate, match="no roots here"):
            train(optimizer)
        assert_same_bits(before, [p.detach() for p in optimizer.param_groups[0]["params"]])


def test_a_device_that_it_does_not_serve_is_rejected(numpy: Counted, xla: torch.device) -> None:
    with pytest.raises(ValueError, match=r"backend='numpy' does not run on xla .*on xla:0; use backend='auto'"):
        registry.choose("numpy", xla)
    assert registry.choose("auto", xla).name == "xla"


# The registry


@pytest.mark.parametrize("name", ["auto", "reference", "native", "xla", "nki", "numpy"])
def test_a_name_is_taken_once(name: str, numpy: Counted) -> None:
    other = NumPy()
    other.name = name
    with pytest.raises(ValueError, match=f"there is a backend '{name}' already; choose another name"):
        registry.register(other)
    assert registry.get("numpy") is numpy


def test_what_is_not_a_backend_is_rejected() -> None:
    wrong: Any = object()
    with pytest.raises(TypeError, match=r"object is not a backend; derive it from .*protocol\.Backend"):
        registry.register(wrong)


def test_a_backend_that_is_gone_is_unknown() -> None:
    registry.register(NumPy())
    assert registry.names() == ("reference", "native", "xla", "nki", "numpy")
    registry.unregister("numpy")
    known = "reference, native, xla, nki"
    with pytest.raises(ValueError, match=f"unknown backend 'numpy'; choose auto, {known}"):
        registry.get("numpy")
    with pytest.raises(ValueError, match="no backend 'numpy' was registered; registered are: none"):
        registry.unregister("numpy")
