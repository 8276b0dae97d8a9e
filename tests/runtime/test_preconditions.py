"""What cannot work is refused with a sentence that says what, where and what to do, and a refusal changes nothing."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import bits, differences, mlp, parameters, set_gradients, snapshot
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, AdamW, Muon, Optimizer, SparseAdam

import collage_neuron
from collage_neuron import UnsafeEnvironment, UnsupportedUpdate
from collage_neuron.passes.backends.registry import choose
from collage_neuron.runtime.preconditions import auto_cast, check_environment, check_gradient, environment_findings

pytestmark = pytest.mark.usefixtures("rejecting")

# --- the environment ------------------------------------------------------------------------------------------------

UNSAFE = [
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "1", r"stochastic.*destroys error-free transforms; set it to 0"),
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "true", r"stochastic.*set it to 0"),
    ("XLA_USE_BF16", "1", r"every fp32 value into bf16, the optimizer's included; unset it and use model.to"),
    ("XLA_USE_BF16", "True", r"unset it"),
    ("XLA_DOWNCAST_BF16", "1", r"every fp32 value into bf16.*unset it"),
    ("NEURON_CC_FLAGS", "--auto-cast=all", r"--auto-cast \(all\).*narrower format; use --auto-cast=none"),
    ("NEURON_CC_FLAGS", "-O1 --auto-cast all --model-type transformer", r"use --auto-cast=none"),
    ("NEURON_CC_FLAGS", "--auto-cast=none --auto-cast=all", r"use --auto-cast=none"),
]

SAFE = [
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", "0"),
    ("NEURON_RT_STOCHASTIC_ROUNDING_EN", ""),
    ("XLA_USE_BF16", "0"),
    ("XLA_DOWNCAST_BF16", "false"),
    ("NEURON_CC_FLAGS", "--auto-cast=none"),
    ("NEURON_CC_FLAGS", "--auto-cast=matmult"),
    ("NEURON_CC_FLAGS", "--auto-cast=all --auto-cast none"),
    ("NEURON_CC_FLAGS", "--auto-cast-type=bf16"),
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


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("", "none"),
        ("-O1", "none"),
        ("--auto-cast=all", "all"),
        ("--auto-cast all", "all"),
        ("--auto-cast all --auto-cast=none", "none"),
        ("--auto-cast none -O2 --auto-cast all", "all"),
        ("--auto-cast", "none"),  # neuronx-cc itself refuses this
    ],
)
def test_the_rightmost_auto_cast_counts_in_both_spellings(flags: str, value: str) -> None:
    assert auto_cast(flags) == value


def test_every_finding_of_a_safe_environment_is_without_a_problem() -> None:
    assert [f.problem for f in environment_findings({})] == [None] * 4
    check_environment({})


# --- settings -------------------------------------------------------------------------------------------------------

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
def test_settings_that_cannot_work_are_refused_by_every_form(
    settings: dict[str, Any], message: str, target: str
) -> None:
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


@pytest.mark.parametrize("target", [3, "adamw", None, nn.Linear, torch.zeros(2)])
def test_what_is_neither_model_nor_optimizer_is_refused_by_its_type(target: Any) -> None:
    name = "None" if target is None else type(target).__name__
    with pytest.raises(TypeError, match=f"cannot compile {name}; pass a model and its optimizer, an optimizer, an"):
        collage_neuron.compile(target)


@pytest.mark.parametrize("optimizer", [3, AdamW, nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_refused_beside_a_model(optimizer: Any) -> None:
    with pytest.raises(TypeError, match=f"cannot compile Sequential and {type(optimizer).__name__}; pass a model and"):
        collage_neuron.compile(mlp(), optimizer)


def test_model_and_optimizer_in_the_wrong_order_are_refused() -> None:
    model = mlp()
    arguments: Any = (AdamW(model.parameters()), model)
    with pytest.raises(TypeError, match="cannot compile AdamW and Sequential; pass a model and its optimizer"):
        collage_neuron.compile(*arguments)


def test_an_optimizer_of_another_model_is_refused_and_both_stay_as_they_were() -> None:
    model, other = mlp(), mlp()
    optimizer = AdamW(other.parameters())
    with pytest.raises(ValueError, match="this AdamW holds no parameter of this Sequential: was it built for another"):
        collage_neuron.compile(model, optimizer)
    assert {p.dtype for m in (model, other) for p in m.parameters()} == {torch.float32}
    assert type(optimizer) is AdamW


def test_an_optimizer_of_a_part_of_the_model_is_not_refused() -> None:
    model = mlp()
    collage_neuron.compile(model, AdamW(model[2].parameters()))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


# --- refusals of compile(optimizer) ---------------------------------------------------------------------------------


def refused(optimizer: Optimizer, error: type[Exception], message: str, **settings: Any) -> None:
    """`compile(optimizer)` raises, and leaves the optimizer, its groups, parameters and states as they were."""
    kind, before = type(optimizer), snapshot(optimizer)
    dtypes = [p.dtype for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(error, match=message):
        collage_neuron.compile(optimizer, **settings)
    assert type(optimizer) is kind
    assert differences(snapshot(optimizer), before) == []
    assert [p.dtype for group in optimizer.param_groups for p in group["params"]] == dtypes


def with_second_group(p: nn.Parameter, **group: Any) -> Optimizer:
    """An optimizer whose first group is fine."""
    return SGD([{"params": parameters()}, {"params": [p], **group}], lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        (torch.complex64, "complex"),
        (torch.float16, "float"),
        (torch.float64, "float"),
        (torch.int32, "not floating-point"),
        (torch.bool, "not floating-point"),
    ],
)
def test_a_parameter_of_another_dtype_is_refused(dtype: torch.dtype, kind: str) -> None:
    p = nn.Parameter(torch.ones(2, 3, dtype=dtype), requires_grad=False)
    where = r"param_groups\[1\]\['params'\]\[0\]"
    what = rf"is {dtype} \({kind}\), shape \[2, 3\]"
    todo = "only bfloat16 and float32 parameters can be compiled: convert it, or leave it to an optimizer of its own"
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


# --- updates that cannot be rewritten -------------------------------------------------------------------------------


class Acts(Optimizer):
    """SGD with momentum and a step count; before it updates a parameter it does what the group's `act` says."""

    def __init__(self, params: Any, act: Callable[[torch.Tensor], Any], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "act": act})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["momentum"] = 0, torch.zeros_like(p)
                state["step"] += 1
                group["act"](p)
                state["momentum"].mul_(0.9).add_(p.grad)
                p.add_(state["momentum"], alpha=-group["lr"])


