"""The four call forms of `compile`, and what they promise about the objects they are given."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import backward, bits, differences, first, gpt, mlp, parameters, run_script, set_gradients, snapshot, train
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import collage_neuron
from collage_neuron import Compiled, exact_value

PAIRS = ("light", "plus", "full")
"""Strategies that keep a parameter as hi + lo."""


def adamw(model: nn.Module, lr: float = 1e-2) -> AdamW:
    return AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def by_both(model: nn.Module, **settings: Any) -> Optimizer:
    return collage_neuron.compile(model, adamw(model), **settings)[1]


def by_optimizer(model: nn.Module, **settings: Any) -> Optimizer:
    return collage_neuron.compile(adamw(model), **settings)


def by_model(model: nn.Module, **settings: Any) -> Optimizer:
    """The optimizer is built afterwards, the ordinary way, and is compiled when it first steps."""
    return adamw(collage_neuron.compile(model, **settings))


FORMS: dict[str, Callable[..., Optimizer]] = {
    "(model, optimizer)": by_both,
    "(optimizer)": by_optimizer,
    "(model)": by_model,
}


# --- what comes back ---------------------------------------------------------------------------------------------


def test_the_objects_that_come_back_are_those_that_were_given() -> None:
    model = mlp()
    optimizer, params = adamw(model), list(model.parameters())
    assert collage_neuron.compile(model, optimizer) == (model, optimizer)
    assert collage_neuron.compile(optimizer) is optimizer
    assert collage_neuron.compile(model) is model
    assert all(a is b for a, b in zip(model.parameters(), params, strict=True))


@pytest.mark.parametrize("form", ["(model, optimizer)", "(optimizer)"])
def test_a_compiled_optimizer_is_still_what_it_was(form: str) -> None:
    optimizer = FORMS[form](mlp())
    assert isinstance(optimizer, AdamW)
    assert isinstance(optimizer, Compiled)
    assert type(optimizer) is collage_neuron.compile(AdamW)


def test_a_class_gives_a_subclass_and_the_same_one_every_time() -> None:
    compiled = collage_neuron.compile(AdamW, strategy="full")
    assert issubclass(compiled, AdamW)
    assert compiled is collage_neuron.compile(AdamW, strategy="full")
    assert compiled is not collage_neuron.compile(AdamW, strategy="light")
    assert collage_neuron.compile(AdamW) is collage_neuron.compile(collage_neuron.compile(AdamW))


def test_an_optimizer_of_the_compiled_class_is_a_compiled_one() -> None:
    model = mlp().bfloat16()
    twin = copy.deepcopy(model)
    optimizer = collage_neuron.compile(AdamW, strategy="full")(model.parameters(), lr=1e-2, weight_decay=0.1)
    train(model, optimizer, range(3))
    other = by_optimizer(twin, strategy="full")
    train(twin, other, range(3))
    assert differences(snapshot(optimizer), snapshot(other)) == []


def test_fp32_parameters_in_a_compiled_class_are_warned_of() -> None:
    with pytest.warns(UserWarning, match=r"float32 parameters.*save no memory.*model.to\(torch.bfloat16\)"):
        collage_neuron.compile(AdamW)(mlp().parameters())


# --- fp32 parameters are split ------------------------------------------------------------------------------------


def split_parameters(form: str, strategy: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, dict[str, Any]]]:
    """(fp32 original, parameter, state) after a step that changes no parameter: `compile(model)` splits at a step."""
    model = nn.Linear(64, 64)
    originals = [p.detach().clone() for p in model.parameters()]
    optimizer = FORMS[form](model, strategy=strategy)
    optimizer.param_groups[0]["lr"] = 0.0
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    yield from ((x, p.detach(), optimizer.state[p]) for x, p in zip(originals, model.parameters(), strict=True))


@pytest.mark.parametrize("strategy", PAIRS)
@pytest.mark.parametrize("form", FORMS)
def test_hi_plus_lo_is_the_fp32_parameter(form: str, strategy: str) -> None:
    """x - hi is at most 2**-8 of x's binade, half an ulp of hi; lo loses at most half an ulp, 2**-9 of that."""
    for original, p, state in split_parameters(form, strategy):
        x, hi, lo = original.double(), p.double(), state["param_lo"].double()
        assert ((hi + lo - x).abs() <= 2**-17 * x.abs()).all()
        assert ((hi - x).abs() > 2**-17 * x.abs()).any()  # the low words do say something


