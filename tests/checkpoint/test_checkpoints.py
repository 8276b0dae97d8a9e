"""To plain fp32 training and back: what a pair can hold comes through to the last bit, the rest within half an ulp.

Half an ulp of the low word is 2**-17 of the number: with 2**e <= |x| < 2**(e + 1), |x - hi| <= 2**(e - 8), and a bf16
number below that has an ulp of 2**(e - 16) at most. Below 2**-126 the low word has bf16's smallest ulp, 2**-133.
"""

from __future__ import annotations

import copy
import io
import pickletools
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences, first, mlp, parameters, run_script, set_gradients, snapshot, train
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import collage_neuron
from collage_neuron import STRATEGIES, StrategyChanged, exact_value, set_exact_value
from collage_neuron.checkpoint.fp32 import get_fp32_state_dict, set_fp32_state_dict
from collage_neuron.checkpoint.tensors import from_tensors, to_tensors

UNIT = {"bf16": 2**-8, "bf16x2": 2**-17, "fp32": 0.0, "bf16+fp32": 0.0}
"""What storing an fp32 number in each format may change of it."""


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, amsgrad=True)


def in_torch(steps: int = 3, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    """A model that torch trained in fp32, with its optimizer."""
    model = mlp(seed)
    optimizer = adamw(model)
    train(model, optimizer, range(steps))
    return model, optimizer


def in_ours(strategy: str = "plus", steps: int = 3, seed: int = 0) -> tuple[nn.Module, Optimizer]:
    model = mlp(seed)
    model, optimizer = collage_neuron.compile(model, adamw(model), strategy=strategy)
    train(model, optimizer, range(steps))
    return model, optimizer


def saved_from(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()))


# --- torch -> collage -> torch --------------------------------------------------------------------------------------