def nothing(p: torch.Tensor) -> None:
    """Acts with this is an ordinary optimizer."""


def grad(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


stranger = torch.ones(8, 8, device="meta")

NOT_ELEMENTWISE = r"the update is not elementwise: aten.{}.* turns the parameter's shape \[8, 8\] into .*leave it unc"
READS = r"the update reads a tensor's value back into Python \(.item\(\).*leave it uncompiled"
NO_RULE = (
    r"the update uses aten.{}.* \(node .*\), which has no rule; write .*"
    r"keys of collage_neuron.passes.rewrite.rules.RULES"
)
BY_INDEX = r"writes to some elements by index; only x\[mask\] = number is elementwise"
CANNOT = r"Acts.step\(\) cannot be captured: .*raised {}"

UNSUPPORTED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "norm": (lambda p: p.div_(grad(p).norm()), NOT_ELEMENTWISE.format("linalg_vector_norm")),
    "mean": (lambda p: p.sub_(grad(p).mean()), NOT_ELEMENTWISE.format("mean")),
    "row mean": (lambda p: p.sub_(grad(p).mean(0, keepdim=True)), NOT_ELEMENTWISE.format("mean")),
    "row": (lambda p: p[0].add_(1.0), NOT_ELEMENTWISE.format("select")),
    "reshape": (lambda p: p.view(-1).add_(1.0), NOT_ELEMENTWISE.format("view")),
    "matrix product": (lambda p: p.add_(grad(p)[:4].T @ grad(p)[:4]), NOT_ELEMENTWISE.format("slice")),
    "item": (lambda p: p.mul_(grad(p)[0, 0].item()), READS),
    "float": (lambda p: p.mul_(float(grad(p).sum())), READS),
    "branch": (lambda p: p.mul_(2.0) if (grad(p) > 0).any() else None, READS),
    "isnan": (lambda p: torch.isnan(grad(p)).any().item(), READS),
    "square product": (lambda p: p.copy_(p @ grad(p)), NO_RULE.format("mm")),
    "cumulative sum": (lambda p: p.copy_(grad(p).cumsum(0)), NO_RULE.format("cumsum")),
    "softmax": (lambda p: p.copy_(grad(p).softmax(0)), NO_RULE.format("_softmax")),
    "noise": (lambda p: p.add_(torch.randn_like(p)), NO_RULE.format("randn_like")),
    "erf": (lambda p: p.copy_(torch.erf(p)), NO_RULE.format("erf")),
    "integers": (lambda p: p.add_(grad(p).int()), r"converts a tensor to torch.int32; only floating-point updates"),
    "two indices": (lambda p: p.index_put_((grad(p) > 0, grad(p) < 0), torch.tensor(0.0)), BY_INDEX),
    "integer index": (lambda p: p.index_put_((torch.tensor([0]),), torch.tensor(0.0)), BY_INDEX),
    "transposed": (lambda p: p.t().add_(1.0), "writes to a part of a tensor; only elementwise updates can be rewr"),
    "other tensor": (
        lambda p: p.add_(torch.ones(8)),
        r"combines the parameter with another tensor of shape \(8,\) that is neither its gradient nor a state",
    ),
    "stranger": (
        lambda p: p.add_(stranger),
        r"reads a tensor that is neither the parameter, its gradient, nor one of its states; keep it in optimizer.st",
    ),
    "several outputs": (
        lambda p: torch.frexp(p, out=(torch.empty_like(p), torch.empty_like(p, dtype=torch.int32))),
        r"calls aten.frexp.Tensor_out, which writes to several tensors at once; use plain operations",
    ),
    "equal": (lambda p: torch.equal(p, grad(p)), CANNOT.format("NotImplementedError")),
    "to the host": (lambda p: grad(p).cpu(), CANNOT.format("NotImplementedError")),
    "numpy": (lambda p: grad(p).numpy(), CANNOT.format("TypeError")),
    "indices": (lambda p: grad(p).nonzero(), CANNOT.format("NotImplementedError")),
    "its own error": (lambda p: 1 / 0, CANNOT.format("ZeroDivisionError: division by zero")),
}