@pytest.mark.parametrize("strategy", PAIRS)
@pytest.mark.parametrize("form", FORMS)
def test_hi_is_the_rounded_sum_of_hi_and_lo(form: str, strategy: str) -> None:
    for _, p, state in split_parameters(form, strategy):
        assert torch.equal((p.float() + state["param_lo"].float()).bfloat16(), p)


def test_a_value_whose_split_ends_in_a_tie_is_split_the_canonical_way() -> None:
    """1 + 3 * 2**-8 - 2**-20: hi = 1 + 2**-7, and the rest rounds to half an ulp of hi, a tie that goes to even."""
    p = nn.Parameter(torch.tensor([1 + 3 * 2**-8 - 2**-20]))
    optimizer = collage_neuron.compile(SGD([p]))
    lo = optimizer.state[p]["param_lo"]
    assert (p.item(), lo.item()) == (1 + 2**-6, -(2**-8))


@pytest.mark.parametrize("form", FORMS)
def test_the_fp32_strategy_keeps_the_fp32_parameter_itself(form: str) -> None:
    for original, p, state in split_parameters(form, "fp32"):
        assert torch.equal(bits(state["param_master"]), bits(original))
        assert torch.equal(p, original.bfloat16())


@pytest.mark.parametrize("strategy", ["bf16", "fp32_states"])
@pytest.mark.parametrize("form", FORMS)
def test_the_strategies_without_a_second_word_round_to_nearest(form: str, strategy: str) -> None:
    for original, p, state in split_parameters(form, strategy):
        assert torch.equal(p, original.bfloat16())
        assert not [key for key in state if key.startswith("param")]


@pytest.mark.parametrize("strategy", ["plus", "fp32", "bf16"])
def test_exact_value_is_what_is_kept(strategy: str) -> None:
    model = nn.Linear(8, 8)
    original = model.weight.detach().clone()
    model, optimizer = collage_neuron.compile(model, SGD(model.parameters()), strategy=strategy)
    bound = {"plus": 2**-17, "fp32": 0.0, "bf16": 2**-8}[strategy]
    torch.testing.assert_close(exact_value(optimizer, model.weight), original, rtol=bound, atol=0)


@pytest.mark.parametrize("form", ["(model, optimizer)", "(model)"])
def test_all_that_is_fp32_in_the_model_becomes_bf16_and_nothing_else(form: str) -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4), "mask": nn.Embedding(2, 2)})
    model["mask"].weight = nn.Parameter(torch.tensor([1, 0]), requires_grad=False)
    if form == "(model)":
        collage_neuron.compile(model, buffers="cast")
    else:
        collage_neuron.compile(model, SGD(model["a"].parameters()), buffers="cast")
    assert {t.dtype for t in (*model["a"].parameters(), *model["norm"].parameters())} == {torch.bfloat16}
    assert model["norm"].running_mean.dtype == torch.bfloat16
    assert (model["norm"].num_batches_tracked.dtype, model["mask"].weight.dtype) == (torch.int64, torch.int64)


@pytest.mark.parametrize("alone", [False, True], ids=["(first), (model, second)", "(model)"])
def test_two_optimizers_over_one_model_keep_every_low_word(alone: bool) -> None:
    model = mlp()
    layers: list[Any] = [m for m in model.modules() if isinstance(m, nn.Linear)]
    before = [p.detach().clone() for p in model.parameters()]
    first, second = (
        SGD(ps, lr=0.0) for ps in (layers[0].parameters(), [p for m in layers[1:] for p in m.parameters()])
    )
    if alone:
        collage_neuron.compile(model)
    else:
        collage_neuron.compile(first)
        collage_neuron.compile(model, second)
    set_gradients(list(model.parameters()), 0)
    first.step()
    second.step()
    owners = [first] * 2 + [second] * (len(before) - 2)
    for p, w, owner in zip(model.parameters(), before, owners, strict=True):
        torch.testing.assert_close(exact_value(owner, p), w, rtol=2**-17, atol=0)


