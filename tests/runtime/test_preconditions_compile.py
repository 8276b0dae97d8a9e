"""What `compile(optimizer)` refuses: a sentence, and nothing is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import bits, mlp, parameters
from refused_updates import refused
from torch import nn
from torch.optim import SGD, Optimizer

import collage_neuron

pytestmark = pytest.mark.usefixtures("rejecting")


def with_second_group(p: nn.Parameter, **group: Any) -> Optimizer:
    """An optimizer whose first group is fine."""
    return SGD([{"params": parameters()}, {"params": [p], **group}], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("dtype", "kind"), [(torch.complex64, "complex"), (torch.float16, "float"), (torch.float64, "float")]
)
def test_a_parameter_of_another_dtype_is_refused(dtype: torch.dtype, kind: str) -> None:
    p = nn.Parameter(torch.ones(2, 3, dtype=dtype))
    where = r"param_groups\[1\]\['params'\]\[0\]"
    what = rf"is {dtype} \({kind}\), shape \[2, 3\]"
    todo = "only bfloat16 and float32 parameters can be compiled: convert it, freeze it "
    refused(with_second_group(p), TypeError, f"{where} {what}; {todo}")


@pytest.mark.parametrize("form", ["(model, optimizer)", "(model)"])
def test_a_model_with_a_parameter_of_another_dtype_is_refused_by_its_name(form: str) -> None:
    model = mlp()
    model[2].half()
    before = [bits(p) for p in model.parameters()]
    arguments: Any = (model,) if form == "(model)" else (model, SGD(model[0].parameters()))
    with pytest.raises(TypeError, match=r"model parameter '2.weight' is torch.float16.*only bfloat16 and float32"):
        collage_neuron.compile(*arguments)
    assert all(torch.equal(bits(p), b) for p, b in zip(model.parameters(), before, strict=True))


def test_differentiable_is_refused() -> None:
    message = r"param_groups\[1\] has differentiable=True.*not defined: use differentiable=False"
    refused(with_second_group(*parameters(1, ((2,),)), differentiable=True), ValueError, message)


@pytest.mark.parametrize("tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("lr", ["nan", "inf", "-inf"])
def test_a_learning_rate_that_is_not_finite_is_refused(lr: str, tensor: bool) -> None:
    optimizer = with_second_group(*parameters(1, ((2,),)))
    optimizer.param_groups[1]["lr"] = torch.tensor(float(lr)) if tensor else float(lr)
    refused(
        optimizer, ValueError, rf"param_groups\[1\]\['lr'\] is {lr}; nothing was updated: set a finite learning rate"
    )


def test_a_learning_rate_that_is_a_text_is_refused() -> None:
    optimizer = with_second_group(*parameters(1, ((2,),)))
    optimizer.param_groups[1]["lr"] = "1e-3"
    refused(optimizer, TypeError, r"param_groups\[1\]\['lr'\] is the text '1e-3'; nothing was updated: set a number")


def test_a_group_on_two_devices_is_refused() -> None:
    group = {"params": [*parameters(), nn.Parameter(torch.ones(2, device="meta"))]}
    message = r"param_groups\[0\] has parameters on cpu and meta; .*put the parameters of each device in a group"
    refused(SGD([group], lr=0.1), ValueError, message)


def test_a_group_on_the_cpu_and_an_xla_device_is_refused(xla: torch.device) -> None:
    group = {"params": [*parameters(), nn.Parameter(torch.ones(2).to(xla))]}
    refused(SGD([group], lr=0.1), ValueError, rf"on cpu and {xla}.*put the parameters of each device in a group")


def test_a_step_that_was_replaced_by_hand_is_refused() -> None:
    optimizer: Any = SGD(parameters(), lr=0.1)
    optimizer.step = replaced = lambda closure=None: None
    refused(optimizer, TypeError, "optimizer.step of this SGD was replaced by hand.*compile first, then replace it")
    assert optimizer.step is replaced
