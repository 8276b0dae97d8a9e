"""Frozen parameters: other dtypes are left alone, and values that were rounded while frozen are not lost silently."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import bits
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron

OTHERS = (
    torch.float16, torch.float64, torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.complex64,
)  # fmt: skip

FORMS = ("beside the optimizer", "in its group", "model alone", "optimizer alone")


class Headed(nn.Module):
    """A frozen base of some dtype, and a head that is trained."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Parameter((3 * torch.randn(6, 6)).to(dtype), requires_grad=False)
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = self.base.real if self.base.is_complex() else self.base
        return self.head(x @ base.to(self.head.weight.dtype))  # type: ignore[no-any-return]


def compiled(model: Headed, form: str) -> Optimizer:
    optimizer = AdamW(model.parameters() if form != FORMS[0] else model.head.parameters(), lr=1e-2)
    if form == "model alone":
        collage_neuron.compile(model)
    elif form == "optimizer alone":
        collage_neuron.compile(optimizer)
    else:
        collage_neuron.compile(model, optimizer)
    return optimizer


def train(model: nn.Module, optimizer: Optimizer, steps: range = range(3)) -> None:
    for i in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).bfloat16()
        optimizer.zero_grad()
        model(x).float().square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", OTHERS)
def test_a_frozen_base_of_another_dtype_is_left_alone(dtype: torch.dtype, form: str) -> None:
    """The head ends with the bits that it has over the same base as a buffer, which `compile` never looks at."""
    model = Headed(dtype)
    before = model.base.detach().clone()
    optimizer = compiled(model, form)
    train(model, optimizer)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    average = collage_neuron.AveragedModel(model, optimizer, decay=0.5)
    for _ in range(2):
        average.update_parameters(model)
    assert str(dtype) not in collage_neuron.explain(optimizer)
    assert "1 tensor" not in collage_neuron.explain(optimizer)
    train(model, optimizer, range(3, 5))
    for base in (model.base, next(average.parameters())):
        assert base.dtype == dtype
        assert torch.equal(base.view(torch.uint8), before.view(torch.uint8))
    twin: Any = Headed(dtype)
    del twin.base
    twin.register_buffer("base", before)
    train(twin, collage_neuron.compile(twin, AdamW(twin.parameters(), lr=1e-2), buffers="keep")[1], range(5))
    assert torch.equal(bits(model.head.weight), bits(twin.head.weight))


def test_a_frozen_parameter_in_fp16_that_is_trained_later_is_rejected_by_the_step() -> None:
    model = Headed(torch.float16)
    optimizer = compiled(model, "in its group")
    train(model, optimizer)
    model.base.requires_grad_(True)
    before = bits(model.head.weight)
    with pytest.raises(TypeError, match=r"is torch.float16 \(float\), shape \[6, 6\]; only bfloat16 and float32"):
        train(model, optimizer)
    assert torch.equal(bits(model.head.weight), before)
