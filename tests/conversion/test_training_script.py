"""An ordinary training script still works: schedulers, hooks, groups, and steps that must change nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from models import MODES, backward, bits, first, gpt, mlp, parameters, set_gradients, train
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR

import collage_neuron


def test_a_scheduler_attached_before_compiling_sees_that_no_step_was_taken() -> None:
    """The warning is still given where it is due."""
    base = AdamW(parameters())
    scheduler = LambdaLR(base, lambda i: 1.0)
    optimizer = collage_neuron.compile(base)
    with pytest.warns(UserWarning, match="lr_scheduler.step"):
        scheduler.step()
    set_gradients(optimizer.param_groups[0]["params"], 0)
    optimizer.step()


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
@pytest.mark.parametrize(
    "make",
    [
        partial(AdamW, weight_decay=0.1),
        partial(AdamW, weight_decay=0.1, amsgrad=True),
        partial(SGD, momentum=0.9, nesterov=True, weight_decay=0.1),
    ],
)
def test_a_step_with_zero_rate_and_zero_gradients_changes_no_bit(
    make: Callable[..., torch.optim.Optimizer], strategy: str, arithmetic: str, dtype: torch.dtype
) -> None:
    """torch's distributed checkpoints take such a step to make the states; weight decay is on."""
    (p,) = parameters(0, ((4096,),), dtype)
    optimizer = collage_neuron.compile(make([p]), strategy=strategy, arithmetic=arithmetic)
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
