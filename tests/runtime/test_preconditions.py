"""What `compile` rejects of environments, settings and arguments: a sentence says what and where; nothing changes."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import bits, mlp, parameters
from refused_updates import refused
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron import UnsafeEnvironment
from collage_neuron.passes.backends.registry import choose

pytestmark = pytest.mark.usefixtures("rejecting")


# --- what cannot work is refused with a sentence that says what, where and what to do, and a refusal changes nothing --

UNSAFE = [
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1", r"stochastic.*destroys error-free transforms; set it to 0"),
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "true", r"stochastic.*set it to 0"),
    ("XLA_USE_BF16", "1", r"every fp32 value into bf16, the optimizer's included; unset it and use model.to"),
    ("XLA_USE_BF16", "True", r"unset it"),
    ("XLA_USE_BF16", "2", r"unset it"),  # as torch_xla reads it
    ("XLA_DOWNCAST_BF16", "1", r"every fp32 value into bf16.*unset it"),
    ("NEURON_CC_FLAGS", "--auto-cast=all", r"--auto-cast \(all\).*narrower format; use --auto-cast=none"),
    ("NEURON_CC_FLAGS", "-O1 --auto-cast all --model-type transformer", r"use --auto-cast=none"),
    ("NEURON_CC_FLAGS", "--auto-cast=none --auto-cast=all", r"use --auto-cast=none"),
    ("NEURON_CC_FLAGS", "--auto-cast=all --tag='open", r"use --auto-cast=none"),
]

SAFE = [
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0"),
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", ""),
    ("XLA_USE_BF16", "0"),
    ("XLA_DOWNCAST_BF16", "false"),
    ("NEURON_CC_FLAGS", "--auto-cast=none"),
    ("NEURON_CC_FLAGS", "--auto-cast=matmult"),
    ("NEURON_CC_FLAGS", "--auto-cast=all --auto-cast none"),
    ("NEURON_CC_FLAGS", "--auto-cast"),  # neuronx-cc itself refuses this
    ("NEURON_CC_FLAGS", "--auto-cast-type=bf16"),
    ("NEURON_CC_FLAGS", "--tag='open"),
    ("NEURON_CC_FLAGS", "--cache_dir='/a path/all' --retry_failed_compilation"),
]

FORMS: dict[str, Callable[[], Any]] = {
    "(model, optimizer)": lambda: collage_neuron.compile((model := mlp()), AdamW(model.parameters())),
    "(optimizer)": lambda: collage_neuron.compile(AdamW(mlp().parameters())),
    "(OptimizerClass)": lambda: collage_neuron.compile(AdamW),
    "(model)": lambda: collage_neuron.compile(mlp()),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("variable", "value", "message"), UNSAFE)
def test_an_environment_that_loses_roundings_is_refused_by_every_form(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str, form: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(UnsafeEnvironment, match=f"{variable}.*{message}"):
        FORMS[form]()


@pytest.mark.parametrize(("variable", "value"), SAFE)
def test_other_values_are_let_through(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setenv(variable, value)
    FORMS["(optimizer)"]()


def test_an_unsafe_environment_leaves_the_model_and_the_optimizer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_USE_BF16", "1")
    model = mlp()
    optimizer = AdamW(model.parameters())
    with pytest.raises(UnsafeEnvironment):
        collage_neuron.compile(model, optimizer)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert type(optimizer) is AdamW


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"strategy": "pluss"}, r"unknown strategy 'pluss'; choose one of bf16, light, plus, full, fp32, fp32_states"),
    ({"strategy": {"param": "bf17"}}, r"unknown storage format 'bf17'; known formats: bf16, bf16_stochastic, bf16x2"),
    ({"strategy": {"*": "fp8"}}, r"unknown storage format 'fp8'"),
    ({"arithmetic": "fp16"}, r"unknown arithmetic 'fp16'; choose one of fp32, bf16"),
    ({"backend": "cuda"}, r"unknown backend 'cuda'; choose auto, reference, native, xla"),
    ({"strategy": "fp32", "arithmetic": "bf16"}, r"strategy 'fp32' stores bf16\+fp32.*use arithmetic='fp32' with it"),
    ({"strategy": "fp32_states", "arithmetic": "bf16"}, r"'fp32_states' stores fp32.*use arithmetic='fp32' with it"),
    ({"strategy": {"exp_avg": "fp32"}, "arithmetic": "bf16"}, r"stores fp32.*use arithmetic='fp32' with it"),
    ({"strategy": {"*": None}}, r"unknown storage format None; known formats: bf16, bf16_stochastic, bf16x2"),
    ({"strategy": {"param": "fp32", "*": "bf16"}}, r"`param` as fp32, which would make the model .*as bf16\+fp32"),
    ({"strategy": {"*": "fp32"}}, r"`param` as fp32.*`\*` counts for `param` too"),
]


@pytest.mark.parametrize("strategy", [["plus"], {"param"}, 3])
def test_what_is_no_strategy_at_all_is_refused(strategy: Any) -> None:
    with pytest.raises(TypeError, match=rf"strategy is {re.escape(repr(strategy))}; give one of bf16, light, plus"):
        collage_neuron.compile(mlp(), strategy=strategy)


@pytest.mark.parametrize("target", ["(optimizer)", "(OptimizerClass)", "(model)"])
@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_settings_that_cannot_work_are_refused_by_forms(settings: dict[str, Any], message: str, target: str) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    targets: dict[str, Any] = {"(optimizer)": optimizer, "(OptimizerClass)": AdamW, "(model)": model}
    with pytest.raises(ValueError, match=message):
        collage_neuron.compile(targets[target], **settings)
    assert type(optimizer) is AdamW
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not [key for key in optimizer.param_groups[0] if key.startswith("collage_")]


def test_a_group_with_settings_that_cannot_work_is_refused_and_nothing_is_split() -> None:
    params = parameters()
    groups: list[dict[str, Any]] = [{"params": params[:1]}, {"params": params[1:], "collage_strategy": "pluss"}]
    optimizer = AdamW(groups)
    refused(optimizer, ValueError, "unknown strategy 'pluss'")


def test_the_xla_backend_needs_parameters_on_an_xla_device() -> None:
    with pytest.raises(ValueError, match=r"backend='xla' needs parameters on an XLA device.*cpu; use backend='auto'"):
        choose("xla", torch.device("cpu"))
    refused(AdamW(parameters()), ValueError, "backend='xla' needs", backend="xla")


IN_A_LIST = r"Sequential and list; .*compile\(model, optimizer\) for the last"
NEITHER: list[tuple[Callable[[Any], tuple[Any, ...]], str]] = [
    *((lambda model, x=x: (x,), f"{type(x).__name__}; pass a") for x in (3, "adamw", nn.Linear, torch.zeros(2))),
    (lambda model: (None,), "None; pass a model and its optimizer, an optimizer, an"),
    *(
        (lambda model, x=x: (model, x), f"Sequential and {type(x).__name__}; pass a")
        for x in (3, AdamW, nn.Linear(1, 1))
    ),
    (lambda model: (AdamW(model.parameters()), model), "AdamW and Sequential; pass a model and its optimizer"),
    (lambda model: (model, [AdamW(layer.parameters()) for layer in (model[0], model[2])]), IN_A_LIST),
]


@pytest.mark.parametrize(("arguments", "words"), NEITHER)
def test_what_is_neither_model_nor_optimizer_is_refused_by_its_type(arguments: Any, words: str) -> None:
    with pytest.raises(TypeError, match=f"cannot compile {words}"):
        collage_neuron.compile(*arguments(mlp()))


def test_an_optimizer_of_another_model_is_refused_and_both_stay_as_they_were() -> None:
    model, other = mlp(), mlp()
    optimizer = AdamW(other.parameters())
    with pytest.raises(ValueError, match="this AdamW holds no parameter of this Sequential: was it built for another"):
        collage_neuron.compile(model, optimizer)
    assert {p.dtype for m in (model, other) for p in m.parameters()} == {torch.float32}
    assert type(optimizer) is AdamW


def test_an_optimizer_of_a_part_of_the_model_rounds_the_rest_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = mlp()
    collage_neuron.compile(model, AdamW(model[2].parameters()))
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "0.weight and 3 others of this Sequential become bf16, but the optimizer" in record.getMessage()
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# --- what `compile(optimizer)` refuses: a sentence, and nothing is changed --------------------------------------------

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


def test_a_step_that_was_replaced_by_hand_is_refused() -> None:
    optimizer: Any = SGD(parameters(), lr=0.1)
    optimizer.step = replaced = lambda closure=None: None
    refused(optimizer, TypeError, "optimizer.step of this SGD was replaced by hand.*compile first, then replace it")
    assert optimizer.step is replaced
