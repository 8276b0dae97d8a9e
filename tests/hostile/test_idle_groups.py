"""The code of a step runs for groups and parameters without gradients too, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from headed import Mini, Vectors
from rowed import Came
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

STEPS = 12


class Counting(Optimizer):
    """Warms up by counts of its own: in the optimizer, and in each group."""

    def __init__(self, groups: Any, lr: float = 0.01) -> None:
        super().__init__(groups, {"lr": lr, "n": 0})
        self.t = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.t += 1
        for group in self.param_groups:
            group["n"] += 1
            for p in group["params"]:
                self.one(p, group["lr"] * min(1.0, self.t / 10) / group["n"])

    def one(self, p: Tensor, rate: float) -> None:
        if p.grad is not None:
            p.add_(p.grad, alpha=-rate)


class Logging(Counting):
    """Keeps a list of what it did to groups: an object that a recording does not carry."""

    def __init__(self, groups: Any, lr: float = 0.01) -> None:
        super().__init__(groups, lr)
        for group in self.param_groups:
            group["log"] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            group["log"].append(len(group["log"]) * group["lr"])


class Normed(Counting):
    """Runs as written."""

    def one(self, p: Tensor, rate: float) -> None:
        if p.grad is not None:
            p.add_(p.grad, alpha=-rate / max(1.0, float(p.grad.norm())))


class Aware(Counting):
    """Looks at positions, so that each step is compared with a joint one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.t += 1
        for i, group in enumerate(self.param_groups):
            group["n"] += 1 if i < 7 else 2
            for p in group["params"]:
                self.one(p, group["lr"] * self.t / group["n"])


class Passing(Counting):
    """Counts in its state how often a parameter had no gradient."""

    def one(self, p: Tensor, rate: float) -> None:
        state = self.state[p]
        if p.grad is None:
            state["missed"] = state.get("missed", 0) + 1
        else:
            p.add_(p.grad, alpha=-rate * (1 + state.get("missed", 0)))


class MadeBefore(Counting):
    """Makes its state before it looks at the gradient."""

    def one(self, p: Tensor, rate: float) -> None:
        state = self.state[p]
        if not state:
            state.update(step=0, m=torch.zeros_like(p))
        if p.grad is not None:
            state["step"] += 1
            p.add_(state["m"].lerp_(p.grad, 0.5), alpha=-rate * state["step"])


class Born(Counting):
    """Makes a state of the numbers of the step before it looks at the gradient."""

    def one(self, p: Tensor, rate: float) -> None:
        state = self.state[p]
        if not state:
            state["born"] = self.t
        if p.grad is not None:
            p.add_(p.grad, alpha=-rate * state["born"])


class Anchored(Counting):
    """Keeps what a parameter was when it was first seen."""

    def one(self, p: Tensor, rate: float) -> None:
        state = self.state[p]
        if not state:
            state["z"] = p.detach().clone()
        if p.grad is not None:
            p.add_(p - 0.5 * state["z"] + p.grad, alpha=-rate)


class Visiting(Counting):
    """Counts its visits in the group, of which an empty one has none."""

    def one(self, p: Tensor, rate: float) -> None:
        super().one(p, rate)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                group["last"] = self.t if p.grad is None else -self.t


class Decaying(Counting):
    """Decays parameters without a gradient too."""

    def one(self, p: Tensor, rate: float) -> None:
        p.mul_(1 - rate)
        super().one(p, rate)


WHEN: dict[str, Callable[[int, int], bool]] = {
    "frozen": lambda step, i: i == 0 or step >= 7,
    "in turn": lambda step, i: step % 3 == i,
    "late": lambda step, i: step >= 5,
    "gone": lambda step, i: step < 5,
}
"""Whether a parameter has a gradient, by the step and the parameter's number."""


