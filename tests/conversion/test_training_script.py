"""An ordinary training script still works: what it does around `step`, and that the steps are the optimizer's own.

The oracle of every trajectory is the same torch optimizer in float64, given the same gradients. What may differ is
written from the formats: a stored number is off by at most u = 2**-8 of itself in bf16, 2**-17 as hi + lo, 2**-24 in
fp32, and an average that forgets with a decay d keeps at most 1 / (1 - d) such errors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from models import (
    MODES,
    SHAPES,
    backward,
    bits,
    differences,
    first,
    gpt,
    mlp,
    parameters,
    set_gradients,
    snapshot,
    train,
)
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

import collage_neuron
from collage_neuron import STRATEGIES, exact_value
from collage_neuron.states.store import read_exact

UNIT = {"bf16": 2**-8, "bf16x2": 2**-17, "fp32": 2**-24, "bf16+fp32": 2**-24}
"""Half an ulp of each format, relative to the number."""

STEPS = 20
LR = 1e-3
"""A step far below half an ulp of a bf16 parameter: pure bf16 loses it."""


# --- optimizers ---------------------------------------------------------------------------------------------------


class Lion(Optimizer):
    """Sign of an interpolated momentum, written with `.data` and Python floats, as many research codes are."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.95), decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "decay": decay})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as its author wrote it
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad.data, self.state[p]
                if len(state) == 0:
                    state["momentum"] = torch.zeros_like(p.data)
                m = state["momentum"]
                p.data.mul_(1 - group["lr"] * group["decay"])
                p.data.add_((m * beta1 + grad * (1 - beta1)).sign(), alpha=-group["lr"])
                m.mul_(beta2).add_(grad, alpha=1 - beta2)


class DecaysMatrices(Optimizer):
    """Weight decay for tensors of two and more dimensions only: what it does depends on the shape."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.ndim > 1:
                    p.mul_(1 - 0.5 * group["lr"])
                p.add_(p.grad, alpha=-group["lr"])


Make = Callable[[Any], Optimizer]

BETAS = (0.9, 0.99)

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1),
    "adamw_amsgrad": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1, amsgrad=True),
    "adamw_maximize": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1, maximize=True),
    "adamw_lr_tensor": lambda ps: AdamW(ps, torch.tensor(LR), BETAS, weight_decay=0.1),
    "adamw_foreach": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1, foreach=True),
    "adamw_fused": lambda ps: AdamW(ps, LR, BETAS, weight_decay=0.1, fused=True),
    "adam_coupled_decay": lambda ps: Adam(ps, LR, BETAS, weight_decay=0.1),
    "sgd": lambda ps: SGD(ps, LR),
    "sgd_momentum": lambda ps: SGD(ps, LR / 10, momentum=0.9),
    "sgd_nesterov": lambda ps: SGD(ps, LR / 10, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd_dampening": lambda ps: SGD(ps, LR, momentum=0.9, dampening=0.9, weight_decay=0.1, maximize=True),
    "lion": lambda ps: Lion(ps, LR),
    "decays_matrices": lambda ps: DecaysMatrices(ps, LR),
}


# --- the comparison with float64 ------------------------------------------------------------------------------------


def twins(shapes: Sequence[tuple[int, ...]] = SHAPES) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """fp32 parameters to compile an optimizer over, and float64 ones that hold the same numbers."""
    params = parameters(0, shapes)
    return params, [nn.Parameter(p.detach().double()) for p in params]


def copy_gradients(source: Sequence[nn.Parameter], target: Sequence[nn.Parameter]) -> None:
    for a, b in zip(source, target, strict=True):
        b.grad = None if a.grad is None else a.grad.to(b.dtype)


def assert_near(optimizer: Optimizer, params: list[nn.Parameter], oracle: list[nn.Parameter], moved: float) -> None:
    """Every parameter is where float64 is, up to what its formats can lose in STEPS steps that moved it by `moved`."""
    error = max(
        float((exact_value(optimizer, p).double() - q.detach()).abs().max())
        for p, q in zip(params, oracle, strict=True)
    )
    bound = error_bound(optimizer, oracle, moved)
    assert error <= bound, f"off by {error:.3g}, may be off by {bound:.3g}"


def error_bound(optimizer: Optimizer, oracle: list[nn.Parameter], moved: float) -> float:
    """Storing the parameter STEPS + 1 times, and a relative error of each step.

    That is 12 errors of a first moment with decay 0.9 (10 of its own, two of the operations), and 50 of a second one
    with decay 0.99, which the square root halves.
    """
    s = STRATEGIES[optimizer.param_groups[0]["collage_strategy"]]
    largest = max(float(q.detach().abs().max()) for q in oracle)
    return (STEPS + 1) * UNIT[s.param] * largest + moved * (12 * UNIT[s.state] + 50 * UNIT[s.slow])


def run_both(make: Make, strategy: str, steps: int = STEPS, **settings: Any) -> tuple[Optimizer, Any, Any, float]:
    params, oracle = twins()
    start = [q.detach().clone() for q in oracle]
    optimizer = collage_neuron.compile(make(params), strategy=strategy, **settings)
    reference = make(oracle)
    for i in range(steps):
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
    moved = max(float((q.detach() - s).abs().max()) for q, s in zip(oracle, start, strict=True))
    return optimizer, params, oracle, moved


@pytest.mark.parametrize("strategy", ["plus", "full", "fp32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_trajectory_is_that_of_the_optimizer_in_float64(name: str, strategy: str) -> None:
    optimizer, params, oracle, moved = run_both(OPTIMIZERS[name], strategy)
    assert moved > 0.9 * LR * STEPS / 10
    assert_near(optimizer, params, oracle, moved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pure_bf16_is_not_within_the_bound_of_plus(name: str) -> None:
    """The bound can be missed."""
    optimizer, params, oracle, moved = run_both(OPTIMIZERS[name], "bf16")
    optimizer.param_groups[0]["collage_strategy"] = "plus"
    with pytest.raises(AssertionError, match="may be off by"):
        assert_near(optimizer, params, oracle, moved)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_states_is_one_rounding_to_bf16_from_float64_in_every_step(name: str) -> None:
    """The oracle starts each step from the stored bf16 parameter; both sides' states follow the gradients alone."""
    params, oracle = twins()
    optimizer = collage_neuron.compile(OPTIMIZERS[name](params), strategy="fp32_states")
    reference = OPTIMIZERS[name](oracle)
    for i in range(STEPS):
        for p, q in zip(params, oracle, strict=True):
            q.data.copy_(p.detach())
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
        for p, q in zip(params, oracle, strict=True):
            # 2**-8 for the rounding; the fp32 operations before it are a few 2**-24 of a parameter below 4.
            assert ((p.double() - q).abs() <= 2**-8 * q.abs() + 8 * 2**-24 * 4).all()
            assert_states_near(optimizer.state[p], reference.state[q], 64 * 2**-24)