def test_tied_parameters_stay_tied() -> None:
    model = gpt()
    model, optimizer = collage_neuron.compile(model, adamw(model))
    train(model, optimizer, range(2))
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype == torch.bfloat16


def test_gradients_that_are_there_are_kept() -> None:
    params = parameters()
    set_gradients(params, 0)
    before = [p.grad.clone() for p in params if p.grad is not None]
    collage_neuron.compile(SGD(params))
    assert all(torch.equal(p.grad.float(), g) for p, g in zip(params, before, strict=True) if p.grad is not None)
    assert {p.grad.dtype for p in params if p.grad is not None} == {torch.bfloat16}


# --- settings -----------------------------------------------------------------------------------------------------


def test_the_settings_live_in_the_groups() -> None:
    optimizer = collage_neuron.compile(adamw(mlp()), strategy="light", arithmetic="bf16", backend="reference")
    found = {k: v for k, v in optimizer.param_groups[0].items() if k.startswith("collage_")}
    assert found == {
        "collage_strategy": "light",
        "collage_arithmetic": "bf16",
        "collage_backend": "reference",
        "collage_nonfinite": "pass",
        "collage_seed": 0,
        "collage_validate": "on",
        "collage_unsupported": "twin",
    }


def two_groups(model: nn.Sequential, **own: Any) -> AdamW:
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[2].parameters(), **own}]
    return AdamW(groups, lr=1e-2)


def states(optimizer: Optimizer) -> list[set[str]]:
    """Names of the states of the first parameter of each group."""
    return [set(optimizer.state[group["params"][0]]) for group in optimizer.param_groups]


ADAM = {"step", "exp_avg", "exp_avg_sq"}


def test_groups_may_have_strategies_of_their_own() -> None:
    model = mlp()
    optimizer = two_groups(model, collage_strategy="fp32")
    model, optimizer = collage_neuron.compile(model, optimizer, strategy="full")
    train(model, optimizer, range(2))
    assert states(optimizer) == [
        ADAM | {"param_lo", "exp_avg_lo", "exp_avg_sq_lo"},
        ADAM | {"param_master"},
    ]


def test_groups_of_a_compiled_class_may_have_strategies_of_their_own() -> None:
    model = mlp().bfloat16()
    groups: list[dict[str, Any]] = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    groups[1]["collage_strategy"] = "bf16"
    optimizer = collage_neuron.compile(AdamW, strategy="plus")(groups)
    train(model, optimizer, range(2))
    assert states(optimizer) == [ADAM | {"param_lo", "exp_avg_sq_lo"}, ADAM]


def test_a_strategy_may_name_states() -> None:
    strategy = {"param": "bf16x2", "exp_avg": "fp32", "*": "bf16"}
    model = mlp()
    model, optimizer = collage_neuron.compile(model, adamw(model), strategy=strategy)
    train(model, optimizer, range(2))
    found = {k: v.dtype for k, v in optimizer.state[first(model)].items()}
    assert found == {
        "param_lo": torch.bfloat16,
        "step": torch.float32,
        "exp_avg": torch.float32,
        "exp_avg_sq": torch.bfloat16,
    }


# --- the class form: what sharding wrappers and trainers do to it ---------------------------------------------------