def rounded(x: Tensor, bits: int) -> Tensor:
    """float64 `x` rounded to so many significant bits, to nearest even: by its digits, with no cast to bf16."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(torch.ldexp(mantissa, torch.tensor(bits))), exponent - bits)


def fits_in_a_pair(x: Tensor) -> Tensor:
    x = x.double()
    hi = rounded(x, 8)
    return hi + rounded(x - hi, 8) == x


def round_trip(strategy: str) -> tuple[Any, Any, Any, Any]:
    """(weights, states) of a torch run, and both again after a compiled optimizer of the strategy had them."""
    model, optimizer = in_torch()
    weights, states = saved_from(model, optimizer)
    other, compiled = in_ours(strategy, steps=0, seed=1)
    set_fp32_state_dict(other, compiled, model_state_dict=weights, optim_state_dict=states)
    return weights, states, *get_fp32_state_dict(other, compiled)


# max_exp_avg_sq moves in steps that bf16 can hold: `plus` does not give it a low word.
STORED = {
    "bf16": ("bf16", "bf16", "bf16"),
    "light": ("bf16x2", "bf16", "bf16"),
    "plus": ("bf16x2", "bf16", "bf16x2"),
    "full": ("bf16x2", "bf16x2", "bf16x2"),
    "fp32": ("bf16+fp32", "fp32", "fp32"),
    "fp32_states": ("bf16", "fp32", "fp32"),
}
"""How each strategy stores parameters, exp_avg, and exp_avg_sq."""


@pytest.mark.parametrize("strategy", STORED)
def test_weights_and_moments_come_back_within_half_an_ulp_of_their_format(strategy: str) -> None:
    weights, states, weights_after, states_after = round_trip(strategy)
    param, first, second = STORED[strategy]
    assert weights_after.keys() == weights.keys()
    compare(weights_after, weights, dict.fromkeys(weights, param))
    names = {"exp_avg": first, "exp_avg_sq": second, "max_exp_avg_sq": "bf16" if strategy == "plus" else second}
    assert states_after["state"].keys() == states["state"].keys()
    for i, state in states["state"].items():
        compare(states_after["state"][i], state, names | {"step": "fp32"})
    assert states_after["param_groups"] == states["param_groups"]


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], formats: dict[str, str]) -> None:
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        y, fmt = found[name], formats[name]
        assert y.dtype == x.dtype == torch.float32
        assert ((y.double() - x).abs() <= UNIT[fmt] * x.double().abs() + (2**-134 if UNIT[fmt] else 0)).all(), name
        if fmt == "bf16x2":
            assert torch.equal(y[fits_in_a_pair(x)], x[fits_in_a_pair(x)])
            assert not torch.equal(y, x)  # the bound is needed


def test_weights_and_moments_that_fit_in_pairs_come_back_to_the_last_bit() -> None:
    """Numbers of 16 bits and of any magnitude, and sparser ones that reach further down."""
    g = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**15), 2**15, (16, 6), generator=g).float() * torch.exp2(torch.arange(96.0).view(16, 6) - 70)
    x[0] = 1 + torch.exp2(-torch.arange(18.0, 24.0))
    assert fits_in_a_pair(x).all()
    model, optimizer = in_torch()
    with torch.no_grad():
        first(model).copy_(x)
    state = optimizer.state[first(model)]
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        state[name].copy_(x.abs())
    other, compiled = in_ours("full", steps=0, seed=1)
    weights, states = saved_from(model, optimizer)
    set_fp32_state_dict(other, compiled, model_state_dict=weights, optim_state_dict=states)
    weights_after, states_after = get_fp32_state_dict(other, compiled)
    assert torch.equal(weights_after["0.weight"], x)
    assert all(torch.equal(states_after["state"][0][n], x.abs()) for n in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_what_was_exported_is_what_is_kept_and_comes_back(strategy: str) -> None:
    """The other way round nothing is lost at all: the sum of two words is an fp32 number."""
    model, optimizer = in_ours(strategy)
    weights, states = get_fp32_state_dict(model, optimizer)
    for name, p in model.named_parameters():
        assert torch.equal(weights[name], exact_value(optimizer, p))
    other, compiled = in_ours(strategy, steps=0, seed=1)
    set_fp32_state_dict(other, compiled, model_state_dict=weights, optim_state_dict=states)
    again, states_again = get_fp32_state_dict(other, compiled)
    assert all(torch.equal(again[k], v) for k, v in weights.items())
    for i, state in states["state"].items():
        assert all(torch.equal(states_again["state"][i][k], v) for k, v in state.items())


def test_an_exported_checkpoint_is_one_of_torch() -> None:
    model, optimizer = in_ours()
    reference_model, reference = in_torch()
    weights, states = get_fp32_state_dict(model, optimizer)
    assert {k: (v.shape, v.dtype) for k, v in weights.items()} == {
        k: (v.shape, v.dtype) for k, v in reference_model.state_dict().items()
    }
    plain = reference.state_dict()
    assert states["param_groups"] == plain["param_groups"]
    assert {i: set(s) for i, s in states["state"].items()} == {i: set(s) for i, s in plain["state"].items()}
    before = snapshot(optimizer)
    train(reference_model, reference, [0])
    assert differences(snapshot(optimizer), before) == []  # it shares nothing with the optimizer


def test_frozen_parameters_and_buffers_are_exported_too() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    model[0].bias.requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad])
    collage_neuron.compile(model, optimizer)
    weights, _ = get_fp32_state_dict(model, optimizer)
    assert {k: v.dtype for k, v in weights.items()} == {
        k: torch.int64 if k == "1.num_batches_tracked" else torch.float32 for k in model.state_dict()
    }
    assert torch.equal(weights["0.bias"], model.state_dict()["0.bias"].float())


def test_bf16_states_of_a_plain_bf16_run_are_loaded_as_they_are() -> None:
    model = mlp().bfloat16()
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    weights, states = saved_from(model, optimizer)
    other, compiled = in_ours("full", steps=0, seed=1)
    other.load_state_dict(weights)
    compiled.load_state_dict(states)
    found, moments = get_fp32_state_dict(other, compiled)
    assert all(torch.equal(found[k], v.float()) for k, v in weights.items())
    for i, state in states["state"].items():
        assert all(torch.equal(moments["state"][i][k], v.float()) for k, v in state.items())


# --- both sides go on -------------------------------------------------------------------------------------------------

BEFORE, AFTER = 20, 100
LR = 1e-4


def small_parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter((0.02 * p.detach()).to(dtype)) for p in parameters()]


def make(params: list[nn.Parameter]) -> Optimizer:
    return AdamW(params, LR, (0.9, 0.99), weight_decay=0.1)


def go_on(params: list[nn.Parameter], optimizer: Optimizer, steps: range) -> None:
    for i in steps:
        set_gradients(params, i)
        optimizer.step()


def bound(strategy: str, largest: float, moved: float) -> float:
    """How far AFTER steps may lead from where float64 goes, from the same checkpoint.

    A parameter is stored AFTER times and once when it is loaded: each rounds it by its unit. A first moment keeps 10
    of the errors of storing it (1 / (1 - 0.9)), a second one 100, of which the square root leaves half; gradients lie
    in [1, 2), so that moments differ by less than a factor of 2 from what they were when the errors were made. In fp32
    each step rounds the parameter three times (the scalar 1 - lr * wd, the product, the sum) and the step at most 16.
    """
    param, first, second = ({"fp32": 2**-24, "bf16+fp32": 2**-24} | UNIT_OF)[STORED[strategy][0]], *moments(strategy)
    stored = (AFTER + 1) * param * largest + moved * (2 * 10 * first + 2 * 50 * second)
    return stored + 2**-24 * (3 * AFTER * largest + 16 * moved)


UNIT_OF = {"bf16": 2**-8, "bf16x2": 2**-17}


def moments(strategy: str) -> tuple[float, float]:
    first, second = (({"fp32": 2**-24} | UNIT_OF)[fmt] for fmt in STORED[strategy][1:])
    return first, second


def farthest(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x.double() - y.double()).abs().max()) for x, y in zip(a, b, strict=True))


def values(params: list[nn.Parameter]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def oracle_from(weights: list[Tensor], states: dict[str, Any]) -> list[nn.Parameter]:
    """torch's AdamW in float64, gone on with from a checkpoint."""
    params = [nn.Parameter(w.double()) for w in weights]
    optimizer = make(params)
    optimizer.load_state_dict(copy.deepcopy(states))
    go_on(params, optimizer, range(BEFORE, BEFORE + AFTER))
    return params


