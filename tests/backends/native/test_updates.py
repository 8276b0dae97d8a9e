"""Whole updates: every optimizer of torch, numbers of all magnitudes; native code has every bit of the reference."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from natively import Beside
from running import registered
from torch import Tensor
from torch.optim import Optimizer
from torch_cases import CASES

import collage_neuron
from collage_neuron.numerics.strategies import STRATEGIES
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE

pytestmark = [
    pytest.mark.usefixtures("rejecting"),
    pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}"),
]

SETTINGS = [(s, "fp32") for s in STRATEGIES]
SETTINGS += [(s, "bf16") for s in ("bf16", "light", "plus", "full")]


@pytest.fixture
def beside() -> Iterator[Beside]:
    with registered(Beside()) as backend:
        yield backend


SHAPES = ((3, 5), (40,), (), (0, 4), (70, 3))


def parameters(shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for shape in shapes]


MAGNITUDES = torch.tensor([1e-3, 1.0, 1e-30, 1e20, 1e38, 1e-38, 1e-44, 0.0])
SPECIAL = torch.tensor([math.inf, -math.inf, math.nan, -0.0])


def gradient(shape: Sequence[int], generator: torch.Generator, special: bool) -> Tensor:
    """Numbers of all magnitudes; one in ten is none, if `special`."""

    def drawn(values: Tensor) -> Tensor:
        return values[torch.randint(0, len(values), tuple(shape), generator=generator)]

    x = torch.randn(tuple(shape), generator=generator) * drawn(MAGNITUDES)
    return torch.where(torch.rand(tuple(shape), generator=generator) < 0.1 * special, drawn(SPECIAL), x).bfloat16()


def train(optimizer: Optimizer, steps: int = 3, special: bool = True) -> None:
    generator = torch.Generator().manual_seed(1)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in range(steps):
        for p in params:
            p.grad = gradient(p.shape, generator, special and step == steps - 1)
        optimizer.step()


# Optimizers --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled(of=24)  # a setting with one optimizer, and an optimizer with one setting: one path for most pairs
@pytest.mark.parametrize(("strategy", "arithmetic"), SETTINGS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.measured])
def test_torchs_optimizers_have_all_bits_everywhere(name: str, strategy: str, arithmetic: str, beside: Beside) -> None:
    base, options, _ = CASES[name]
    settings: dict[str, Any] = {"strategy": strategy, "arithmetic": arithmetic, "validate": "off"}
    train(collage_neuron.compile(base(parameters(), **options), backend="beside", **settings))
    assert beside.updates