def assert_states_near(state: dict[str, Any], oracle: dict[str, Any], relative: float) -> None:
    for key, value in oracle.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0:
            error = (state[key].double() - value).abs().max()
            assert error <= relative * value.abs().max(), key


@pytest.mark.parametrize("name", ["adamw", "adamw_amsgrad", "sgd_nesterov", "lion"])
def test_the_states_of_full_are_those_of_float64(name: str) -> None:
    """At most 1 / (1 - 0.99) errors of 2**-17 each."""
    params, oracle = twins()
    optimizer, reference = collage_neuron.compile(OPTIMIZERS[name](params), strategy="full"), OPTIMIZERS[name](oracle)
    for i in range(STEPS):
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
    for p, q in zip(params, oracle, strict=True):
        names = [k for k, v in reference.state[q].items() if isinstance(v, torch.Tensor) and v.dim() > 0]
        exact = {k: read_exact(p, optimizer.state[p], k) for k in names}
        assert names
        assert_states_near(exact, {k: reference.state[q][k] for k in names}, 100 * 2**-17)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fp32_tracks_torch_in_fp32_within_ulps(name: str) -> None:
    """Four roundings of the parameter a step may fall otherwise than torch's: 2**-24 of its magnitude each."""
    params, ordinary = parameters(), parameters()
    optimizer, reference = collage_neuron.compile(OPTIMIZERS[name](params), strategy="fp32"), OPTIMIZERS[name](ordinary)
    for i in range(STEPS):
        set_gradients(ordinary, i)
        copy_gradients(ordinary, params)
        optimizer.step()
        reference.step()
        for p, q in zip(params, ordinary, strict=True):
            ulps = (exact_value(optimizer, p).double() - q.double()).abs() / (2**-23 * q.double().abs().clamp(min=1))
            assert ulps.max() <= 2 * (i + 1)
            assert torch.equal(p, exact_value(optimizer, p).bfloat16())