@pytest.mark.parametrize("strategy", ["bf16", "light", "plus", "full", "fp32"])
def test_a_torch_checkpoint_gone_on_with_stays_within_the_bound_of_float64(strategy: str) -> None:
    """It prints the numbers of docs/checkpoints.md (`pytest -s`)."""
    params = small_parameters(torch.float32)
    optimizer = make(params)
    go_on(params, optimizer, range(BEFORE))
    weights, states = values(params), copy.deepcopy(optimizer.state_dict())
    error, allowed, moved = errors_of_going_on(strategy, weights, states)
    print(f"\n{strategy}: {error:.1e} off, bound {allowed:.1e}, travelled {moved:.1e}")
    assert error <= allowed
    if strategy in ("plus", "full", "fp32"):
        with_bf16, _, _ = errors_of_going_on("bf16", weights, states)
        assert with_bf16 > allowed  # the bound can be missed
        assert allowed <= 0.1 * moved


def errors_of_going_on(strategy: str, weights: list[Tensor], states: dict[str, Any]) -> tuple[float, float, float]:
    """(error, its bound, the distance travelled) of a compiled run that starts from a plain fp32 checkpoint."""
    params = small_parameters(torch.float32)
    optimizer = collage_neuron.compile(make(params), strategy=strategy)
    optimizer.load_state_dict(states)
    for p, w in zip(params, weights, strict=True):
        set_exact_value(optimizer, p, w)
    go_on(params, optimizer, range(BEFORE, BEFORE + AFTER))
    oracle = oracle_from(weights, states)
    exact = [exact_value(optimizer, p) for p in params]
    moved = farthest(values(oracle), weights)
    largest = max(float(t.abs().max()) for t in [*values(oracle), *weights])
    return farthest(exact, values(oracle)), bound(strategy, largest, moved), moved


