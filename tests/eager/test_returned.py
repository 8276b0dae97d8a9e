"""`step()` returns what the user's code returns: a captured step has nothing but the loss, and others run on copies."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from as_written import Written, parameters
from running import compiled_only
from torch import Tensor
from torch.optim import Optimizer

import collage_neuron


class Descent(Written):
    """Momentum, which can be captured but for what `step` returns."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        p.sub_(m.mul_(0.5).add_(g), alpha=group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        return self.result(loss, [p for group in self.param_groups for p in group["params"]])

    def result(self, loss: Any, params: list[Any]) -> Any:
        return loss


class Norm(Descent):
    def result(self, loss: Any, params: list[Any]) -> Any:
        return torch.stack([p.grad.norm() for p in params]).norm()


class Report(NamedTuple):
    """Several results."""

    loss: Any
    norm: Any


class Reports(Norm):
    def result(self, loss: Any, params: list[Any]) -> Any:
        return Report(loss, float(super().result(loss, params)))


class Copies(Descent):
    """Parameters, a gradient, a state, a view, and another tensor."""

    def result(self, loss: Any, params: list[Any]) -> Any:
        p = params[0]
        self.own = torch.ones(3)
        return {"params": params, "grad": p.grad, "own": (self.own, self), "m": self.state[p]["m"], "part": p[:1]}


def stepped(cls: Any, dtype: torch.dtype, **settings: Any) -> tuple[Any, list[Any], Optimizer]:
    """What three steps with gradients return, the last one with a closure; the parameters; the optimizer."""
    params = parameters(dtype)
    optimizer = cls(params)
    if settings:
        optimizer = collage_neuron.compile(optimizer, **settings)
    returned = []
    for i in range(3):
        for j, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(9 * i + j)).bfloat16().to(dtype)
        returned.append(optimizer.step(lambda: LOSS) if i == 2 else optimizer.step())
    return returned, params, optimizer


LOSS = torch.tensor(0.75)


@pytest.mark.parametrize("cls", [Norm, Reports])
@compiled_only()
def test_a_step_returns_what_it_returns_in_fp32(cls: Any) -> None:
    wanted, _, _ = stepped(cls, torch.float32)
    found, _, _ = stepped(cls, torch.bfloat16, strategy="fp32")
    assert repr(found) == repr(wanted)
    assert wanted[2] is not None


@pytest.mark.parametrize("cls", [Descent, Reports])
def test_the_loss_is_the_one_that_the_closure_returned(cls: Any) -> None:
    returned, _, _ = stepped(cls, torch.bfloat16, strategy="plus")
    last = returned[2]
    assert (last if cls is Descent else last.loss) is LOSS


def test_what_is_returned_is_the_optimizers_own() -> None:
    returned, params, optimizer = stepped(Copies, torch.bfloat16, strategy="fp32")
    found = returned[0]
    assert all(x is p for x, p in zip(found["params"], params, strict=True))
    assert found["own"][1] is optimizer
    assert returned[2]["own"][0] is optimizer.own
    wanted, _, _ = stepped(Copies, torch.float32)
    drawn = torch.randn(params[0].shape, generator=torch.Generator().manual_seed(0)).bfloat16().float()
    assert torch.equal(found["grad"], drawn)  # of the first step: it has its own memory
    assert torch.equal(returned[2]["part"], wanted[2]["part"])
    assert torch.equal(returned[2]["m"], wanted[2]["m"])
