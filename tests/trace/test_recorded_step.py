"""torch's own elementwise classes are recorded, with any setting and any parameter; all other code is traced."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

import collage_neuron
from collage_neuron.trace.recorded_classes import is_recorded

Make = Callable[..., Any]

SHAPES = ((), (5,), (2, 3), (1,))
RTOL, ATOL = 2**-18, 2**-20
"""Of fp32 words: the order of operations differs."""


def stepped(make: Make, dtype: torch.dtype, steps: int = 8, change: Any = None) -> tuple[Any, list[torch.Tensor]]:
    """The optimizer, and the values of parameters and their own states."""
    draws = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=draws).bfloat16().to(dtype)) for shape in SHAPES]
    optimizer = make(params)
    is_ours = dtype == torch.bfloat16
    if is_ours:
        optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for t in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draws).bfloat16().to(dtype)
        if change is not None:
            change(optimizer, t)
        optimizer.step()
    read = collage_neuron.exact_value if is_ours else lambda _, p: p.detach()
    states = [x for p in params for k, x in sorted(optimizer.state[p].items()) if k != "param_master"]
    return optimizer, [*(read(optimizer, p) for p in params), *map(torch.as_tensor, states)]


def assert_right(make: Make, change: Any = None) -> Any:
    (optimizer, found), (_, exact) = (stepped(make, dtype, change=change) for dtype in (torch.bfloat16, torch.float32))
    torch.testing.assert_close(found, exact, rtol=RTOL, atol=ATOL, check_dtype=False)
    return optimizer


def test_capturable_is_put_aside() -> None:
    """On the CPU torch asserts another device: the update is that without the option."""

    def capturable(params: Any) -> Any:
        optimizer = AdamW(params)
        for group in optimizer.param_groups:
            group["capturable"] = params[0].dtype == torch.bfloat16
        return optimizer

    assert_right(capturable)


class Doubles(AdamW):
    """A subclass, of which one step in two is another one."""

    t = 0

    def step(self, closure: Any = None) -> Any:
        self.t += 1
        self.param_groups[0]["lr"] = 0.01 * (1 + self.t % 2)
        return super().step(closure)


def test_a_subclass_is_traced() -> None:
    assert not is_recorded(Doubles)
    assert assert_right(Doubles)._collage_bookkeeping.traces.kinds


def test_code_in_the_place_of_torchs_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules["torch.optim.adam"]
    monkeypatch.setattr(module, "adam", partial(_doubled, module.adam))
    assert not is_recorded(AdamW)
    assert_right(AdamW)


def _doubled(adam: Any, *args: Any, **kwargs: Any) -> None:
    adam(*args, **kwargs | {"lr": 2 * kwargs["lr"]})


def test_a_method_of_the_object_is_traced() -> None:
    def make(params: Any) -> Any:
        optimizer: Any = AdamW(params)
        init = optimizer._init_group
        optimizer._init_group = lambda group, *lists: init(group | {"amsgrad": False}, *lists)
        return optimizer

    assert not is_recorded(AdamW, make([Parameter(torch.ones(2))]))
    optimizer = assert_right(make)
    assert optimizer.state.keys() == {*optimizer.param_groups[0]["params"]}
