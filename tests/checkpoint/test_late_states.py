"""States that a later step makes, and such as torch's own classes have not, go through checkpoints as in torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.checkpoint import get_fp32_state_dict

pytestmark = pytest.mark.filterwarnings("ignore::collage_neuron.RunsAsWritten")


def of_all(optimizer: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    """A number that all parameters share."""
    whole: dict[str, Any] = optimizer.state["all"]  # type: ignore[index]
    whole["sum"] = 0.5 * whole.get("sum", 0.0) + 1.0
    return whole["sum"] * torch.ones_like(p)


def in_a_list(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    (kept,) = state.setdefault("list", [torch.zeros_like(p)])
    return kept.mul_(0.9).add_(p.grad)


def masked(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    return p.grad * state.setdefault("mask", p.grad > 0)


def counted(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    return p.grad * state.setdefault("count", torch.zeros(p.shape, dtype=torch.int64)).add_(1)


def history(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    kept = state.setdefault("history", torch.zeros(3, *p.shape))
    kept.copy_(kept.roll(1, 0))
    kept[0] = p.grad
    return kept.sum(0)


def numbered(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    return state.setdefault(7, torch.zeros_like(p)).mul_(0.9).add_(p.grad)


def scaled(_: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    state["lr_scale"] = 0.9 * state.get("lr_scale", 1.0)
    return p.grad * state["lr_scale"]


def shared(optimizer: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    """One tensor is a state of both parameters."""
    first = optimizer.state[optimizer.param_groups[0]["params"][0]]
    kept = state.setdefault("shared", first.setdefault("shared", torch.zeros(2)))
    return p.grad * kept.mul_(0.5).add_(p.grad.sum()).sum()


def neighbours(optimizer: Optimizer, p: Any, state: dict[Any, Any]) -> Any:
    """All parameters and their states, in each state."""
    held = state.setdefault("held", [*optimizer.param_groups[0]["params"]])
    state["moments"] = [optimizer.state[q].get("m") for q in held]
    return p.grad


class Late(Optimizer):
    """Momentum, and from its third step on something else."""

    def __init__(self, params: Any, late: Callable[..., Any]) -> None:
        super().__init__(params, {"lr": 0.01})
        self.late = late

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["t"] = state.get("t", 0) + 1
            update = state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            p.sub_(update, alpha=0.01)
            if state["t"] > 2:
                p.sub_(self.late(self, p, state), alpha=0.01)


def made(late: Any, strategy: str | None) -> tuple[Any, Any]:
    model = nn.Linear(4, 3)
    optimizer = Late(model.parameters(), late)
    if strategy is None:
        return model, optimizer
    return collage_neuron.compile(model, optimizer, strategy=strategy, verbose=False)


def run(late: Any, strategy: str | None, load: Callable[[Any, Any, Any, Any], object]) -> list[torch.Tensor]:
    """The weights of a run that goes on in another optimizer after four steps."""
    torch.manual_seed(0)
    model, optimizer = made(late, strategy)
    other = made(late, strategy)
    for step in range(8):
        if step == 4:
            load(model, optimizer, *other)
            model, optimizer = other
        for i, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(10 * step + i)
            p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        optimizer.step()
    return [p.detach() if strategy is None else collage_neuron.exact_value(optimizer, p) for p in model.parameters()]


def loaded(model: Any, optimizer: Any, other: Any, its: Any) -> None:
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))


LATE = [of_all, in_a_list, masked, counted, history, numbered, scaled, shared]


@pytest.mark.parametrize("strategy", ["fp32", "split433"])
@pytest.mark.parametrize("late", LATE)
def test_a_run_goes_on_as_in_plain_torch(late: Any, strategy: str) -> None:
    for plain, ours in zip(run(late, None, loaded), run(late, strategy, loaded), strict=True):
        torch.testing.assert_close(ours, plain, rtol=0.0, atol=1e-6 if strategy == "fp32" else 1e-4)


@pytest.mark.parametrize("late", [*LATE, neighbours])
def test_an_export_has_what_plain_torch_would_have(late: Any) -> None:
    exports: list[Any] = []

    def exported(model: Any, optimizer: Any, *_: Any) -> None:
        exports.append(get_fp32_state_dict(model, optimizer) if exports else (None, optimizer.state_dict()))
        raise InterruptedError

    for strategy in (None, "fp32"):
        with pytest.raises(InterruptedError):
            run(late, strategy, exported)
    (_, plain), (_, ours) = exports
    for key, state in plain["state"].items():
        torch.testing.assert_close(dict(ours["state"][key]), dict(state), rtol=0.0, atol=1e-6)