@pytest.mark.parametrize("base", [SGD, Adam, AdamW])
def test_rebuilding_from_class_groups_and_defaults_keeps_the_settings(base: type[Optimizer]) -> None:
    first: Any = collage_neuron.compile(base, strategy="light", arithmetic="bf16")
    given = first(parameters(dtype=torch.bfloat16), lr=1e-2)
    given.param_groups[0]["collage_strategy"] = "full"
    for rebuilt in (type(given)(given.param_groups, **given.defaults), type(given)(given.param_groups)):
        assert type(rebuilt) is first
        assert rebuilt.param_groups[0]["collage_strategy"] == "full"
        rebuilt.add_param_group({"params": parameters(dtype=torch.bfloat16)})
        assert rebuilt.param_groups[1]["collage_strategy"] == "light"
        assert rebuilt.param_groups[1]["collage_arithmetic"] == "bf16"


def test_rebuilding_from_an_optimizer_compiled_as_an_object_keeps_the_settings() -> None:
    given: Any = collage_neuron.compile(SGD(parameters()), strategy="full")
    for rebuilt in (type(given)(given.param_groups, **given.defaults), type(given)(given.param_groups)):
        assert rebuilt.param_groups[0]["collage_strategy"] == "full"
    fresh = type(given)(parameters(dtype=torch.bfloat16), **given.defaults)
    assert fresh.param_groups[0]["collage_strategy"] == "full"


@pytest.mark.parametrize("wrong", [{"learning_rate": 0.1}, {"decoupled_weight_decay": False}])
def test_an_argument_that_the_optimizer_does_not_take_is_refused(wrong: dict[str, Any]) -> None:
    compiled: Any = collage_neuron.compile(AdamW)
    with pytest.raises(TypeError, match=f"AdamW takes no argument '{next(iter(wrong))}'"):
        compiled(parameters(dtype=torch.bfloat16), **wrong)


def test_settings_may_be_given_to_the_constructor_of_a_compiled_class() -> None:
    compiled: Any = collage_neuron.compile(SGD, strategy="light")
    optimizer = compiled(parameters(dtype=torch.bfloat16), lr=0.1, collage_strategy="full")
    assert optimizer.param_groups[0]["collage_strategy"] == "full"


class Decorated(collage_neuron.compile(SGD)):  # type: ignore[misc]  # a class made at run time
    """A user's subclass of a compiled class."""

    label = "mine"


def test_a_subclass_of_a_compiled_class_steps_like_it() -> None:
    params, twins = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    optimizers: list[Any] = [Decorated(params, lr=1e-2), collage_neuron.compile(SGD)(twins, lr=1e-2)]
    for group, optimizer in zip((params, twins), optimizers, strict=True):
        set_gradients(group, 0)
        optimizer.step()
    assert differences(*map(snapshot, optimizers)) == []


def test_a_subclass_of_a_compiled_class_pickles_as_itself() -> None:
    assert pickle.loads(pickle.dumps(Decorated)) is Decorated


class Doubled(collage_neuron.compile(SGD)):  # type: ignore[misc]  # a class made at run time
    """A user's subclass with a step of its own."""

    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            p.grad = 2 * p.grad
        return super().step(closure)


def test_a_subclass_of_a_compiled_class_may_have_a_step_of_its_own() -> None:
    params, twins = parameters(dtype=torch.bfloat16), parameters(dtype=torch.bfloat16)
    collage_neuron.compile(SGD(parameters()))  # from now on every step of the process is looked at
    plain: Any = collage_neuron.compile(SGD)
    mine, other = Doubled(params, lr=1e-2), plain(twins, lr=2e-2)
    for group, optimizer in zip((params, twins), (mine, other), strict=True):
        set_gradients(group, 0)
        optimizer.step()
    assert all(torch.equal(bits(p), bits(q)) for p, q in zip(params, twins, strict=True))
    assert not torch.equal(mine.state[params[0]]["param_lo"], torch.zeros_like(params[0]))


@pytest.mark.parametrize("form", ["(model, optimizer)", "(model)"])
def test_a_step_that_was_kept_from_before_compiling_is_the_compiled_one(form: str) -> None:
    """Also its hooks run once."""
    model, twin = mlp(), mlp()
    optimizer, other = adamw(model), by_both(twin)
    kept, calls = optimizer.step, []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: calls.append("before"))
    optimizer.register_step_post_hook(lambda o, args, kwargs: calls.append("after"))
    if form == "(model)":
        collage_neuron.compile(model)
    else:
        collage_neuron.compile(model, optimizer)
    for i in range(3):
        optimizer.zero_grad()
        backward(model, i)
        kept()
        train(twin, other, [i])
    assert differences(snapshot(optimizer), snapshot(other)) == []
    assert calls == ["before", "after"] * 3