@pytest.mark.parametrize("strategy", ["plus", "full", "fp32"])
def test_an_exported_checkpoint_gone_on_with_by_torch_and_by_us_is_one_run_within_both_bounds(strategy: str) -> None:
    params = small_parameters(torch.float32)
    optimizer = collage_neuron.compile(make(params), strategy=strategy)
    go_on(params, optimizer, range(BEFORE))
    model = nn.ParameterList(params)
    weights, states = get_fp32_state_dict(model, optimizer)
    plain = [nn.Parameter(w.clone()) for w in weights.values()]
    reference = make(plain)
    reference.load_state_dict(copy.deepcopy(states))
    oracle = oracle_from(list(weights.values()), states)
    for ps, o in ((params, optimizer), (plain, reference)):
        go_on(ps, o, range(BEFORE, BEFORE + AFTER))
    ours = [exact_value(optimizer, p) for p in params]
    moved = farthest(values(oracle), list(weights.values()))
    largest = max(float(t.abs().max()) for t in [*values(oracle), *weights.values()])
    assert farthest(values(plain), values(oracle)) <= bound("fp32", largest, moved)
    assert farthest(ours, values(oracle)) <= bound(strategy, largest, moved)
    assert farthest(ours, values(plain)) <= bound(strategy, largest, moved) + bound("fp32", largest, moved)


# --- another strategy -------------------------------------------------------------------------------------------------


def resumed_with(strategy: str, weights: Any, states: Any) -> tuple[nn.Module, Optimizer, str]:
    """A run that is gone on with under another strategy, and what was said about that."""
    model, optimizer = in_ours(states["param_groups"][0]["collage_strategy"], steps=0, seed=1)
    model.load_state_dict(weights)
    optimizer.load_state_dict(states)
    with pytest.warns(StrategyChanged) as said:
        collage_neuron.compile(optimizer, strategy=strategy)
    return model, optimizer, str(said[0].message)


def test_a_run_may_be_gone_on_with_under_another_strategy_and_hears_what_that_means() -> None:
    model, optimizer = in_ours("bf16")
    for strategy, told in (
        ("plus", r"from 8 to 12 .*Gained: param in bf16x2 instead of bf16 \(rounded to 2\*\*-17 instead of 2\*\*-8\)"),
        (
            "fp32",
            r"from 12 to 18 .*Gained: param in bf16\+fp32 .* exp_avg in fp32 .* Lost: nothing, every value is car",
        ),
    ):
        before = get_fp32_state_dict(model, optimizer)
        model, optimizer, message = resumed_with(strategy, *saved_from(model, optimizer))
        assert_matches(message, told)
        assert equal(get_fp32_state_dict(model, optimizer), before)  # gaining words changes no value
        train(model, optimizer, range(3, 6))
    model, optimizer, message = resumed_with("light", *saved_from(model, optimizer))
    assert_matches(message, r"from 18 to 10 .*Gained: nothing. Lost: param in bf16x2 .*exp_avg in bf16 instead of fp32")


def assert_matches(message: str, pattern: str) -> None:
    with pytest.raises(RuntimeError, match=pattern):
        raise RuntimeError(message)


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)


def test_nothing_is_said_where_nothing_is_gained_or_lost() -> None:
    model, optimizer = in_ours("plus")
    collage_neuron.compile(optimizer, strategy={"param": "bf16x2", "exp_avg_sq": "bf16x2", "*": "bf16"})
    _, fresh = in_ours("plus", steps=0)
    collage_neuron.compile(fresh, strategy="bf16")  # no state yet
    train(model, optimizer, [0])


@pytest.mark.parametrize("strategy", ["plus", "fp32"])
def test_switched_before_the_first_step_the_words_of_the_fp32_weights_are_kept(strategy: str) -> None:
    model = mlp()
    exact = [p.detach().clone() for p in model.parameters()]
    model, optimizer = collage_neuron.compile(model, adamw(model), strategy="full")
    collage_neuron.compile(optimizer, strategy=strategy)
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, [0])
    for p, x in zip(model.parameters(), exact, strict=True):
        torch.testing.assert_close(exact_value(optimizer, p), x, rtol=2**-17, atol=0)


