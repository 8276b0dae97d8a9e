"""Code around an optimizer that reads and writes weights: wrappers such as Lookahead."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from models import parameters, set_gradients
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron import exact_value, set_exact_value

pytestmark = pytest.mark.usefixtures("rejecting")


class Lookahead(Optimizer):
    """Zhang et al., 2019: every fifth step, halfway back to where the last five began."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__([p for g in optimizer.param_groups for p in g["params"]], {})
        self.kept = [optimizer]
        self.taken = 0
        self.slow = [self.read(p) for p in self.params()]

    def params(self) -> list[nn.Parameter]:
        return [p for g in self.kept[0].param_groups for p in g["params"]]

    def read(self, p: nn.Parameter) -> torch.Tensor:
        return p.detach().clone()

    def write(self, p: nn.Parameter, value: torch.Tensor) -> None:
        with torch.no_grad():
            p.copy_(value)

    def step(self, closure: Any = None) -> Any:
        self.kept[0].step()
        self.taken += 1
        if self.taken % 5 == 0:
            for p, slow in zip(self.params(), self.slow, strict=True):
                slow.lerp_(self.read(p), 0.5)
                self.write(p, slow)


class ExactLookahead(Lookahead):
    """The same, with exact values where the inner optimizer is compiled."""

    def read(self, p: nn.Parameter) -> torch.Tensor:
        return exact_value(self.kept[0], p)

    def write(self, p: nn.Parameter, value: torch.Tensor) -> None:
        set_exact_value(self.kept[0], p, value)


class LookaheadAdamW(AdamW):
    """The same in one class, which compiles: what the wrapper keeps is in the state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and "slow" not in self.state[p]:
                    beta = group["betas"]
                    self.state[p].update(
                        taken=0, slow=p.clone(), m=torch.zeros_like(p), v=torch.zeros_like(p), beta1=beta[0]
                    )
                state = self.state[p]
                state["taken"] += 1
                t = state["taken"]
                state["m"].lerp_(p.grad, 1 - group["betas"][0])
                state["v"].mul_(group["betas"][1]).addcmul_(p.grad, p.grad, value=1 - group["betas"][1])
                denominator = (state["v"] / (1 - group["betas"][1] ** t)).sqrt() + group["eps"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(state["m"], denominator, value=-group["lr"] / (1 - group["betas"][0] ** t))
                if t % 5 == 0:
                    state["slow"].lerp_(p, 0.5)
                    p.copy_(state["slow"])


def run(optimizer: Any, params: list[nn.Parameter], steps: int = 40) -> None:
    for i in range(steps):
        set_gradients(params, i)
        optimizer.step()


def reference() -> list[nn.Parameter]:
    exact = [nn.Parameter(p.detach().double()) for p in parameters()]
    run(Lookahead(AdamW(exact, lr=1e-3)), exact)
    return exact


def error(optimizer: Optimizer, params: list[nn.Parameter]) -> float:
    found = zip(params, reference(), strict=True)
    return max(float((exact_value(optimizer, p).double() - q.detach()).abs().max()) for p, q in found)


BOUND = 40 * 2 * 4 * 2**-17
"""40 steps, each of which stores two numbers below 4 as pairs."""


@pytest.mark.parametrize(("inner", "wrapper"), [(AdamW, ExactLookahead), (LookaheadAdamW, lambda optimizer: optimizer)])
def test_a_wrapper_with_exact_values_and_one_in_the_step_of_a_class_are_within_the_format(
    inner: Any, wrapper: Any
) -> None:
    params = parameters()
    optimizer = collage_neuron.compile(inner(params, lr=1e-3), strategy="full")
    run(wrapper(optimizer), params)
    assert error(optimizer, params) <= BOUND


@pytest.mark.parametrize("kept", [list, tuple, lambda x: {0: x[0]}])
def test_a_wrapper_that_is_compiled_as_a_whole_is_within_the_format(kept: Any) -> None:
    params = parameters()
    wrapper = Lookahead(AdamW(params, lr=1e-3))
    wrapper.kept = kept(wrapper.kept)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", collage_neuron.RunsAsWritten)  # its slow weights are in a list
        optimizer = collage_neuron.compile(wrapper, strategy="full")
        run(optimizer, params)
    assert error(optimizer, params) <= BOUND


def test_a_wrapper_that_writes_the_weights_themselves_is_told_once_what_that_loses() -> None:
    params = parameters()
    optimizer = collage_neuron.compile(AdamW(params, lr=1e-3), strategy="full")
    wrapper = Lookahead(optimizer)
    with pytest.warns(UserWarning, match="parameters of this CollageAdamW are written between steps: what is written"):
        run(wrapper, params, 21)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(wrapper, params)


@pytest.mark.parametrize(
    ("write", "writes", "steps"),
    [
        (lambda p: p.clamp_(-0.5, 0.5), 10, 1),
        (lambda p: p.mul_(p > 0), 10, 1),
        (lambda p: p.add_(0), 10, 1),
        (lambda p: p.mul_(0.1), 2, 40),  # once in a while
    ],
)
def test_clamps_masks_and_weights_that_came_and_went_are_no_reason_to_warn(write: Any, writes: int, steps: int) -> None:
    params = parameters()
    optimizer = collage_neuron.compile(AdamW(params, lr=1e-3), strategy="full")
    for _ in range(writes):
        run(optimizer, params, steps)
        with torch.no_grad():
            for p in params:
                write(p)
    run(optimizer, params, steps)


def test_a_decay_in_a_hook_that_rounds_away_is_told() -> None:
    """Each write changes nothing, and that is the loss."""
    params = parameters()
    optimizer = collage_neuron.compile(AdamW(params, lr=1e-3), strategy="full")

    def decay(*_: Any) -> None:
        with torch.no_grad():
            torch._foreach_mul_(list[torch.Tensor](params), 1 - 1e-4)

    optimizer.register_step_post_hook(decay)
    with pytest.warns(UserWarning, match=r"changes \(almost\) nothing: .*a decay of less than .*set_exact_value"):
        run(optimizer, params, 40)