@pytest.mark.parametrize(
    "strategy",
    ["bf16", "light", "plus", "full", "fp32", "fp32_states"],
)
@pytest.mark.parametrize("name", ["adamw", "sgd_momentum"])
def test_a_parameter_without_dimensions_is_one_like_the_others(name: str, strategy: str) -> None:
    """A temperature or a scale: bit for bit the same number as in a tensor of one dimension."""
    found = []
    for shape in ((), (1,)):
        p = nn.Parameter(torch.full(shape, 1.2345))
        optimizer = collage_neuron.compile(OPTIMIZERS[name]([p]), strategy=strategy)
        for grad in (0.5, 0.25, 1.5):
            p.grad = torch.full_like(p, grad)
            optimizer.step()
        found.append([bits(t).flatten() for t in (p, *optimizer.state[p].values()) if isinstance(t, torch.Tensor)])
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_parameter_without_dimensions_in_fp32_is_updated_by_a_compiled_class() -> None:
    p, q = (nn.Parameter(torch.tensor(1.2345)) for _ in range(2))
    with pytest.warns(UserWarning, match="float32"):
        optimizer = collage_neuron.compile(AdamW)([p], lr=1e-2)
    reference = AdamW([q], lr=1e-2)
    for grad in (0.5, 0.25, 1.5):
        p.grad, q.grad = torch.tensor(grad), torch.tensor(grad)
        optimizer.step()
        reference.step()
    assert abs(p.item() - q.item()) <= 3 * 2**-23


# --- schedules ------------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "LambdaLR": lambda o: LambdaLR(o, lambda i: min(1, i / 3)),  # through 0 and the integer 1
    "CosineAnnealingLR": lambda o: CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.01, total_steps=12),  # changes betas or momentum too
    "ReduceLROnPlateau": lambda o: ReduceLROnPlateau(o, patience=1),
}


@pytest.mark.parametrize("after", [False, True], ids=["before compile", "after compile"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["adamw", "adamw_lr_tensor", "sgd_momentum"])
def test_a_scheduler_drives_a_compiled_optimizer(name: str, schedule: str, after: bool) -> None:
    """Without the warning that the scheduler saw no step, which would be an error here."""
    params, oracle = twins()
    base, reference = OPTIMIZERS[name](params), OPTIMIZERS[name](oracle)
    early = None if after else SCHEDULES[schedule](base)
    optimizer = collage_neuron.compile(base, strategy="full")
    scheduler, other = early or SCHEDULES[schedule](optimizer), SCHEDULES[schedule](reference)
    for i in range(10):
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
        for s in (scheduler, other):
            s.step() if isinstance(s, LRScheduler) and not isinstance(s, ReduceLROnPlateau) else s.step(1.0)
        assert scheduled(optimizer) == scheduled(reference)
    assert_near(optimizer, params, oracle, moved=10 * 0.01 * 2)


def scheduled(optimizer: Optimizer) -> list[Any]:
    """What schedulers write."""
    group = optimizer.param_groups[0]
    return [float(group["lr"]), group.get("betas"), group.get("momentum")]


def test_a_scheduler_attached_before_compiling_sees_that_no_step_was_taken() -> None:
    """The warning is still given where it is due."""
    base = AdamW(parameters())
    scheduler = LambdaLR(base, lambda i: 1.0)
    optimizer = collage_neuron.compile(base)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()
    set_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()


# --- the loop -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["light", "plus", "full", "fp32"])
@pytest.mark.parametrize("make", [mlp, gpt])
def test_a_model_trains_like_in_fp32(make: Callable[[], nn.Module], strategy: str) -> None:
    """One fixed batch: the loss falls as it does in fp32, up to the bf16 forward's rounding of 2**-8."""
    losses = []
    for compiled in (False, True):
        model = make()
        optimizer = AdamW(model.parameters(), lr=3e-3)
        if compiled:
            collage_neuron.compile(model, optimizer, strategy=strategy)
        train(model, optimizer, [0] * 30)
        losses.append(float(backward(model, 0)))
    first = float(backward(make(), 0))
    assert losses[0] < 0.9 * first
    assert abs(losses[1] - losses[0]) <= 0.1 * (first - losses[0])


def test_clipped_gradients_are_the_gradients_of_the_step() -> None:
    params, oracle = twins()
    optimizer, reference = (
        collage_neuron.compile(OPTIMIZERS["adamw"](params), strategy="full"),
        OPTIMIZERS["adamw"](oracle),
    )
    for i in range(STEPS):
        set_gradients(params, i)
        norm = nn.utils.clip_grad_norm_(params, 0.5)
        assert norm > 0.5
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
    assert_near(optimizer, params, oracle, moved=LR * STEPS)


def test_gradients_are_accumulated_over_several_backwards() -> None:
    """Two backwards and a step are the step for the gradients' sum."""
    model = mlp()
    model, optimizer = collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-2))
    twin_model, twin = copy.deepcopy((model, optimizer))
    optimizer.zero_grad()
    backward(model, 0)
    backward(model, 1)
    for p, q in zip(model.parameters(), twin_model.parameters(), strict=True):
        assert p.grad is not None
        q.grad = p.grad.clone()
    optimizer.step()
    twin.step()
    assert differences(snapshot(optimizer), snapshot(twin)) == []
    train(twin_model, twin, [1])  # and it is not the step for the last one
    assert differences(snapshot(optimizer), snapshot(twin)) != []