def trained(cls: type[Counting], when: str, compiled: str) -> tuple[Any, ...]:
    """Everything after some steps: two groups of two parameters each, and an empty one."""
    model = torch.nn.ParameterList(Parameter(torch.full((4, 4), 1.0 + i)) for i in range(4))
    optimizer: Any = cls([{"params": [*model][:2]}, {"params": [*model][2:]}, {"params": []}])
    if compiled == "model":
        collage_neuron.compile(model, strategy="fp32", verbose=False)
    elif compiled:
        collage_neuron.compile(optimizer, strategy="fp32", unsupported=compiled, verbose=False)
    for step in range(STEPS):
        for i, p in enumerate(model):
            p.grad = torch.full_like(p, 0.5 + i) if WHEN[when](step, i // 2) else None
        optimizer.step()
    exact = [collage_neuron.exact_value(optimizer, p) if compiled else p.detach() for p in model]
    groups = [{k: v for k, v in group.items() if k in ("n", "log", "last")} for group in optimizer.param_groups]
    counts = [{k: v for k, v in optimizer.state[p].items() if k in ("step", "missed", "born")} for p in model]
    return optimizer.t, groups, [n for n in counts if any(n.values())], torch.stack(exact)


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize(
    "cls", [Counting, Logging, Normed, Aware, Passing, MadeBefore, Born, Anchored, Visiting, Decaying]
)
def test_groups_without_gradients_are_counted(cls: type[Counting], when: str) -> None:
    *plain, weights = trained(cls, when, "")
    for how in ("twin", "model"):
        *found, values = trained(cls, when, how)
        assert found == plain
        assert torch.allclose(values, weights, rtol=1e-6, atol=0)  # fused operations round once less


@pytest.mark.parametrize("cls", [Counting, Logging, Aware, MadeBefore, Visiting])
def test_what_only_counts_is_captured(cls: type[Counting]) -> None:
    *plain, _ = trained(cls, "frozen", "")
    *found, _ = trained(cls, "frozen", "error")
    assert found == plain


@pytest.mark.parametrize(
    ("cls", "what"),
    [
        (Passing, r"optimizer.state\[p\]\['missed'\]"),
        (Decaying, "changes it"),
        (Born, r"makes optimizer.state\[p\]\['born'\], which is not zero"),
        (Anchored, r"makes optimizer.state\[p\]\['z'\], which is not zero"),
    ],
)
def test_what_is_done_to_a_parameter_without_a_gradient_is_rejected(cls: type[Counting], what: str) -> None:
    with pytest.raises(UnsupportedUpdate, match=rf"parameter without a gradient.*{what}"):
        trained(cls, "frozen", "error")


@pytest.mark.parametrize("make", [Came, Mini, Vectors])
def test_states_of_other_shapes_are_left_alone(make: Any) -> None:
    """A parameter that has a gradient now and then, beside one that always has: as in plain torch."""
    given = [torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16() for shape in ((24, 40), (8, 8))]
    ours, theirs = ([Parameter(x.to(dtype)) for x in given] for dtype in (torch.bfloat16, torch.float64))
    optimizer = collage_neuron.compile(
        make(ours), strategy="fp32", backend="reference", unsupported="error", verbose=False
    )
    plain = make(theirs)
    for step in range(6):
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            g = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
            has_one = not i or step in (0, 4)
            p.grad, q.grad = (g, g.double()) if has_one else (None, None)
        optimizer.step()
        plain.step()
    for p, q in zip(ours, theirs, strict=True):
        assert torch.allclose(collage_neuron.exact_value(optimizer, p).double(), q, rtol=2**-17, atol=2**-17)


class Fading(Came):
    """Changes a second moment of rows where there is no gradient."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                self.update(p, p.grad, self.state[p], self.param_groups[0])
            elif self.state[p]:
                self.state[p]["sq_row"].mul_(0.5)


def test_one_of_another_shape_that_is_changed_is_rejected() -> None:
    params = [Parameter(torch.ones(shape).bfloat16()) for shape in ((24, 40), (8, 8))]
    optimizer = collage_neuron.compile(
        Fading(params), strategy="fp32", backend="reference", unsupported="error", verbose=False
    )
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    params[1].grad = None
    with pytest.raises(UnsupportedUpdate, match=r"on a tensor of shape \[8\]"):
        optimizer.step()