def test_a_hook_added_after_compiling_runs_before_a_step_that_bypasses() -> None:
    """It sees gradients before they are used, as it would in a step of the compiled class."""
    model, twin = mlp(), mlp()
    optimizer, other = adamw(model), by_both(twin)
    kept = optimizer.step
    collage_neuron.compile(model, optimizer)

    def double(o: Optimizer, args: Any, kwargs: Any) -> None:
        for p in (p for group in o.param_groups for p in group["params"]):
            p.grad.mul_(2)

    for each in (optimizer, other):
        each.register_step_pre_hook(double)
    for i in range(2):
        optimizer.zero_grad()
        backward(model, i)
        kept()
        other.zero_grad()
        train(twin, other, [i])
    assert differences(snapshot(optimizer), snapshot(other)) == []


# --- compile(model) alone -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", ["plus", "full"])
def test_with_the_model_alone_every_step_is_the_one_of_the_other_forms(strategy: str, arithmetic: str) -> None:
    """Bit for bit, and the first step already: the low words of the fp32 weights are in it."""
    found = []
    for form in FORMS.values():
        model = mlp()
        optimizer = form(model, strategy=strategy, arithmetic=arithmetic)
        model.bfloat16()  # the form (optimizer) leaves the model's own casting to the user
        train(model, optimizer, [1])
        first = snapshot(optimizer)
        train(model, optimizer, [2, 3])
        found.append((first, snapshot(optimizer)))
    for first, last in found[1:]:
        assert differences(first, found[0][0]) == []
        assert differences(last, found[0][1]) == []
    assert any("param_lo" in key for key in found[0][0])


def test_with_the_model_alone_the_fp32_master_is_the_weight_before_the_cast() -> None:
    both, alone = mlp(), mlp()
    first, second = by_both(both, strategy="fp32"), by_model(alone, strategy="fp32")
    train(both, first, range(2))
    train(alone, second, range(2))
    assert differences(snapshot(first), snapshot(second)) == []


def test_with_the_model_alone_an_optimizer_that_was_built_before_is_compiled_too() -> None:
    model, twin = mlp(), mlp()
    optimizer = adamw(model)
    collage_neuron.compile(model)
    train(model, optimizer, range(2))
    other = by_both(twin)
    train(twin, other, range(2))
    assert isinstance(optimizer, Compiled)
    assert differences(snapshot(optimizer), snapshot(other)) == []


def recorded_first_step(closure: bool) -> tuple[list[str], Any, Optimizer]:
    """Names of what happened in the first two steps, in order; the loss of the second; the optimizer."""
    events: list[str] = []
    model = collage_neuron.compile(mlp())
    optimizer = adamw(model)

    def note(name: str) -> Callable[..., None]:
        def hook(o: Optimizer, args: Any, kwargs: Any) -> None:
            stepped = max((float(s.get("step", 0)) for s in o.state.values()), default=0.0)
            events.append(f"{name} at {stepped:.0f}")
            assert o is optimizer

        return hook

    def loss() -> torch.Tensor:
        events.append("closure")
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        return backward(model, 0)

    optimizer.register_step_pre_hook(note("pre"))
    optimizer.register_step_post_hook(note("post"))
    backward(model, 0)
    arguments: list[Any] = [loss] if closure else []
    before = register_optimizer_step_pre_hook(note("global pre"))
    after = register_optimizer_step_post_hook(note("global post"))
    try:
        return events, [optimizer.step(*arguments) for _ in range(2)], optimizer
    finally:  # other tests step too
        before.remove()
        after.remove()


