"""Frozen parameters: other dtypes are left alone, and values that were rounded while frozen are not lost silently."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import bits
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import RoundedWeights

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


# --- frozen at compile, trained later ---------------------------------------------------------------------------------

LATER: dict[str, Callable[[Any, Any], Any]] = {
    "a group": lambda model, optimizer: optimizer.add_param_group({"params": [*model[0].parameters()]}),
    "an optimizer": lambda model, optimizer: collage_neuron.compile(AdamW(model[0].parameters(), lr=1e-4)),
    "both again": lambda model, optimizer: collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-4))[1],
}


def half_frozen(form: str, **settings: Any) -> tuple[Any, Optimizer, list[torch.Tensor]]:
    """A model whose first layer, near 1, is frozen at compile; and the fp32 values of that layer."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1))
    nn.init.uniform_(model[0].weight, 0.5, 2)
    model[0].requires_grad_(False)
    values = [p.detach().clone() for p in model[0].parameters()]
    optimizer = AdamW(model[1].parameters(), lr=1e-4)
    if form == "model alone":
        collage_neuron.compile(model, **settings)
    else:
        collage_neuron.compile(model, optimizer, **settings)
    train(model, optimizer)
    model[0].requires_grad_(True)
    return model, optimizer, values


def six_steps(model: nn.Module, optimizer: Optimizer, values: list[torch.Tensor]) -> float:
    """How far the first layer is from six steps of float64 on the same gradients, relative to these steps."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.shape in ((6, 6), (6,))]
    wide = [nn.Parameter(v.double()) for v in values]
    plain = AdamW(wide, lr=1e-4)
    for i in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 6, generator=torch.Generator().manual_seed(i)).bfloat16()).float().sum().backward()
        for p, q in zip(params, wide, strict=True):
            q.grad = None if p.grad is None else p.grad.double()
        optimizer.step()
        plain.step()
    found = [collage_neuron.exact_value(optimizer, p).double() for p in params]
    with torch.no_grad():
        off = sum(float((f - w).square().sum()) for f, w in zip(found, wide, strict=True))
        way = sum(float((w - v).square().sum()) for w, v in zip(wide, values, strict=True))
    return math.sqrt(off / way)


@pytest.mark.parametrize("later", LATER)
def test_weights_that_were_rounded_while_frozen_are_named_when_an_optimizer_gets_them(later: str) -> None:
    model, optimizer, values = half_frozen("both")
    with pytest.warns(RoundedWeights, match=r"param_groups\[\d\] has '0.weight' and 1 other .*were frozen") as told:
        optimizer = LATER[later](model, optimizer) or optimizer
    assert len(told) == 1
    for p, value in zip(model[0].parameters(), values, strict=True):
        collage_neuron.set_exact_value(optimizer, p, value)  # what the warning says
    collage_neuron.compile(optimizer)  # says nothing more
    assert six_steps(model, optimizer, values) < 2**-8


@pytest.mark.parametrize("later", ["a group", "an optimizer"])
def test_a_model_that_is_compiled_alone_keeps_the_values_of_frozen_weights(later: str) -> None:
    model, optimizer, values = half_frozen("model alone")
    optimizer = LATER[later](model, optimizer) or optimizer
    for p, value in zip(model[0].parameters(), values, strict=True):
        assert torch.allclose(collage_neuron.exact_value(optimizer, p), value, rtol=2**-22, atol=0)
    assert six_steps(model, optimizer, values) < 2**-8


def test_frozen_weights_that_stay_fp32_are_trained_from_their_values() -> None:
    model, optimizer, values = half_frozen("both", keep_fp32=["0"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        LATER["a group"](model, optimizer)
    assert six_steps(model, optimizer, values) < 2**-8


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_an_optimizer_whose_steps_look_at_shapes_is_described(frozen: str) -> None:
    """Adafactor's update of a matrix has rows and columns, which a frozen vector does not have."""
    model = nn.Linear(9, 7)
    model.get_parameter(frozen).requires_grad_(False)
    model, optimizer = collage_neuron.compile(model, torch.optim.Adafactor(model.parameters()), verbose=False)
    model(torch.ones(4, 9, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    assert "split433" in collage_neuron.explain(optimizer)
    assert collage_neuron.bytes_per_parameter(optimizer) == pytest.approx(6 + 4 * 16 / 63 if frozen == "bias" else 9.0)
