"""Every NaN stays one when it is rounded, whatever bits it has."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import collage_neuron
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}")

BF16 = torch.tensor([sign << 15 | 0x7F80 | payload for sign in (0, 1) for payload in range(1, 0x80)])
FP32 = torch.tensor(
    [sign << 31 | 0x7F800000 | payload for sign in (0, 1) for payload in (1, 0x8000, 0xFFFF, 0x7F8000, 0x7FFFFF)]
)
OF = {
    torch.bfloat16: BF16.to(torch.int16).view(torch.bfloat16),
    torch.float32: FP32.to(torch.int32).view(torch.float32),
}
"""Every NaN of bf16; of fp32 those that a carry out of the last half would make infinite, or -0."""


def stepped(values: Tensor, backend: str, strategy: str, place: str) -> Mapping[str, Tensor]:
    """The words after a step in which the gradient, or the state of that name, has these values."""
    torch.manual_seed(0)
    param = torch.nn.Parameter(torch.randn(values.shape).bfloat16())
    optimizer: Any = torch.optim.AdamW([param], lr=1e-2)
    optimizer = collage_neuron.compile(optimizer, strategy=strategy, backend=backend, validate="off")
    param.grad = torch.randn(values.shape).bfloat16()
    optimizer.step()
    (param.grad if place == "grad" else optimizer.state[param][place]).copy_(values)
    optimizer.step()
    return {"param": param.detach(), **{k: v for k, v in optimizer.state[param].items() if k != "step"}}


def changed(strategy: str, place: str) -> list[str]:
    """The words in which a NaN is no longer one, or another number has become one."""
    given = OF[torch.float32 if place != "grad" and strategy == "fp32_states" else torch.bfloat16].repeat(5)
    found, wanted = (stepped(given, backend, strategy, place) for backend in ("native", "reference"))
    assert wanted["param"].isnan().all()
    return [name for name, x in wanted.items() if not torch.equal(found[name].isnan(), x.isnan())]


@pytest.mark.parametrize("strategy", ["bf16", "light", "plus", "fp32_states", "split433", "stochastic"])
@pytest.mark.parametrize("place", ["grad", "exp_avg", "exp_avg_sq"])
def test_every_nan_stays_one(strategy: str, place: str) -> None:
    assert changed(strategy, place) == []


@pytest.mark.parametrize("strategy", ["plus", "split444", "split433"])
def test_words_beside_a_nan_say_nothing(strategy: str) -> None:
    """Of weights: every NaN of bf16, beside the ends of what the other word can hold (docs/development/formats.md)."""
    high = OF[torch.bfloat16].repeat(4)
    param = torch.nn.Parameter(torch.ones_like(high))
    optimizer: Any = torch.optim.SGD([param], lr=1e-2)
    optimizer = collage_neuron.compile(optimizer, strategy=strategy, backend="native", validate="off")
    param.grad = torch.ones_like(high)
    optimizer.step()
    low = optimizer.state[param]["param_lo"]
    ends = (3e38, -3e38) if low.is_floating_point() else (torch.iinfo(low.dtype).min, torch.iinfo(low.dtype).max)
    with torch.no_grad():
        param.copy_(high)
        low[::2], low[1::2] = ends
    optimizer.step()
    assert param.isnan().all()
