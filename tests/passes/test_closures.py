"""Closures: what `step` makes of a closure's loss, or of its presence, a compiled step does too; other arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import collage_neuron
from collage_neuron import UnsupportedUpdate
from collage_neuron.runtime.closures import ATTRIBUTE

pytestmark = pytest.mark.usefixtures("rejecting")

# Third-party code is rarely typed: `Any` here keeps the spellings as they are found.


class Descent(Optimizer):
    """Momentum, with what subclasses make of the loss before."""

    k: Any = 1.0

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr, "scale": 1.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        if loss is not None:
            self.look(loss)
        self.update()
        return loss

    def look(self, loss: Any) -> None:
        pass

    def update(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.mul_(0.5).add_(p.grad)
                    p.add_(m * self.k, alpha=-group["lr"])


class Presence(Descent):
    def look(self, loss: Any) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.75


class Factor(Descent):
    def look(self, loss: Any) -> None:
        self.k = float(loss)


class Tensor0(Descent):
    def look(self, loss: Any) -> None:
        self.k = loss.sqrt() * 0.5


class Written(Descent):
    """Writes to the loss that it was given: no other recording may see that."""

    def look(self, loss: Any) -> None:
        self.k = loss.mul_(0.5).item()


class Bold(Descent):
    """The bold driver: another rate, and another update, when the loss went up."""

    last = float("inf")

    def look(self, loss: Any) -> None:
        for group in self.param_groups:
            group["lr"] *= 1.05 if loss < self.last else 0.5
        self.went_up, self.last = bool(loss > self.last), float(loss)

    def update(self) -> None:
        super().update()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and getattr(self, "went_up", False):
                    p.mul_(0.875)


class Counts(Descent):
    """What it changes on the host is changed once, and by the loss."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.seen: list[Any] = [object]

    def look(self, loss: Any) -> None:
        self.seen.append(float(loss))
        self.k = sum(x for x in self.seen if isinstance(x, float)) / len(self.seen)