def test_zero_grad_to_none_lets_a_parameter_rest_and_to_zero_does_not() -> None:
    params, oracle = twins()
    optimizer, reference = (
        collage_neuron.compile(OPTIMIZERS["adamw"](params), strategy="full"),
        OPTIMIZERS["adamw"](oracle),
    )
    set_gradients(params, 0)
    copy_gradients(params, oracle)
    for set_to_none in (True, False, False, True, False):
        for o in (optimizer, reference):
            o.step()
        before = [bits(p) for p in params]
        for o in (optimizer, reference):
            o.zero_grad(set_to_none=set_to_none)
            o.step()
        rested = all(torch.equal(bits(p), b) for p, b in zip(params, before, strict=True))
        lows = [bits(optimizer.state[p]["param_lo"]) for p in params]
        assert all(p.grad is None for p in params) == set_to_none
        if set_to_none:
            assert rested
            set_gradients(params, 0)
            copy_gradients(params, oracle)
        assert len(lows) == len(params)
    steps = [[float(o.state[p]["step"]) for p in ps] for o, ps in ((optimizer, params), (reference, oracle))]
    assert steps[0] == steps[1]
    assert_near(optimizer, params, oracle, moved=LR * STEPS)


def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_returned() -> None:
    model = mlp()
    model, optimizer = collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-2))
    twin_model, twin = copy.deepcopy((model, optimizer))
    calls = []

    def closure() -> torch.Tensor:
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        return backward(model, 0)

    loss = optimizer.step(closure)
    train(twin_model, twin, [0])
    assert calls == [True]
    assert loss == backward(mlp().bfloat16(), 0)
    assert differences(snapshot(optimizer), snapshot(twin)) == []


# --- groups and parameters ------------------------------------------------------------------------------------------


def test_groups_have_settings_of_their_own() -> None:
    params, oracle = twins()

    def make(ps: list[nn.Parameter]) -> Optimizer:
        return AdamW([{"params": ps[:1], "lr": LR / 2}, {"params": ps[1:], "weight_decay": 0.0}], LR, BETAS)

    optimizer, reference = collage_neuron.compile(make(params), strategy="full"), make(oracle)
    for i in range(STEPS):
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
    assert_near(optimizer, params, oracle, moved=LR * STEPS)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_parameter_without_a_gradient_is_not_touched(strategy: str) -> None:
    params = parameters()
    optimizer = collage_neuron.compile(OPTIMIZERS["adamw"](params), strategy=strategy)
    before = bits(params[1]), {k: bits(v) for k, v in optimizer.state[params[1]].items()}
    for i in range(3):
        set_gradients(params, i)
        params[1].grad = None
        optimizer.step()
    after = optimizer.state[params[1]]
    assert torch.equal(bits(params[1]), before[0])
    assert set(after) == set(before[1]) <= {"param_lo", "param_master"}
    assert all(torch.equal(bits(after[k]), v) for k, v in before[1].items())


def test_a_parameter_without_a_gradient_has_no_state_at_all_where_nothing_was_split() -> None:
    params = parameters(dtype=torch.bfloat16)
    optimizer = collage_neuron.compile(OPTIMIZERS["adamw"](params))
    set_gradients(params[:1], 0)
    optimizer.step()
    assert list(optimizer.state) == params[:1]


