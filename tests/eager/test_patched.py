"""Classes whose methods are replaced after compile, and steps that call those of their base."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from as_written import Written, parameters, run, values
from torch import Tensor
from torch.optim import Optimizer

import collage_neuron


def slow(p: Tensor, g: Tensor, rate: float) -> None:
    p.sub_(g / (g.norm() + 1), alpha=rate)


def ruled() -> Any:
    """A class of its own for each test, since it is changed."""

    class Ruled(Written):
        rule: Any = functools.partial(slow, rate=0.01)

        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            assert float(g.norm()) >= 0  # no recording follows this
            type(self).rule(p, g)

    return Ruled


def moved(dtype: torch.dtype) -> list[Tensor]:
    cls, params = ruled(), parameters(dtype)
    optimizer: Optimizer = cls(params)
    if dtype is torch.bfloat16:
        optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    run(optimizer, 3)
    cls.rule = functools.partial(slow, rate=0.03)
    run(optimizer, 3, first=3)
    cls.update = lambda self, p, g, state, group: p.add_(g / (g.norm() + 1), alpha=0.02)
    run(optimizer, 3, first=6)
    del cls.update
    with pytest.raises(NotImplementedError):  # that of its base
        run(optimizer, 1)
    return values(optimizer, params) if dtype is torch.bfloat16 else [p.detach() for p in params]


def test_what_is_patched_after_compile_runs() -> None:
    for ours, plain in zip(moved(torch.bfloat16), moved(torch.float32), strict=True):
        torch.testing.assert_close(ours, plain)


def test_a_step_kept_in_a_variable_may_call_the_step_of_its_base() -> None:
    class Base(Written):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p.sub_(g / (float(g.norm()) + 1), alpha=0.01)

    class Logs(Base):
        def step(self, closure: Any = None) -> Any:
            self.steps = getattr(self, "steps", 0) + 1
            return super().step(closure)

    Base(parameters(torch.float32))  # torch hooks the step of a class when an optimizer of it is made
    params = parameters(torch.bfloat16)
    optimizer: Any = Logs(params)
    step = optimizer.step
    collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for p in params:
        p.grad = torch.ones_like(p)
    step()
    assert optimizer.steps == 1
