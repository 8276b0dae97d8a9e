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


def _learning_rate(params: Any, optimizer: Any) -> None:
    optimizer.param_groups[1]["lr"] = 0.125


def _gradient_in_a_state(params: Any, optimizer: Any) -> None:
    params[0].grad = optimizer.state[params[1]]["exp_avg"]  # written by the update of another parameter


def _gradient_in_the_parameter(params: Any, optimizer: Any) -> None:
    params[2].grad = params[2].detach()


def _two_gradients_in_one_place(params: Any, optimizer: Any) -> None:
    params[0].grad = params[1].grad


def _strided_gradient(params: Any, optimizer: Any) -> None:
    params[1].grad = params[1].grad.T.contiguous().T


def _fp32_gradient(params: Any, optimizer: Any) -> None:
    params[1].grad = None
    params[1].grad = torch.zeros(4, 4, dtype=torch.bfloat16)
    params[1].grad.data = torch.full((4, 4), 0.1)


def _no_gradient(params: Any, optimizer: Any) -> None:
    params[0].grad = None


def _states_exchanged(params: Any, optimizer: Any) -> None:
    one, other = optimizer.state[params[0]], optimizer.state[params[1]]
    one["exp_avg"], other["exp_avg"] = other["exp_avg"], one["exp_avg"]


def _state_of_two(params: Any, optimizer: Any) -> None:
    optimizer.state[params[0]]["exp_avg"] = optimizer.state[params[1]]["exp_avg"]


def _parameter_elsewhere(params: Any, optimizer: Any) -> None:
    params[3].data = params[3].data.clone()


CHANGES = (
    _gradients_elsewhere, _learning_rate, _gradient_in_a_state, _gradient_in_the_parameter, _two_gradients_in_one_place,
    _strided_gradient, _fp32_gradient, _no_gradient, _states_exchanged, _state_of_two, _parameter_elsewhere,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_steps_after_a_change_have_the_bits_of_the_reference(change: Callable[..., None]) -> None:
    ours, theirs = run("native"), run("reference")
    for params, optimizer in (ours, theirs):
        change(params, optimizer)
        for _ in range(2):
            optimizer.step()
    for p, q in zip(ours[0], theirs[0], strict=True):
        assert torch.equal(p, q)
        for mine, other in zip(ours[1].state[p].values(), theirs[1].state[q].values(), strict=True):
            assert torch.equal(mine, other)