def matrices(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    params = parameters(0, ((8, 8), (8, 8)), dtype)
    set_gradients(params, 0)
    return params


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_an_update_that_cannot_be_rewritten_is_refused(name: str) -> None:
    act, message = UNSUPPORTED[name]
    refused(Acts(matrices(), act), UnsupportedUpdate, message)


@pytest.mark.parametrize("name", ["norm", "item", "erf"])
@pytest.mark.parametrize("form", ["(model)", "(OptimizerClass)"])
def test_the_forms_without_an_optimizer_refuse_it_at_the_first_step(name: str, form: str) -> None:
    act, message = UNSUPPORTED[name]
    model = nn.Linear(8, 8, bias=False)
    if form == "(model)":
        optimizer: Optimizer = Acts(collage_neuron.compile(model).parameters(), act)
    else:
        optimizer = collage_neuron.compile(Acts)(model.bfloat16().parameters(), act)
    set_gradients(list(model.parameters()), 0)
    step_is_refused(optimizer, UnsupportedUpdate, message)


def test_a_model_whose_optimizer_is_refused_stays_fp32() -> None:
    model = nn.Linear(8, 8, bias=False)
    with pytest.raises(UnsupportedUpdate):
        collage_neuron.compile(model, Acts(model.parameters(), UNSUPPORTED["norm"][0]))
    assert model.weight.dtype == torch.float32


TORCH: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "Adafactor": (Adafactor, READS),
    "Muon": (Muon, NOT_ELEMENTWISE.format("linalg_vector_norm")),
    "LBFGS": (LBFGS, r"LBFGS.step\(\) cannot be captured: .*without a closure.*TypeError: .*'closure'"),
    "SparseAdam": (SparseAdam, r"SparseAdam.step\(\) cannot be captured: .*does not support dense gradients"),
}


