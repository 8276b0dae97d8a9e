"""Code around an optimizer that reads and writes weights: wrappers such as Lookahead, and averages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import parameters, set_gradients
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim import swa_utils as torchs

import collage_neuron
from collage_neuron import RoundedAverage, exact_value, set_exact_value, trainers

pytestmark = pytest.mark.usefixtures("rejecting")


# --- code around an optimizer that reads and writes weights: wrappers such as Lookahead -------------------------------


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


def test_a_wrapper_that_writes_the_weights_themselves_is_told_once_what_that_loses() -> None:
    params = parameters()
    optimizer = collage_neuron.compile(AdamW(params, lr=1e-3), strategy="full")
    wrapper = Lookahead(optimizer)
    with pytest.warns(UserWarning, match="parameters of this CollageAdamW are written between steps: what is written"):
        run(wrapper, params, 21)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(wrapper, params)


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


# --- averages that other code makes of a compiled model are noticed, and copies that are no averages are not ----------

STEPS = 40


def network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 16), nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 20))


After = Callable[[nn.Module, nn.Module, int], object]
"""What is done with a copy and the model after a step."""


def pairs(mine: nn.Module, model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return ((a, p.detach().to(a.dtype)) for a, p in zip(mine.parameters(), model.parameters(), strict=True))


def ema(mine: nn.Module, model: nn.Module, step: int) -> None:
    """As timm writes it."""
    with torch.no_grad():
        for a, p in pairs(mine, model):
            a.lerp_(p, 0.001)


def ema_through_data(mine: nn.Module, model: nn.Module, step: int) -> None:
    """As ema_pytorch writes it, which leaves the version of a tensor as it is."""
    for a, p in pairs(mine, model):
        a.data.lerp_(p, 0.1)


def trained(make: Callable[[nn.Module], nn.Module], after: After, first: str, lr: float = 1e-3) -> list[Any]:
    """Trains beside a copy, which is made before or after `compile`; returns the warnings."""
    model = network()
    optimizer = AdamW(model.parameters(), lr=lr)
    mine = make(model) if first == "copied" else None
    collage_neuron.compile(model, optimizer, strategy="split433")
    mine = make(model) if mine is None else mine
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            seed = torch.Generator().manual_seed(step)
            model(torch.randint(0, 20, (8,), generator=seed)).float().square().mean().backward()
            optimizer.step()
            after(mine, model, step)
    return [w.message for w in told if isinstance(w.message, RoundedAverage)]


AVERAGES: dict[str, tuple[Callable[[nn.Module], nn.Module], After]] = {
    "torch's, and Lightning's callbacks": (
        lambda model: torchs.AveragedModel(model, avg_fn=torchs.get_ema_avg_fn(0.999)),
        lambda mine, model, step: mine.update_parameters(model),  # type: ignore[operator]
    ),
    "timm's": (copy.deepcopy, ema),
    "through data": (copy.deepcopy, ema_through_data),
    "in fp32": (lambda model: copy.deepcopy(model).float(), ema),
    "every seventh step": (copy.deepcopy, lambda mine, model, step: ema(mine, model, step) if step % 7 == 0 else None),
}


@pytest.mark.parametrize("first", ["copied", "compiled"])
@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_of_high_words_is_told_once_with_what_to_use(name: str, first: str) -> None:
    told = trained(*AVERAGES[name], first)
    assert len(told) == 1
    assert "a copy of this Sequential (" in str(told[0])
    assert "Use collage_neuron.AveragedModel(model, optimizer, decay=...), or the callbacks" in str(told[0])
    for callback in ("lightning_average", "hugging_face_average"):
        assert hasattr(trainers, callback)


def test_an_average_that_does_not_move_in_bf16_is_told_too() -> None:
    assert len(trained(copy.deepcopy, ema, "compiled", lr=1e-6)) == 1


class Trained:
    """A second network of the same class that has an optimizer of its own."""

    def __init__(self) -> None:
        self.optimizer: SGD | None = None

    def __call__(self, mine: nn.Module, model: nn.Module, step: int) -> None:
        self.optimizer = self.optimizer or SGD(mine.parameters(), lr=0.1)
        for p in mine.parameters():
            p.grad = torch.ones_like(p)
        self.optimizer.step()


OTHERS: dict[str, After] = {
    # Or the model of a worker that samples.
    "a target network": lambda mine, model, step: step % 3 or mine.load_state_dict(model.state_dict()),
    "a frozen reference": lambda mine, model, step: None,
    "weights of a file": lambda mine, model, step: step == 20 and mine.load_state_dict(network().state_dict()),
    "a second network": Trained(),
}


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", OTHERS)
def test_other_copies_are_not_spoken_of(name: str, wide: bool) -> None:
    make = (lambda model: copy.deepcopy(model).float()) if wide else copy.deepcopy
    assert trained(make, OTHERS[name], "compiled") == []


def test_exact_averages_and_copies_of_exact_values_are_not_spoken_of() -> None:
    model = network()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    collage_neuron.compile(model, optimizer, strategy="split433")
    average, exact = collage_neuron.AveragedModel(model, optimizer, decay=0.9), copy.deepcopy(model).float()
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.arange(20)).float().square().mean().backward()
        optimizer.step()
        average.update_parameters(model)
        with torch.no_grad():
            for a, p in zip(exact.parameters(), model.parameters(), strict=True):
                a.copy_(collage_neuron.exact_value(optimizer, p))
