"""How steps as written are called, and what they return: closures, their number, other arguments, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from as_written import Written, equal, parameters, values
from running import compiled_only
from torch import Tensor
from torch.nn import Parameter
from torch.optim import LBFGS, Optimizer

import collage_neuron
from collage_neuron.errors import RunsAsWritten
from collage_neuron.states.bookkeeping import bookkeeping

# --- how steps as written are called: closures, their number, other arguments and returned values, as in plain torch --

SHAPES = ((6, 5), (5,))


class Own(Optimizer):
    """Descent with a momentum; the norm that Python reads prevents capture."""

    def __init__(self, params: Any, lr: float = 0.05, rho: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    @torch.no_grad()
    def descend(self, factor: float = 1.0) -> float:
        norms = 0.0
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 0.5)
                norms += float(m.norm())
                p.sub_(m, alpha=factor * group["lr"] / (1 + norms))
        return norms


class TwoPhases(Own):
    """SAM: up along the gradient, and the step from there with the gradient of that place."""

    @torch.no_grad()
    def first_step(self, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad, alpha=group["rho"] / float(p.grad.norm()))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(self.state[p]["old"])
        self.descend()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.first_step(zero_grad=True)
        torch.enable_grad()(closure)()
        self.second_step()


class Clears(Own):
    """Clears gradients itself before it calls its closure."""

    def step(self, closure: Any = None) -> Any:
        self.zero_grad()
        loss = torch.enable_grad()(closure)()
        self.descend()
        return loss


class OfLoss(Own):
    def step(self, loss: Any) -> None:  # type: ignore[override]
        self.descend(float(loss))


class Searches(Own):
    """A line search: as many evaluations as it takes."""

    def step(self, closure: Any, factor: float = 1.0, *, most: int = 3) -> Any:  # type: ignore[override]
        evaluate = torch.enable_grad()(closure)
        first = evaluate()
        with torch.no_grad():
            for k in range(most):
                norms = self.descend(factor / 2**k)
                if (last := evaluate()) < first:
                    break
        return {"first": first, "last": last, "norms": norms, "factor": factor}


class Holds(Searches):
    """Holds parts of parameters while it searches, and writes them afterwards; a state has a parameter's memory."""

    def step(self, closure: Any, factor: float = 1.0, *, most: int = 3) -> Any:  # type: ignore[override]
        for p in (params := self.param_groups[0]["params"]):
            p.data = self.state[p].get("slow", p.data)
            self.state[p].setdefault("slow", p.data.clone())
        parts = [p.detach().flatten()[1:3] for p in params]
        found = super().step(closure, factor, most=most)
        for x in parts:
            x.mul_(0.5)
        return found


def problem(
    make: Callable[[list[Parameter]], Optimizer], compiled: bool, **settings: Any
) -> tuple[Any, Any, list[int]]:
    """An optimizer, and a closure of gradients that depend on what bf16 has of the weights, which counts its calls."""
    g = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if compiled else torch.float32
    params = [Parameter(torch.randn(s, generator=g).bfloat16().to(dtype)) for s in SHAPES]
    optimizer = make(params)
    if compiled:
        optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False, **settings)
    calls: list[int] = []

    def closure() -> Tensor:
        calls.append(1)
        for p in params:
            x = p.detach().bfloat16()
            new = (x / 4 + 1).to(p.dtype)
            p.grad = new if p.grad is None else p.grad + new
        return torch.stack([p.detach().bfloat16().float().square().sum() for p in params]).sum()

    return optimizer, closure, calls


def cleared(optimizer: Any, closure: Any) -> Callable[[], Any]:
    def clears() -> Any:
        optimizer.zero_grad()
        return closure()

    return clears


def called(optimizer: Any, closure: Any, i: int) -> Any:
    """One step, each in the way that its class is used."""
    if isinstance(optimizer, OfLoss):
        optimizer.zero_grad()
        return optimizer.step(closure())
    if isinstance(optimizer, TwoPhases):
        optimizer.zero_grad()
        closure()
        return optimizer.step(closure)
    if isinstance(optimizer, Clears):
        return optimizer.step(closure)
    if isinstance(optimizer, Searches):
        clears = cleared(optimizer, closure)
        return optimizer.step(clears, 0.5, most=2) if i % 2 else optimizer.step(closure=clears, factor=0.25)
    return optimizer.step(cleared(optimizer, closure))


MAKES = (TwoPhases, Clears, OfLoss, Searches, Holds, LBFGS)


@pytest.mark.parametrize("make", MAKES)
def test_each_call_gives_what_it_gives_in_fp32_with_as_many_evaluations(make: Any) -> None:
    own, plain = problem(make, True), problem(make, False)
    for i in range(4):
        found, wanted = (called(optimizer, closure, i) for optimizer, closure, _ in (own, plain))
        assert found == wanted
        assert len(own[2]) == len(plain[2]), i
    params, others = ([p for group in x[0].param_groups for p in group["params"]] for x in (own, plain))
    found, wanted = values(own[0], params), [p.detach() for p in others]
    assert equal(found, wanted) or not bookkeeping(own[0]).as_written
    for x, y in zip(found, wanted, strict=True):  # what is launched rounds in another order
        torch.testing.assert_close(x, y, rtol=2**-20, atol=2**-22)


@pytest.mark.parametrize("make", [Clears, Searches, LBFGS])
def test_where_steps_may_be_skipped_too(make: Any) -> None:
    """The closure is evaluated before the step, and counts as the step's first call where nothing has changed since."""
    own, plain = problem(make, True, nonfinite="skip"), problem(make, False)
    for i in range(3):
        assert called(*own[:2], i) == called(*plain[:2], i)
        assert len(own[2]) == len(plain[2]) + (make is Clears) * (i + 1)
    params, others = ([p for group in x[0].param_groups for p in group["params"]] for x in (own, plain))
    assert equal(values(own[0], params), [p.detach() for p in others])


@compiled_only()
def test_other_arguments_need_a_step_as_written() -> None:
    optimizer, closure, _ = problem(lambda params: torch.optim.SGD(params, lr=0.1), True)
    with pytest.raises(RunsAsWritten, match=r"takes a closure only, got factor=0\.5"):
        optimizer.step(closure, factor=0.5)


# --- `step()` returns what the user's code returns: a captured step has nothing but the loss, and others run on copies


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


class Report(NamedTuple):
    """Several results."""

    loss: Any
    norm: Any


class Reports(Descent):
    def result(self, loss: Any, params: list[Any]) -> Any:
        return Report(loss, float(torch.stack([p.grad.norm() for p in params]).norm()))


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
