"""Groups, hooks and devices of training scripts, and steps that must change nothing."""

from __future__ import annotations

import pytest
import torch
from models import MODES, bits, first, mlp, parameters, set_gradients, train
from scripts_in_float64 import OPTIMIZERS
from torch import nn
from torch.optim import AdamW

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
