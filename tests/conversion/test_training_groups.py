"""Groups, hooks and devices of training scripts, and steps that must change nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import MODES, backward, bits, first, mlp, parameters, set_gradients, train
from scripts_in_float64 import LR, OPTIMIZERS, STEPS, assert_near, copy_gradients, twins
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import collage_neuron
from collage_neuron import STRATEGIES


@pytest.mark.sampled(of=3)
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


def test_a_parameter_that_another_optimizer_has_now_is_not_written_from_outside() -> None:
    """That would be a warning."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(16, 16).bfloat16()) for _ in range(3)]
    first, other = (collage_neuron.compile(AdamW([p], lr=0.1), strategy="plus") for p in params[:2])
    other.add_param_group({"params": params[2:]})
    for i in range(8):
        if i == 3:
            moved = other.param_groups.pop()["params"]
            first.add_param_group({"params": moved})
        set_gradients(params, i)
        first.step()
        other.step()


def test_a_group_added_after_compiling_may_name_its_strategy() -> None:
    params = parameters(dtype=torch.bfloat16)
    optimizer = collage_neuron.compile(OPTIMIZERS["adamw"](params[:1]), strategy="full")
    optimizer.add_param_group({"params": params[1:], "collage_strategy": "bf16"})
    set_gradients(params, 0)
    optimizer.step()
    assert set(optimizer.state[params[1]]) == {"step", "exp_avg", "exp_avg_sq"}


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


@pytest.mark.sampled(of=8)
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