class KeywordOnly(Factor):
    @torch.no_grad()
    def step(self, *, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class OtherName(Factor):
    @torch.no_grad()
    def step(self, loss_of: Any = None) -> Any:
        return super().step(loss_of)


LOSSES = [1.0, 0.75, 0.8125, 0.5, 0.625, 0.25]


def trained(make: Callable[[Any], Optimizer], compile: bool, groups: int, steps: range, device: str = "cpu") -> Any:
    """Parameters after steps of which every third has no closure; the optimizer; what the steps returned."""
    made = torch.Generator().manual_seed(1)
    params = [nn.Parameter(torch.randn(3, 5, generator=made).to(device)) for _ in range(4)]
    optimizer = make([{"params": params[i::groups]} for i in range(groups)])
    if compile:
        collage_neuron.compile(optimizer, strategy="fp32")
    returned: list[Any] = []
    for i in steps:

        def closure(i: int = i) -> Any:
            drawn = torch.Generator().manual_seed(100 + i)
            for p in params:
                p.grad = torch.randn(p.shape, generator=drawn).to(torch.bfloat16).to(p.device, p.dtype)
            return torch.tensor(LOSSES[i % len(LOSSES)], device=device, requires_grad=True) * 1

        if i % 3 == 2:
            closure()
            returned.append(optimizer.step())
        elif isinstance(optimizer, KeywordOnly):
            returned.append(optimizer.step(closure=closure))
        else:
            returned.append(optimizer.step(closure))
    return params, optimizer, [None if x is None else x.item() for x in returned]


def assert_equal_runs(make: Callable[[Any], Optimizer], groups: int, device: str = "cpu") -> None:
    plain, there, wanted = trained(make, False, groups, range(9), "cpu")
    params, optimizer, returned = trained(make, True, groups, range(9), device)
    for p, q in zip(params, plain, strict=True):
        exact = collage_neuron.exact_value(optimizer, p).cpu()
        torch.testing.assert_close(exact, q.detach(), rtol=9 * 2**-16, atol=9 * 2**-16)
    assert [g["lr"] for g in optimizer.param_groups] == pytest.approx([g["lr"] for g in there.param_groups])
    assert returned == (wanted if make is not Written else [x and 2 * x for x in wanted])
    assert ATTRIBUTE not in vars(optimizer)


CASES = [Descent, Presence, Factor, Tensor0, Written, Bold, Counts, KeywordOnly, OtherName]


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("make", CASES)
def test_the_loss_does_what_it_does_in_fp32(make: Callable[[Any], Optimizer], groups: int) -> None:
    assert_equal_runs(make, groups)


def test_what_the_loss_changes_on_the_host_is_changed_once() -> None:
    _, optimizer, _ = trained(Counts, True, 2, range(3))
    assert optimizer.seen == [object, 1.0, 0.75]


@pytest.mark.parametrize("make", [Presence, Factor, Tensor0])
def test_a_loss_on_xla(make: Callable[[Any], Optimizer], xla: torch.device) -> None:
    assert_equal_runs(make, 1, "xla")


def test_a_loss_that_is_only_returned_is_not_waited_for(xla: torch.device) -> None:
    met = pytest.importorskip("torch_xla.debug.metrics")
    params, optimizer, _ = trained(Descent, True, 1, range(2), "xla")
    x = torch.ones((), device=xla)

    def closure() -> torch.Tensor:
        for p in params:
            p.grad = torch.ones_like(p)
        return x * 3

    met.clear_all()
    loss = optimizer.step(closure)
    assert met.metric_data("TransferFromDeviceTime") is None
    assert not met.counter_value("aten::_local_scalar_dense")
    assert loss.item() == 3


class PerParameter(Presence):
    """With a closure it advances the rate from parameter to parameter: what a recording cannot show."""

    def look(self, loss: Any) -> None:
        for group in self.param_groups:
            for _ in group["params"]:
                group["lr"] *= 0.5


def test_a_step_is_checked_again_when_it_first_has_a_closure() -> None:
    with pytest.raises(UnsupportedUpdate, match=r"PerParameter.*advances param_groups\[0\]\['lr'\]"):
        trained(PerParameter, True, 1, range(1))


class Sharp(Descent):
    """SAM, where it is given a closure."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad, alpha=0.05)
            closure()
        return super().step()


class CallsTwice(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            closure()
        return super().step(closure)


class Catches(CallsTwice):
    """Catches what its closure raises."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        try:
            return super().step(closure)
        except UnsupportedUpdate:
            return None


class Clears(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is not None:
            self.zero_grad()
        return super().step(closure)


REJECTED = {
    CallsTwice: "CallsTwice.* calls its closure a second time, .*test_closures.py",
    Catches: "calls its closure a second time",
    Sharp: "calls its closure after operations on the parameters",
    Clears: "calls its closure after operations on the parameters, their gradients",
}


@pytest.mark.parametrize("make", REJECTED)
def test_closures_that_need_other_weights_are_rejected(make: Callable[[Any], Optimizer]) -> None:
    params, optimizer, _ = trained(make, True, 1, range(0))
    before = [p.detach().clone() for p in params]
    for p in params:
        p.grad = torch.ones_like(p)
    with pytest.raises(UnsupportedUpdate, match=REJECTED[make]):  # type: ignore[index]
        optimizer.step(lambda: torch.tensor(1.0))
    assert all(map(torch.equal, params, before))
    assert ATTRIBUTE not in vars(optimizer)
    optimizer.step()  # without a closure it is an ordinary step
    assert not any(map(torch.equal, params, before))


class Keeps(Descent):
    """Keeps its closure, and calls it when there is none."""

    kept: Any = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        if closure is None and self.kept is not None:
            self.kept()
        self.kept = closure
        return super().step()


def test_a_closure_that_was_kept_is_rejected_when_it_is_called_later() -> None:
    with pytest.raises(UnsupportedUpdate, match="calls its closure after the step has returned"):
        trained(Keeps, True, 1, range(3))


# --- other arguments --------------------------------------------------------------------------------------------------


class Scaled(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None, scale: float = 1.0) -> Any:
        self.k = scale
        return super().step(closure)


class Wants(Descent):
    def step(self, scale: float, closure: Any = None) -> Any:  # type: ignore[override]
        self.k = scale
        return super().step(closure)


@pytest.mark.parametrize(
    ("args", "kwargs", "named"),
    [((), {"scale": 2.0}, "scale=2.0"), ((None, 3.0), {}, "scale=3.0"), ((2.0,), {}, "closure=2.0")],
)
@pytest.mark.parametrize("alone", [False, True])
def test_an_argument_of_step_is_rejected_with_advice(alone: bool, args: Any, kwargs: Any, named: str) -> None:
    model = nn.Linear(3, 4)
    optimizer = Scaled(model.parameters())
    collage_neuron.compile(model, *([] if alone else [optimizer]))
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(TypeError, match=rf"a compiled Scaled takes a closure only, got {named}; put it into param_gro"):
        optimizer.step(*args, **kwargs)
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.step()
    assert not any(map(torch.equal, model.parameters(), before))


def test_a_required_argument_of_step_is_rejected_by_compile() -> None:
    params = [nn.Parameter(torch.ones(3))]
    for target in (Wants, Wants(params)):
        with pytest.raises(UnsupportedUpdate, match=r"Wants.step\(\) requires the argument 'scale', .* attribute"):
            collage_neuron.compile(target)
    assert params[0].dtype == torch.float32
