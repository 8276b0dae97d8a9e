"""Groups, hooks and devices of training scripts, and steps that must change nothing."""

from __future__ import annotations

import pytest
import torch
from models import MODES, backward, bits, first, mlp, parameters, set_gradients, train
from scripts_in_float64 import OPTIMIZERS
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

import collage_neuron


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
