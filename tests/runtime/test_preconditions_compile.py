"""What `compile(optimizer)` refuses: a sentence, and nothing is changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import bits, mlp, parameters
from refused_updates import refused
from torch import nn
from torch.optim import SGD, Optimizer

import collage_neuron

pytestmark = pytest.mark.usefixtures("rejecting")


Case = tuple[Callable[[], Optimizer], type[Exception], str]


def with_second_group(p: nn.Parameter | None = None, **group: Any) -> Optimizer:
    """An optimizer whose first group is fine."""
    second = parameters(1, ((2,),)) if p is None else [p]
    optimizer = SGD([{"params": parameters()}, {"params": second}], lr=0.1, momentum=0.9)
    optimizer.param_groups[1].update(group)
    return optimizer


def another_dtype(dtype: torch.dtype, kind: str) -> Case:
    where = rf"param_groups\[1\]\['params'\]\[0\] is {dtype} \({kind}\), shape \[2, 3\]; "
    todo = "only bfloat16 and float32 parameters can be compiled: convert it, freeze it "
    return lambda: with_second_group(nn.Parameter(torch.ones(2, 3, dtype=dtype))), TypeError, where + todo


def rate(lr: Any, error: type[Exception] = ValueError, said: str = "") -> Case:
    said = said or f"{float(lr)}; nothing was updated: set a finite learning rate"
    return lambda: with_second_group(lr=lr), error, rf"param_groups\[1\]\['lr'\] is {said}"


def on_devices(device: Any) -> Optimizer:
    return SGD([{"params": [*parameters(), nn.Parameter(torch.ones(2).to(device))]}], lr=0.1)


REFUSED: dict[str, Case] = {
    "complex": another_dtype(torch.complex64, "complex"),
    "half": another_dtype(torch.float16, "float"),
    "double": another_dtype(torch.float64, "float"),
    "differentiable": (
        lambda: with_second_group(differentiable=True),
        ValueError,
        r"param_groups\[1\] has differentiable=True.*not defined: use differentiable=False",
    ),
    **{f"lr {x}": rate(float(x)) for x in ("nan", "inf", "-inf")},
    **{f"lr {x}, tensor": rate(torch.tensor(float(x))) for x in ("nan", "inf", "-inf")},
    "lr text": rate("1e-3", TypeError, "the text '1e-3'; nothing was updated: set a number"),
    "two devices": (
        lambda: on_devices("meta"),
        ValueError,
        r"param_groups\[0\] has parameters on cpu and meta; .*put the parameters of each device in a group",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_group_can_have_is_refused(name: str) -> None:
    make, error, message = REFUSED[name]
    refused(make(), error, message)


@pytest.mark.parametrize("form", ["(model, optimizer)", "(model)"])
def test_a_model_with_a_parameter_of_another_dtype_is_refused_by_its_name(form: str) -> None:
    model = mlp()
    model[2].half()
    before = [bits(p) for p in model.parameters()]
    arguments: Any = (model,) if form == "(model)" else (model, SGD(model[0].parameters()))
    with pytest.raises(TypeError, match=r"model parameter '2.weight' is torch.float16.*only bfloat16 and float32"):
        collage_neuron.compile(*arguments)
    assert all(torch.equal(bits(p), b) for p, b in zip(model.parameters(), before, strict=True))


def test_a_group_on_the_cpu_and_an_xla_device_is_refused(xla: torch.device) -> None:
    refused(on_devices(xla), ValueError, rf"on cpu and {xla}.*put the parameters of each device in a group")


def test_a_step_that_was_replaced_by_hand_is_refused() -> None:
    optimizer: Any = SGD(parameters(), lr=0.1)
    optimizer.step = replaced = lambda closure=None: None
    refused(optimizer, TypeError, "optimizer.step of this SGD was replaced by hand.*compile first, then replace it")
    assert optimizer.step is replaced