# --- files ------------------------------------------------------------------------------------------------------------


def through_safetensors(states: dict[str, Any], folder: Path) -> dict[str, Any]:
    safetensors = pytest.importorskip("safetensors")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors, metadata = to_tensors(states)
    save_file(tensors, folder / "optimizer.safetensors", metadata)
    with safetensors.safe_open(folder / "optimizer.safetensors", "pt") as file:
        return from_tensors({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118


def through_torch_save(states: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.save(states, folder / "optimizer.pt")
    found: dict[str, Any] = torch.load(folder / "optimizer.pt", weights_only=True)
    return found


Through = Callable[[dict[str, Any], Path], dict[str, Any]]


@pytest.mark.parametrize("through", [through_safetensors, through_torch_save])
@pytest.mark.parametrize("strategy", [*STRATEGIES, "mapping"])
def test_a_checkpoint_goes_through_a_file_bit_for_bit(strategy: str, through: Through, tmp_path: Path) -> None:
    chosen: Any = {"param": "bf16x2", "exp_avg_sq": "fp32", "*": "bf16"} if strategy == "mapping" else strategy
    model, optimizer = in_ours(chosen)
    weights, states = saved_from(model, optimizer)
    other, compiled = in_ours(chosen, steps=0, seed=1)
    other.load_state_dict(weights)
    compiled.load_state_dict(through(states, tmp_path))
    for m, o in ((model, optimizer), (other, compiled)):
        train(m, o, range(3, 5))
    assert differences(snapshot(compiled), snapshot(optimizer)) == []


def test_tensors_and_numbers_of_a_group_go_through_safetensors(tmp_path: Path) -> None:
    """A learning rate that is a tensor, betas that are a tuple, names, the float 1e-300."""
    model = mlp()
    optimizer = AdamW(model.named_parameters(), lr=torch.tensor(1e-2), eps=1e-300)
    collage_neuron.compile(model, optimizer)
    train(model, optimizer, range(2))
    states = optimizer.state_dict()
    assert equal(through_safetensors(states, tmp_path), states)


def test_what_is_no_literal_is_named() -> None:
    with pytest.raises(ValueError, match=r"param_groups.0.schedule is <.*>: not a number, a text, or a list, tuple"):
        to_tensors({"state": {}, "param_groups": [{"params": [], "schedule": object()}]})


@pytest.mark.parametrize(
    ("tensors", "metadata", "message"),
    [
        ({"model.weight": torch.ones(2)}, {}, "'model.weight' is not part of an optimizer's state"),
        ({"state.x.exp_avg": torch.ones(2)}, {}, "'state.x.exp_avg' is not part of an optimizer's state"),
        ({"state.0": torch.ones(2)}, {}, "'state.0' is not part of an optimizer's state"),
        ({"state.0.step": torch.ones(2)}, {"param_groups.0.params": "[]"}, "state.0 belongs to none of the param_grou"),
        ({}, {"param_groups.0.lr": "__import__('os')"}, r"'param_groups.0.lr' is .*, which is not a Python literal"),
        ({"weight": torch.ones(2)}, None, "'weight' is not part of an optimizer's state"),  # a file without metadata
    ],
)
def test_names_that_we_did_not_write_are_refused(tensors: Any, metadata: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_tensors(tensors, metadata)


def test_what_is_no_state_of_an_optimizer_has_no_tensors() -> None:
    with pytest.raises(ValueError, match=r"no 'state'; found '0.weight', .*: is it an optimizer's state_dict\(\)\?"):
        to_tensors(in_torch()[0].state_dict())


def names_in_pickle(data: bytes) -> set[str]:
    """The Python names that a file of torch.save asks for when it is loaded."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        pickled = archive.read(next(n for n in archive.namelist() if n.endswith("data.pkl")))
    return {str(arg).replace(" ", ".") for op, arg, _ in pickletools.genops(pickled) if op.name == "GLOBAL"}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_checkpoint_asks_for_nothing_but_tensors(strategy: str) -> None:
    buffer = io.BytesIO()
    model, optimizer = in_ours(strategy)
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, buffer)
    allowed = {
        "collections.OrderedDict",
        "torch.BFloat16Storage",
        "torch.CharStorage",
        "torch.FloatStorage",
        "torch.ShortStorage",
        "torch._utils._rebuild_tensor_v2",
    }
    assert names_in_pickle(buffer.getvalue()) <= allowed


# --- what is refused --------------------------------------------------------------------------------------------------


def test_an_optimizer_that_is_not_compiled_is_refused() -> None:
    model, optimizer = in_torch()
    for call in (
        lambda: get_fp32_state_dict(model, optimizer),
        lambda: set_fp32_state_dict(model, optimizer, model_state_dict={}, optim_state_dict={}),
        lambda: set_exact_value(optimizer, next(model.parameters()), torch.zeros(())),
    ):
        with pytest.raises(TypeError, match=r"AdamW is not compiled; pass it to collage_neuron.compile first"):
            call()


def without(key: str) -> Callable[[Any, Any], None]:
    return lambda weights, states: weights.pop(key)


MODELS: dict[str, tuple[Callable[[Any, Any], object], str]] = {
    "missing weight": (without("2.weight"), r"model's state was not loaded, and nothing was changed: it has no '2.wei"),
    "extra weight": (lambda w, s: w.update(extra=torch.ones(1)), r"the model has no 'extra'"),
    "shape": (lambda w, s: w.update({"0.bias": torch.ones(3)}), r"'0.bias' has shape \[3\] and in the model \[16\]"),
    "no tensor": (lambda w, s: w.update({"0.bias": "x"}), r"'0.bias' is a str and in the model a tensor"),
    "range": (lambda w, s: w["0.bias"].fill_(3.4e38), r"two words cannot hold it; nothing was written"),
    "missing state": (lambda w, s: s["state"][1].pop("exp_avg"), r"state\[1\] has no 'exp_avg', which AdamW needs"),
    "one of ours": (
        lambda w, s: s["param_groups"][0].update(collage_strategy="plus"),
        r"one of a compiled optimizer .* load it with optimizer.load_state_dict",
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_plain_checkpoint_is_loaded_whole_or_not_at_all(name: str) -> None:
    change, message = MODELS[name]
    weights, states = saved_from(*in_torch())
    change(weights, states)
    model, optimizer = in_ours(seed=1)
    before, buffers = snapshot(optimizer), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        set_fp32_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    assert differences(snapshot(optimizer), before) == []
    assert equal(dict(model.state_dict()), dict(buffers))


def test_exact_values_are_written_whole_or_not_at_all() -> None:
    model, optimizer = in_ours()
    p = next(model.parameters())
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=r"parameter of shape \[16, 6\] and the value has \[3\]; nothing was written"):
        set_exact_value(optimizer, p, torch.ones(3))
    with pytest.raises(ValueError, match=r"parameter of shape \[2\] belongs to no group of the optimizer; nothing was"):
        set_exact_value(optimizer, nn.Parameter(torch.ones(2)), torch.ones(2))
    assert differences(snapshot(optimizer), before) == []
    value = torch.linspace(0.1, 1.9, p.numel()).view(p.shape)
    set_exact_value(optimizer, p, value)
    torch.testing.assert_close(exact_value(optimizer, p), value, rtol=2**-17, atol=0)
    assert not torch.equal(p.float(), exact_value(optimizer, p))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exact_value_may_be_a_number(strategy: str) -> None:
    model, optimizer = in_ours(strategy)
    p = next(model.parameters())
    for number in (1.0, 3, 1 / 3):
        set_exact_value(optimizer, p, number)
        torch.testing.assert_close(exact_value(optimizer, p), torch.full(p.shape, float(number)), rtol=2**-8, atol=0)
    before = snapshot(optimizer)
    with pytest.raises(TypeError, match="the value is a str and no tensor or number; nothing was written"):
        set_exact_value(optimizer, p, "1.0")  # type: ignore[arg-type]
    assert differences(snapshot(optimizer), before) == []


@pytest.mark.parametrize("number", [1e39, -1e39, 3.4e38, float("inf")])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_an_exact_value_beyond_the_range_is_rejected_or_infinite_and_never_nan(strategy: str, number: float) -> None:
    model, optimizer = in_ours(strategy)
    p = next(model.parameters())
    before = snapshot(optimizer)
    for value in (number, torch.full(p.shape, number, dtype=torch.float64)):
        if strategy in ("light", "plus", "full"):
            with pytest.raises(ValueError, match=r"infinite, or is so in bf16 .*two words cannot hold it; nothing was"):
                set_exact_value(optimizer, p, value)
            assert differences(snapshot(optimizer), before) == []
        else:
            set_exact_value(optimizer, p, value)
            assert torch.equal(p.detach(), torch.full(p.shape, number, dtype=torch.float64).bfloat16())
            assert not exact_value(optimizer, p).isnan().any()


def test_an_average_of_exact_values_is_one_in_fp32_and_an_averaged_model_is_not() -> None:
    """A step of fp32 rounds thrice, each time by 2**-24 of at most the largest weight M: 3 * n * 2**-24 * M in n."""
    n, weight = 100, 1 - 0.999
    model, optimizer = in_ours()
    params = list(model.parameters())
    average = [exact_value(optimizer, p) for p in params]
    wide, largest = [a.double() for a in average], 0.0
    in_bf16 = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    in_bf16.update_parameters(model)  # copies
    for i in range(n):
        train(model, optimizer, [i])
        in_bf16.update_parameters(model)
        for a, w, p in zip(average, wide, params, strict=True):
            value = exact_value(optimizer, p)
            a.lerp_(value, weight)
            w += weight * (value.double() - w)
            largest = max(largest, float(value.abs().max()), float(w.abs().max()))
    bound = 3 * n * 2**-24 * largest
    assert farthest(average, wide) <= bound
    assert farthest([p.detach() for p in in_bf16.module.parameters()], wide) > 10 * bound


# --- what the loaded state leaves alone -------------------------------------------------------------------------------


def test_a_plain_sgd_without_state_round_trips() -> None:
    model = mlp()
    model, optimizer = collage_neuron.compile(model, SGD(model.parameters(), lr=0.1))
    train(model, optimizer, [0])
    weights, states = get_fp32_state_dict(model, optimizer)
    assert states["state"] == {}
    other = mlp(1)
    other, compiled = collage_neuron.compile(other, SGD(other.parameters(), lr=0.1))
    set_fp32_state_dict(other, compiled, model_state_dict=weights, optim_state_dict=states)
    for m, o in ((model, optimizer), (other, compiled)):
        train(m, o, [1])
    assert equal(get_fp32_state_dict(model, optimizer), get_fp32_state_dict(other, compiled))


XLA = """
import sys, torch, torch_xla
device = torch_xla.device()
import collage_neuron
from collage_neuron.checkpoint import get_fp32_state_dict, set_fp32_state_dict
from models import mlp, train
weights, states = torch.load(sys.argv[1])
for strategy in ("full", "fp32"):
    model = mlp(1).to(device)
    model, optimizer = collage_neuron.compile(model, torch.optim.AdamW(model.parameters()), strategy=strategy)
    set_fp32_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    found = get_fp32_state_dict(model, optimizer)
    assert {t.device.type for t in found[0].values()} == {"cpu"}
    torch.save(found, sys.argv[2] + strategy)
"""


def test_fp32_checkpoints_go_through_xla_as_through_the_cpu(xla: torch.device, tmp_path: Path) -> None:
    model = mlp()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, range(2))
    saved = saved_from(model, optimizer)
    torch.save(saved, tmp_path / "saved.pt")
    run_script(tmp_path, XLA, tmp_path / "saved.pt", tmp_path / "found.")
    for strategy in ("full", "fp32"):
        other = mlp(1)
        other, compiled = collage_neuron.compile(other, AdamW(other.parameters()), strategy=strategy)
        set_fp32_state_dict(other, compiled, model_state_dict=saved[0], optim_state_dict=saved[1])
        assert equal(torch.load(tmp_path / f"found.{strategy}"), get_fp32_state_dict(other, compiled))
