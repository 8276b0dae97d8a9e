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
from traced_updates import initial, stepped_beside

from collage_neuron.trace.recorded_classes import is_recorded

Make = Callable[..., Any]


def assert_right(make: Make) -> Any:
    optimizer, found = stepped_beside(make, initial(torch.bfloat16), "fp32", 8)
    _, exact = stepped_beside(make, initial(torch.float32), None, 8)
    torch.testing.assert_close(found, exact, rtol=2**-18, atol=2**-20)  # the order of operations differs
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