@pytest.mark.parametrize("name", TORCH)
def test_optimizers_of_torch_that_are_not_elementwise_are_refused(name: str) -> None:
    make, message = TORCH[name]
    refused(make(matrices()), UnsupportedUpdate, message)


@pytest.mark.parametrize("name", ["erf", "norm", "item"])
def test_a_refusal_is_one_sentence_and_not_a_traceback(name: str) -> None:
    with pytest.raises(UnsupportedUpdate) as caught:
        collage_neuron.compile(Acts(matrices(), UNSUPPORTED[name][0]))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_a_refusal_names_the_optimizer(name: str) -> None:
    with pytest.raises(UnsupportedUpdate, match=name):
        collage_neuron.compile(TORCH[name][0](matrices()))


class Calls(Optimizer):
    """Its step calls `act` with the optimizer and the parameter."""

    def __init__(self, params: Any, act: Callable[[Optimizer, torch.Tensor], Any]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.act, self.rates = act, {id(p): 0.1 for group in self.param_groups for p in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.act(self, p)


class AfterANorm(SGD):
    """Steps as its base does, scaled."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            grad(p).div_(grad(p).norm())  # AfterANorm
        super().step()


NOT_SPLIT = r"clip \(torch.nn.utils.clip_grad_norm_\) and log outside step\(\)"

POINTED: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "norm": (
        lambda params: Calls(params, lambda o, p: p.div_(grad(p).norm())),  # norm
        NOT_SPLIT,
    ),
    "clipping": (
        lambda params: Calls(params, lambda o, p: nn.utils.clip_grad_norm_([p], 1.0)),  # clipping
        NOT_SPLIT,
    ),
    "logging": (
        lambda params: Calls(params, lambda o, p: str(p.abs().max())),  # logging
        NOT_SPLIT,
    ),
    "item": (
        lambda params: Calls(params, lambda o, p: p.mul_(grad(p)[0, 0].item())),  # item
        NOT_SPLIT,
    ),
    "no rule": (
        lambda params: Calls(params, lambda o, p: p.copy_(p.erf())),  # no rule
        r"aten.erf.default .* has no rule",
    ),
    "no rule, again": (  # another line with the same recording
        lambda params: Calls(params, lambda o, p: p.copy_(p.erf())),  # no rule, again
        r"aten.erf.default .* has no rule",
    ),
    "id": (
        lambda params: Calls(params, lambda o, p: p.mul_(o.rates[id(p)])),  # type: ignore[attr-defined]  # id
        r"a stand-in for the parameter, which has no data and another id, .* it raised KeyError: \d+",
    ),
    "AfterANorm": (AfterANorm, NOT_SPLIT),
}


@pytest.mark.parametrize("name", POINTED)
def test_a_refusal_points_at_the_line_of_the_users_own_step(name: str) -> None:
    make, message = POINTED[name]
    lines = Path(__file__).read_text().splitlines()
    (line,) = (i for i, text in enumerate(lines, 1) if text.endswith(f"# {name}"))
    refused(make(matrices()), UnsupportedUpdate, rf"{message}.* \(at {re.escape(__file__)}:{line}\)$")


def test_a_refusal_of_an_optimizer_of_torch_points_into_it() -> None:
    refused(Adafactor(matrices()), UnsupportedUpdate, r" \(at .*/torch/optim/_adafactor.py:\d+\)$")


# --- classes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["Adafactor", "LBFGS", "Muon"])
def test_a_class_that_cannot_be_rewritten_whatever_its_settings_is_refused(name: str) -> None:
    with pytest.raises(UnsupportedUpdate, match=f"{name}.*leave it uncompiled"):
        collage_neuron.compile(TORCH[name][0])  # type: ignore[call-overload]  # a class


class Normed(Optimizer):
    """By default it divides by the norm of the gradient."""

    def __init__(self, params: Any, norm: bool = True) -> None:
        super().__init__(params, {"lr": 0.1, "norm": norm})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(grad(p) / grad(p).norm() if self.param_groups[0]["norm"] else grad(p), alpha=0.1)


def test_a_class_whose_defaults_are_refused_can_be_compiled_with_others() -> None:
    with pytest.raises(UnsupportedUpdate, match=r"with its default settings; .*a subclass that has them as its def"):
        collage_neuron.compile(Normed)

    class Elementwise(Normed):
        def __init__(self, params: Any, norm: bool = False) -> None:
            super().__init__(params, norm)

    for optimizer in (
        collage_neuron.compile(Normed(matrices(), norm=False)),
        collage_neuron.compile(Elementwise)(matrices(torch.bfloat16)),
    ):
        set_gradients(optimizer.param_groups[0]["params"], 0)
        optimizer.step()


class WantsTraining(Normed):
    """As schedule-free optimizers, it steps in training mode alone."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, norm=False)
        self.training = False

    def train(self) -> None:
        self.training = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not self.training:
            raise RuntimeError("not in train mode")
        super().step()


def test_an_optimizer_in_evaluation_mode_is_refused_with_what_to_do() -> None:
    optimizer = WantsTraining(matrices())
    refused(optimizer, UnsupportedUpdate, r"RuntimeError: not in train mode; call optimizer.train\(\) before compiling")
    optimizer.train()
    collage_neuron.compile(optimizer)


def test_a_class_is_tried_in_training_mode() -> None:
    collage_neuron.compile(WantsTraining)


class Unprepared(SGD):
    """Has to be given something before it steps."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # never gets that far
        raise RuntimeError("call prepare() first")


@pytest.mark.parametrize("base", [Acts, Unprepared])
def test_a_class_that_cannot_be_tried_is_not_refused(base: Any) -> None:
    """One takes more than parameters, the step of the other raises an error of its own."""
    collage_neuron.compile(base)


# --- refusals of step() ---------------------------------------------------------------------------------------------


def step_is_refused(optimizer: Optimizer, error: type[Exception], message: str) -> None:
    """`step` raises, and leaves parameters, gradients, states, step counts and groups as they were, bit for bit."""
    kind, before = type(optimizer), snapshot(optimizer)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert type(optimizer) is kind
    assert differences(snapshot(optimizer), before) == []


def set_group(**entries: Any) -> Callable[[Optimizer], None]:
    return lambda optimizer: optimizer.param_groups[1].update(entries)


def sparse_gradient(optimizer: Optimizer) -> None:
    p = optimizer.param_groups[1]["params"][0]
    p.grad = torch.ones_like(p).to_sparse()


def half_parameter(optimizer: Optimizer) -> None:
    p = optimizer.param_groups[1]["params"][0]
    p.grad = None
    p.data = p.data.half()
    p.grad = torch.ones_like(p)


SECOND = r"a parameter \(number 0 with a gradient, shape \[8, 8\]\) of param_groups\[1\]"
NAN = float("nan")

AT_STEP: dict[str, tuple[Callable[[Optimizer], None], type[Exception], str]] = {
    "lr NaN": (set_group(lr=NAN), ValueError, r"param_groups\[1\]\['lr'\] is nan; nothing was updated: set a finite"),
    "lr Inf": (set_group(lr=float("inf")), ValueError, r"param_groups\[1\]\['lr'\] is inf; nothing was updated"),
    "lr tensor NaN": (set_group(lr=torch.tensor(NAN)), ValueError, r"param_groups\[1\]\['lr'\] is nan; nothing was"),
    "lr tensor Inf": (set_group(lr=torch.tensor(-torch.inf)), ValueError, r"param_groups\[1\]\['lr'\] is -inf"),
    "beta NaN": (set_group(betas=(0.9, NAN)), ValueError, r"is NaN \(a learning rate, beta or weight decay\); nothing"),
    "weight decay NaN": (set_group(weight_decay=NAN), ValueError, "weight decay.; nothing was updated"),
    "sparse": (sparse_gradient, TypeError, f"the gradient of {SECOND} is sparse .*use sparse=False in the embedding"),
    "half": (half_parameter, TypeError, rf"{SECOND} is torch.float16 \(float\).*only bfloat16 and float32 parameters"),
    "strategy": (set_group(collage_strategy="minus"), ValueError, "unknown strategy 'minus'; choose one of"),
    "arithmetic": (set_group(collage_arithmetic="fp8"), ValueError, "unknown arithmetic 'fp8'; choose one of"),
    "backend": (
        set_group(collage_backend="tpu"),
        ValueError,
        "unknown backend 'tpu'; choose auto, reference, native, xla",
    ),
    "xla": (set_group(collage_backend="xla"), ValueError, "backend='xla' needs parameters on an XLA device"),
    "both": (
        set_group(collage_strategy="fp32", collage_arithmetic="bf16"),
        ValueError,
        "strategy 'fp32' stores .*use arithmetic='fp32' with it",
    ),
}


def two_groups(make: Callable[[Any], Optimizer], fresh: bool, strategy: str = "full") -> Optimizer:
    """A compiled optimizer of two groups with gradients, that has or has not taken steps."""
    params = matrices()
    optimizer = collage_neuron.compile(make([{"params": params[:1]}, {"params": params[1:]}]), strategy=strategy)
    for i in range(0 if fresh else 2):
        set_gradients(params, i)
        optimizer.step()
    set_gradients(params, 3)
    return optimizer


@pytest.mark.parametrize("fresh", [True, False], ids=["first step", "third step"])
@pytest.mark.parametrize("name", AT_STEP)
def test_a_step_that_is_refused_for_its_second_group_changes_nothing(name: str, fresh: bool) -> None:
    change, error, message = AT_STEP[name]
    optimizer = two_groups(lambda groups: AdamW(groups, lr=0.1, weight_decay=0.1), fresh)
    change(optimizer)
    step_is_refused(optimizer, error, message)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_a_step_whose_update_became_unsupported_changes_nothing(name: str) -> None:
    act, message = UNSUPPORTED[name]
    optimizer = two_groups(lambda groups: Acts(groups, nothing), fresh=False)
    optimizer.param_groups[1]["act"] = act
    step_is_refused(optimizer, UnsupportedUpdate, message)


def test_a_refused_step_can_be_taken_once_the_reason_is_gone() -> None:

    def make(groups: Any) -> Optimizer:
        return AdamW(groups, lr=0.1, weight_decay=0.1)

    optimizer, twin = two_groups(make, fresh=False), two_groups(make, fresh=False)
    optimizer.param_groups[1]["lr"] = NAN
    step_is_refused(optimizer, ValueError, "nothing was updated")
    optimizer.param_groups[1]["lr"] = 0.1
    optimizer.step()
    twin.step()
    assert differences(snapshot(optimizer), snapshot(twin)) == []


def test_a_sparse_embedding_is_refused_by_its_gradient() -> None:
    model = nn.Embedding(5, 3, sparse=True)
    model, optimizer = collage_neuron.compile(model, SGD(model.parameters()))
    model(torch.tensor([1, 2])).float().sum().backward()
    with pytest.raises(TypeError, match=r"shape \[5, 3\].* is sparse \(torch.sparse_coo\); use sparse=False"):
        optimizer.step()


# torch itself keeps these apart from their parameters' dtype and device; what does so no longer is refused here.
STRANGE_GRADIENTS = [
    (torch.ones(2, dtype=torch.float64), TypeError, "the gradient of here is torch.float64; only bfloat16 and float32"),
    (torch.ones(2, dtype=torch.complex64), TypeError, "the gradient of here is torch.complex64; only bfloat16 and flo"),
    (torch.ones(2, device="meta"), ValueError, "the gradient of here is on meta and the parameter on cpu"),
]


@pytest.mark.parametrize(("gradient", "error", "message"), STRANGE_GRADIENTS)
def test_a_gradient_of_another_kind_is_refused(gradient: torch.Tensor, error: type[Exception], message: str) -> None:
    p: Any = types.SimpleNamespace(grad=gradient, shape=gradient.shape, device=torch.device("cpu"))
    with pytest.raises(error, match=message):
        check_gradient(p, "here")
