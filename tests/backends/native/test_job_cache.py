"""A step takes the layout of an earlier one only where that has the bits of the reference."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import collage_neuron

pytest.importorskip("llvmlite")


def run(backend: str, steps: int = 3) -> tuple[list[torch.nn.Parameter], Any]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(4, 4, generator=generator).bfloat16()) for _ in range(4)]
    groups: list[Any] = [{"params": params[:3]}, {"params": params[3:], "weight_decay": 0.5}]
    optimizer = collage_neuron.compile(torch.optim.AdamW(groups, lr=1e-2), strategy="plus", backend=backend)
    for p in params:
        p.grad = torch.randn(4, 4, generator=generator).bfloat16()
    for _ in range(steps):
        optimizer.step()
    return params, optimizer


def _gradients_elsewhere(params: Any, optimizer: Any) -> None:
    for p in params:
        p.grad = p.grad.clone() * 2


def _fp32_gradient(params: Any, optimizer: Any) -> None:
    params[1].grad = None
    params[1].grad = torch.zeros(4, 4, dtype=torch.bfloat16)
    params[1].grad.data = torch.full((4, 4), 0.1)


def _states_exchanged(params: Any, optimizer: Any) -> None:
    one, other = optimizer.state[params[0]], optimizer.state[params[1]]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


CHANGES: dict[str, Callable[[Any, Any], object]] = {
    "gradients elsewhere": _gradients_elsewhere,
    "learning rate": lambda ps, o: o.param_groups[1].update(lr=0.125),
    # Written by the update of another parameter.
    "gradient in a state": lambda ps, o: setattr(ps[0], "grad", o.state[ps[1]]["exp_avg"]),
    "gradient in the parameter": lambda ps, o: setattr(ps[2], "grad", ps[2].detach()),
    "two gradients in one place": lambda ps, o: setattr(ps[0], "grad", ps[1].grad),
    "strided gradient": lambda ps, o: setattr(ps[1], "grad", ps[1].grad.T.contiguous().T),
    "fp32 gradient": _fp32_gradient,
    "no gradient": lambda ps, o: setattr(ps[0], "grad", None),
    "states exchanged": _states_exchanged,
    "state of two": lambda ps, o: o.state[ps[0]].update(exp_avg=o.state[ps[1]]["exp_avg"]),
    "parameter elsewhere": lambda ps, o: setattr(ps[3], "data", ps[3].data.clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_steps_after_a_change_have_the_bits_of_the_reference(change: Callable[..., object]) -> None:
    ours, theirs = run("native"), run("reference")
    for params, optimizer in (ours, theirs):
        change(params, optimizer)
        for _ in range(2):
            optimizer.step()
    for p, q in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(p, q)
        for mine, other in zip(ours[1].state[p].values(), theirs[1].state[q].values(), strict=True):
            assert torch.equal(mine, other)