def test_the_first_step_runs_hooks_around_it_and_the_closure_once() -> None:
    events, results, _ = recorded_first_step(closure=True)
    steps = [["global pre", "pre", "closure", "post", "global post"]] * 2
    expected = [
        name if name == "closure" else f"{name} at {i + ('post' in name)}" for i, s in enumerate(steps) for name in s
    ]
    assert events == expected
    assert results[0] > results[1] > 0


def test_the_first_step_without_a_closure_returns_none_and_happens_once() -> None:
    events, results, optimizer = recorded_first_step(closure=False)
    assert events[:4] == ["global pre at 0", "pre at 0", "post at 1", "global post at 1"]
    assert results == [None, None]
    assert {float(s["step"]) for s in optimizer.state.values()} == {2.0}


def test_a_closure_given_by_keyword_is_called_once_in_the_first_step() -> None:
    model = collage_neuron.compile(mlp())
    calls: list[float] = []

    def closure() -> float:
        calls.append(7.0)
        return 7.0

    assert adamw(model).step(closure=closure) == 7.0
    assert calls == [7.0]


def test_a_scheduler_attached_before_the_first_step_keeps_counting() -> None:
    model = collage_neuron.compile(mlp())
    optimizer = adamw(model, lr=1.0)
    scheduler = LambdaLR(optimizer, lambda i: 2.0**-i)
    for i in range(4):  # a warning, that the scheduler saw no step, would be an error
        assert optimizer.param_groups[0]["lr"] == 2.0**-i
        train(model, optimizer, [i])
        scheduler.step()
    assert isinstance(optimizer, Compiled)


def test_weights_loaded_before_the_first_step_win_over_the_low_words() -> None:
    model = collage_neuron.compile(mlp(0), strategy="plus")
    loaded = {k: v.bfloat16() for k, v in mlp(1).state_dict().items()}
    loaded["0.bias"] = model.state_dict()["0.bias"].clone()  # one that stays what it was
    model.load_state_dict(loaded)
    optimizer = adamw(model, lr=0.0)
    train(model, optimizer, [0])
    exact = {name: exact_value(optimizer, p) for name, p in model.named_parameters()}
    assert torch.equal(exact["0.weight"], loaded["0.weight"].float())
    assert not torch.equal(exact["0.bias"], loaded["0.bias"].float())


def test_a_refused_first_step_leaves_all_as_it_was_and_the_next_is_the_first() -> None:
    model, twin = mlp(), mlp()
    optimizer, other = by_model(model), by_both(twin)
    backward(model, 0)
    optimizer.param_groups[0]["lr"] = float("nan")
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match="nothing was updated"):
        optimizer.step()
    assert type(optimizer) is AdamW
    assert differences(snapshot(optimizer), before) == []
    optimizer.param_groups[0]["lr"] = 1e-2
    train(model, optimizer, range(2))
    train(twin, other, range(2))
    assert differences(snapshot(optimizer), snapshot(other)) == []


def test_optimizers_over_other_models_are_left_alone() -> None:
    model, control = mlp(), mlp()
    optimizer, alone = adamw(model), adamw(control)
    train(control, alone, range(2))
    collage_neuron.compile(gpt())
    train(model, optimizer, range(2))
    assert type(optimizer) is AdamW
    assert differences(snapshot(optimizer), snapshot(alone)) == []


def test_an_optimizer_that_stepped_before_its_model_was_marked_is_compiled() -> None:
    """As with the two optimizers of a GAN, whose models are compiled one after the other."""
    collage_neuron.compile(gpt())
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, [0])
    assert type(optimizer) is AdamW
    optimizer.zero_grad()
    collage_neuron.compile(model)
    train(model, optimizer, [1])
    assert isinstance(optimizer, Compiled)


def test_a_model_marked_alone_and_moved_to_xla_keeps_its_low_words(xla: torch.device) -> None:
    found = []
    for device in (torch.device("cpu"), xla):
        model = collage_neuron.compile(mlp()).to(device)
        optimizer = adamw(model)
        set_gradients(list(model.parameters()), 0)
        optimizer.step()
        found.append(snapshot(optimizer))
    assert [k for k in differences(*found) if "step" in k or "group" in k] == []
    assert found[0].keys() == found[1].keys()
    lows = [k for k in found[0] if k.endswith("param_lo")]
    assert lows
    # XLA:CPU contracts a * b + c: the last bit of a low word may differ where the update's does.
    for k in lows:
        assert (found[0][k][1].int() - found[1][k][1].int()).abs().max() <= 1