@pytest.mark.parametrize("name", ["adamw", "adamw_foreach", "sgd_momentum"])
def test_parameters_that_joined_at_different_steps_have_bias_corrections_of_their_own(name: str) -> None:
    """Frozen at first, or experts that saw no token: each is where torch's own step count puts it."""
    params, oracle = twins(((16, 8), (8,), (3, 4, 5), (7,)))
    start = [q.detach().clone() for q in oracle]
    optimizer, reference = collage_neuron.compile(OPTIMIZERS[name](params), strategy="full"), OPTIMIZERS[name](oracle)
    for i in range(STEPS):
        set_gradients(params, i)
        for j, p in enumerate(params):
            p.grad = p.grad if i % (j + 1) == 0 and i >= 3 * j else None
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
    if name != "sgd_momentum":
        counts = [[float(o.state[p]["step"]) for p in ps] for o, ps in ((optimizer, params), (reference, oracle))]
        assert counts[0] == counts[1]
        assert len(set(counts[0])) == 4
    assert min(float((q.detach() - s).abs().max()) for q, s in zip(oracle, start, strict=True)) > LR / 10
    assert_near(optimizer, params, oracle, moved=LR * STEPS)


def test_a_group_added_after_compiling_is_trained_like_the_others() -> None:
    params, oracle = twins()
    for p, q in zip(params[1:], oracle[1:], strict=True):  # as compile(model, optimizer) leaves the whole model
        p.data = p.data.bfloat16()
        q.data.copy_(p.data)
    optimizer = collage_neuron.compile(OPTIMIZERS["adamw"](params[:1]), strategy="full")
    reference = OPTIMIZERS["adamw"](oracle[:1])
    for i in range(STEPS):
        if i == 5:
            optimizer.add_param_group({"params": params[1:], "lr": LR / 2})
            reference.add_param_group({"params": oracle[1:], "lr": LR / 2})
        set_gradients(params, i)
        copy_gradients(params, oracle)
        optimizer.step()
        reference.step()
    assert optimizer.param_groups[1]["collage_strategy"] == "full"
    assert_near(optimizer, params, oracle, moved=LR * STEPS)