# --- compiling what already lived -----------------------------------------------------------------------------------


def trained(form: str, steps: int, **settings: Any) -> tuple[nn.Module, Optimizer]:
    """A model that torch trained in fp32, compiled in the middle."""
    model = mlp()
    optimizer = adamw(model)
    train(model, optimizer, range(steps))
    optimizer.zero_grad()
    target: Any = {"(model, optimizer)": (model, optimizer), "(optimizer)": (optimizer,), "(model)": (model,)}[form]
    collage_neuron.compile(*target, **settings)
    return model.bfloat16(), optimizer


@pytest.mark.parametrize("form", ["(model, optimizer)", "(optimizer)"])
def test_an_optimizer_compiled_in_mid_training_keeps_its_moments(form: str) -> None:
    """Split like the parameters: the sum of the words is within 2**-17 of the fp32 moment."""
    control = mlp()
    uncompiled = adamw(control)
    train(control, uncompiled, range(3))
    _, optimizer = trained(form, 3, strategy="full")
    for was, now in zip(uncompiled.state.values(), optimizer.state.values(), strict=True):
        for name in ("exp_avg", "exp_avg_sq"):
            value = now[name].double() + now[f"{name}_lo"].double()
            torch.testing.assert_close(value, was[name].double(), rtol=2**-17, atol=0)
            assert not torch.equal(now[name].float(), was[name])


def test_compiled_in_mid_training_all_forms_go_on_alike() -> None:
    found = []
    for form in FORMS:
        model, optimizer = trained(form, 3, strategy="full")
        train(model, optimizer, range(3, 5))
        found.append(snapshot(optimizer))
    assert differences(found[0], found[1]) == []
    assert differences(found[0], found[2]) == []


def test_a_step_after_compiling_in_mid_training_continues_the_step_count() -> None:
    model, optimizer = trained("(model, optimizer)", 3)
    train(model, optimizer, [3])
    assert {float(s["step"]) for s in optimizer.state.values()} == {4.0}


CHANGES = [("plus", "fp32"), ("fp32", "plus"), ("full", "light"), ("bf16", "full"), ("fp32_states", "plus")]


@pytest.mark.filterwarnings("ignore::collage_neuron.StrategyChanged")
@pytest.mark.parametrize(("old", "new"), CHANGES)
def test_a_compiled_optimizer_can_be_compiled_with_another_strategy(old: str, new: str) -> None:
    """Its values stay what they were up to the new format's half ulp: 2**-17 with a low word, 2**-8 without."""
    model = mlp()
    optimizer = by_both(model, strategy=old)
    train(model, optimizer, range(3))
    exact = {p: exact_value(optimizer, p) for p in model.parameters()}
    collage_neuron.compile(optimizer, strategy=new)
    optimizer.param_groups[0].update(lr=0.0)
    train(model, optimizer, [3])
    fresh = mlp()
    reference = by_both(fresh, strategy=new)
    train(fresh, reference, [0])
    assert states(optimizer) == states(reference)
    for p, value in exact.items():
        torch.testing.assert_close(exact_value(optimizer, p), value, rtol=2**-17, atol=0)


def test_a_group_added_after_compiling_anew_has_the_new_strategy() -> None:
    optimizer = collage_neuron.compile(SGD(parameters()), strategy="light")
    collage_neuron.compile(optimizer, strategy="full")
    optimizer.add_param_group({"params": parameters(dtype=torch.bfloat16)})
    assert [g["collage_strategy"] for g in optimizer.param_groups] == ["full", "full"]