def test_a_group_added_after_compiling_may_name_its_strategy() -> None:
    params = parameters(dtype=torch.bfloat16)
    optimizer = collage_neuron.compile(OPTIMIZERS["adamw"](params[:1]), strategy="full")
    optimizer.add_param_group({"params": params[1:], "collage_strategy": "bf16"})
    set_gradients(params, 0)
    optimizer.step()
    assert set(optimizer.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"}


# --- hooks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before compile", "after compile"])
def test_step_hooks_run_once_around_each_step(after: bool) -> None:
    events: list[tuple[str, float]] = []
    params = parameters()
    base = OPTIMIZERS["adamw"](params)

    def note(name: str) -> Any:
        def hook(o: Optimizer, args: Any, kwargs: Any) -> None:
            assert o is base
            events.append((name, float(o.state[params[0]].get("step", 0))))

        return hook

    if after:
        collage_neuron.compile(base)
    base.register_step_pre_hook(note("pre"))
    base.register_step_post_hook(note("post"))
    if not after:
        collage_neuron.compile(base)
    for i in range(2):
        set_gradients(params, i)
        base.step()
    assert events == [("pre", 0), ("post", 1), ("pre", 1), ("post", 2)]


def test_a_step_pre_hook_may_exchange_the_closure() -> None:
    optimizer = collage_neuron.compile(OPTIMIZERS["adamw"](parameters()))
    optimizer.register_step_pre_hook(lambda o, args, kwargs: ((o,), {"closure": lambda: 7.0}))
    assert optimizer.step() == 7.0


def test_a_hook_on_a_parameter_sees_its_gradient() -> None:
    """Registered before the parameter was split."""
    model = mlp()
    seen: list[torch.dtype] = []

    def note(p: torch.Tensor) -> None:
        assert p.grad is not None
        seen.append(p.grad.dtype)

    first(model).register_post_accumulate_grad_hook(note)
    model, optimizer = collage_neuron.compile(model, AdamW(model.parameters()))
    train(model, optimizer, range(2))
    assert seen == [torch.bfloat16] * 2


@pytest.mark.parametrize("after", [False, True], ids=["before compile", "after compile"])
def test_state_dict_hooks_run(after: bool) -> None:
    events: list[str] = []
    params = parameters()
    optimizer = OPTIMIZERS["adamw"](params)
    if after:
        collage_neuron.compile(optimizer)
    optimizer.register_state_dict_pre_hook(lambda o: events.append("save"))
    optimizer.register_state_dict_post_hook(lambda o, saved: saved | {"note": "mine"})
    optimizer.register_load_state_dict_pre_hook(lambda o, saved: events.append(f"load {saved.get('note')}"))
    optimizer.register_load_state_dict_post_hook(lambda o: events.append("loaded"))
    if not after:
        collage_neuron.compile(optimizer)
    set_gradients(params, 0)
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    assert events == ["save", "load mine", "loaded"]


@pytest.mark.parametrize("strategy", ["full", "fp32"])
def test_a_load_hook_may_change_what_is_loaded(strategy: str) -> None:
    """FSDP and others rename or resize states there."""

    def cleared(o: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
        saved = copy.deepcopy(saved)
        saved["state"][0]["exp_avg"].zero_()
        return saved

    params = parameters()
    optimizer = collage_neuron.compile(OPTIMIZERS["adamw"](params), strategy=strategy)
    set_gradients(params, 0)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.register_load_state_dict_pre_hook(cleared)
    optimizer.load_state_dict(saved)
    assert not optimizer.state[params[0]]["exp_avg"].any()
    assert optimizer.state[params[1]]["exp_avg"].any()


# --- a step that must change nothing --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32 model", "bf16 model"])
@pytest.mark.parametrize(("strategy", "arithmetic"), MODES)
@pytest.mark.parametrize("name", ["adamw", "adamw_amsgrad", "sgd_nesterov"])
def test_a_step_with_zero_rate_and_zero_gradients_changes_no_bit(
    name: str, strategy: str, arithmetic: str, dtype: torch.dtype
) -> None:
    """torch's distributed checkpoints take such a step to make the states; weight decay is on."""
    (p,) = parameters(0, ((4096,),), dtype)
    optimizer = collage_neuron.compile(OPTIMIZERS[name]([p]), strategy=strategy, arithmetic=arithmetic)
    optimizer.param_groups[0]["lr"] = 0.0
    before = {"param": bits(p)} | {k: bits(v) for k, v in optimizer.state[p].items()}
    words = ("bf16", "fp32_states", "stochastic", "stochastic_states")
    assert (len(before) > 1) == (dtype == torch.float32 and strategy not in words)
    for _ in range(2):
        p.grad = torch.zeros_like(p)
        optimizer.step()
    after = {"param": p} | optimizer.state[p]
    assert all(torch.equal(bits(after[k]), v) for k, v in before.items())
    if "param_lo" in after and "param_lo" not in before:  # the low word of a parameter that already was bf16
        assert not after["param_lo"].any()


# --- torch_xla ------------------------------------------------------------------------------------------------------


def test_the_same_loop_runs_on_xla(xla: torch.device) -> None:
    torch_xla = pytest.importorskip("torch_xla")
    losses: dict[str, list[float]] = {}
    for device in (torch.device("cpu"), xla):
        model = mlp().to(device)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        scheduler = CosineAnnealingLR(optimizer, 10)
        model, optimizer = collage_neuron.compile(model, optimizer)
        losses[device.type] = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = backward(model, 0)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            torch_xla.sync()
            losses[device.type].append(float(loss))
            del loss
    assert losses["xla"][-1] < losses["xla"][0]
    # Both forwards round to bf16, in other orders: a loss below 1 may differ by some 2**-8.
    assert losses["xla"] == pytest.approx(losses["cpu"], abs=4 * 2**-8)


def test_the_trajectory_on_xla_is_that_of_the_optimizer_in_float64(xla: torch.device) -> None:
    torch_xla = pytest.importorskip("torch_xla")
    start, oracle = twins()
    params = [nn.Parameter(p.detach().to(xla)) for p in start]
    optimizer, reference = (
        collage_neuron.compile(OPTIMIZERS["adamw"](params), strategy="full"),
        OPTIMIZERS["adamw"](oracle),
    )
    for i in range(STEPS):
        set_gradients(oracle, i)
        for p, q in zip(params, oracle, strict=True):
            assert q.grad is not None
            p.grad = q.grad.bfloat16().to(xla)
        optimizer.step()
        reference.step()
        torch_xla.sync()
    assert_near(optimizer, [on_host(optimizer, p) for p in params], oracle, moved=LR * STEPS)


def on_host(optimizer: Optimizer, p: nn.Parameter) -> nn.Parameter:
    """A CPU twin of a parameter, known to the optimizer with the same state."""
    twin = nn.Parameter(p.detach().cpu())
    optimizer.state[twin] = {k: v.cpu() for k, v in optimizer.state[p].items()}
    optimizer.param_groups[0]["params"].append(twin)
    return twin