def test_compiling_again_with_the_same_strategy_changes_nothing() -> None:
    model = mlp()
    optimizer = by_both(model)
    train(model, optimizer, range(2))
    before = snapshot(optimizer)
    collage_neuron.compile(model, optimizer)
    assert differences(snapshot(optimizer), before) == []


@pytest.mark.parametrize("strategy", ["plus", "fp32"])
def test_weights_loaded_into_a_compiled_model_are_what_training_goes_on_from(strategy: str) -> None:
    """Fine-tuning loads weights, and no optimizer state, after everything was set up."""
    model = mlp(0)
    optimizer = by_both(model, strategy=strategy)
    model.load_state_dict({k: v.bfloat16() for k, v in mlp(1).state_dict().items()})
    loaded = [p.detach().clone() for p in model.parameters()]
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, [0])
    for p, value in zip(model.parameters(), loaded, strict=True):
        assert torch.equal(exact_value(optimizer, p), value.float())


# --- copies -------------------------------------------------------------------------------------------------------


def through_pickle(x: Any) -> Any:
    return pickle.loads(pickle.dumps(x))


def through_torch_save(x: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(x, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_pickle, through_torch_save])
@pytest.mark.parametrize("form", FORMS)
def test_a_copy_trains_on_like_the_original(form: str, duplicate: Callable[[Any], Any]) -> None:
    model = mlp()
    optimizer = FORMS[form](model, strategy="full")
    model.bfloat16()
    train(model, optimizer, range(2))
    other_model, other = duplicate((model, optimizer))
    assert type(other) is type(optimizer)
    assert other is not optimizer
    train(model, optimizer, range(2, 4))
    train(other_model, other, range(2, 4))
    assert differences(snapshot(optimizer), snapshot(other)) == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, through_torch_save])
@pytest.mark.parametrize("form", ["(model, optimizer)", "(optimizer)"])
def test_a_copy_made_before_the_first_step_trains_like_the_original(form: str, duplicate: Callable[[Any], Any]) -> None:
    """Its states are low words alone then."""
    model = mlp()
    optimizer = FORMS[form](model)
    model.bfloat16()
    other_model, other = duplicate((model, optimizer))
    train(model, optimizer, range(2))
    train(other_model, other, range(2))
    assert differences(snapshot(optimizer), snapshot(other)) == []


def test_a_copy_shares_nothing_with_the_original() -> None:
    model = mlp()
    optimizer = by_both(model)
    train(model, optimizer, [0])
    _, other = copy.deepcopy((model, optimizer))
    before = snapshot(other)
    train(model, optimizer, [1])
    assert differences(snapshot(other), before) == []


@pytest.mark.parametrize("duplicate", [copy.deepcopy, copy.copy, through_pickle, through_torch_save])
def test_a_copy_of_the_class_is_the_class(duplicate: Callable[[Any], Any]) -> None:
    compiled = collage_neuron.compile(AdamW, strategy={"param": "bf16x2"})
    assert duplicate(compiled) is compiled


def test_compiled_classes_of_torch_can_be_imported_by_name() -> None:
    from collage_neuron.optimizer import CollageSGD

    assert CollageSGD is collage_neuron.compile(SGD)


SCRIPT = """
import sys, torch
import models
model, optimizer, compiled = torch.load(sys.argv[1], weights_only=False)
assert compiled is type(optimizer) and isinstance(optimizer, torch.optim.AdamW), type(optimizer)
models.train(model, optimizer, range(2, 4))
torch.save(models.snapshot(optimizer), sys.argv[2])
"""


def test_a_pickled_optimizer_and_its_class_live_on_in_a_new_process(tmp_path: Path) -> None:
    model = mlp()
    optimizer = by_both(model, strategy="full", arithmetic="bf16")
    train(model, optimizer, range(2))
    torch.save((model, optimizer, type(optimizer)), tmp_path / "saved.pt")
    run_script(tmp_path, SCRIPT, tmp_path / "saved.pt", tmp_path / "result.pt")
    train(model, optimizer, range(2, 4))
    assert differences(torch.load(tmp_path / "result.pt", weights_only=False), snapshot(optimizer)) == []
