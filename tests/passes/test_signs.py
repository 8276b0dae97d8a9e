"""A state has a format without signs only where the update shows that it cannot become negative."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from as_written import Written
from idioms import Dividing, Following, error, gradient, of_v, start, stepped, then
from planned import capture, plan
from running import as_written_too
from torch import Tensor

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.analysis.state_roles import roles_of
from collage_neuron.states.inner_optimizers import base_of

pytestmark = pytest.mark.usefixtures("rejecting")


MAY_BE_NEGATIVE: dict[str, Callable[[Tensor, Tensor, float], Any]] = {
    "a square less its root": lambda v, g, b: v.mul_(b).add_((g * g - 3 * g) * (1 - b)),
    "minus a square": lambda v, g, b: v.mul_(b).addcmul_(g, g, value=b - 1),
    "overshooting lerp": lambda v, g, b: v.lerp_(g * g, 1.5),
    "negative weight": lambda v, g, b: v.lerp_(g * g, -0.01),
    "minus a magnitude by where": lambda v, g, b: v.mul_(b).add_(torch.where(g < 0, g, -g) * (1 - b)),
    "yogi with a long step": lambda v, g, b: v.sub_(2.0 * torch.sign(v - g * g) * g * g),
    "yogi of the wrong sign": lambda v, g, b: v.add_((1 - b) * torch.sign(v - g * g) * g * g),
    "yogi of another square": lambda v, g, b: v.sub_((1 - b) * torch.sign(v - g * g) * g.abs()),
    "squares of two": lambda v, g, b: v.mul_(b).add_((g - 0.5) * (g + 0.5) * (1 - b)),
    "a cube": lambda v, g, b: v.mul_(b).add_(g * g * g * (1 - b)),
    "a smaller maximum": lambda v, g, b: v.copy_(torch.maximum(v * b, g * g) - 1e-3),
    "minimum": lambda v, g, b: v.mul_(b).add_(torch.minimum(g * g, g) * (1 - b)),
}


@pytest.mark.parametrize("name", MAY_BE_NEGATIVE)
@pytest.mark.parametrize("strategy", ["split422", "split311"])
def test_what_may_become_negative_has_signs(name: str, strategy: str) -> None:
    p = torch.nn.Parameter(start())
    optimizer = collage_neuron.compile(
        Following([p], of_size(MAY_BE_NEGATIVE[name])), strategy=strategy, backend="reference"
    )
    stepped(optimizer, p, 12)
    assert format_named(formats(optimizer)["v"]).signed
    assert collage_neuron.exact_value(optimizer, p).isfinite().all()


def of_size(update: Callable[[Tensor, Tensor, float], Any]) -> Any:
    return then(lambda s, g, b, p: update(s["v"], g, b), lambda s, g, b: g.mul(s["v"].abs()))


def formats(optimizer: Any) -> dict[str, str]:
    (job,) = plan(base_of(type(optimizer)), optimizer, optimizer.param_groups[0], 0)
    return {name: fmt.name for name, fmt in job.update.formats.items()}


# --- numbers that change --------------------------------------------------------------------------------------------


def weighted(s: Any, g: Tensor, weight: float, p: Tensor) -> Tensor:
    """A decay of .9, and a weight that the group changes."""
    s["v"].mul_(0.9).addcmul_(g, g, value=weight)
    return g.mul(s["v"].abs() + 1.0)


def test_a_weight_that_becomes_negative_gives_its_state_signs() -> None:
    p, exact = torch.nn.Parameter(start()), torch.nn.Parameter(start().double())
    make = partial(Following, idiom=weighted, beta=0.1)
    ours = collage_neuron.compile(make([p]), strategy="split422", backend="reference")
    theirs = make([exact])
    seen = []
    for step in range(30):
        for optimizer, q in ((ours, p), (theirs, exact)):
            optimizer.param_groups[0]["beta"] = 0.1 if step < 10 else -0.1
            q.grad = gradient(step).to(q.dtype)
        seen.append(formats(ours)["v"])
        ours.step(), theirs.step()
    assert seen == ["u16q16"] * 10 + ["bf16+int16"] * 20
    moved = (exact.detach() - start().double()).norm()
    assert (collage_neuron.exact_value(ours, p).double() - exact.detach()).norm() <= 2e-3 * moved
    ours.param_groups[0]["beta"] = 0.1
    p.grad = gradient(0)
    with pytest.raises(ValueError, match=r"the state 'v' .* has negative values, and the format u16q16 holds none"):
        ours.step()


def test_negative_second_moments_of_a_checkpoint_are_rejected() -> None:
    p = torch.nn.Parameter(start())
    optimizer = collage_neuron.compile(torch.optim.AdamW([p]), strategy="split422")
    stepped(optimizer, p, 2)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg_sq"] = -torch.ones(24)
    with pytest.raises(ValueError, match=r"'exp_avg_sq' .* has negative values.*split433"):
        optimizer.load_state_dict(saved)


def begins_below(s: dict[str, Any], g: Tensor, b: float, p: Tensor) -> Tensor:
    if "own" not in s:
        s["own"] = torch.full_like(p, -1e-3)
    s["own"].mul_(b).addcmul_(g, g, value=1 - b)
    size: Tensor = s["own"].abs().sqrt()
    return size


@pytest.mark.parametrize("strategy", ["split422", "split322", "split311"])
def test_an_average_of_squares_that_begins_below_0_is_rejected_where_it_would_have_no_sign(strategy: str) -> None:
    """At its second step the update is that of an average of squares, and it does not show where the state began."""
    optimizer = Dividing([torch.nn.Parameter(start())], begins_below)
    with pytest.raises(UnsupportedUpdate, match=r"the state 'own' begins at -0\.001, .*as u\d+q16, which has no sign"):
        collage_neuron.compile(optimizer, strategy=strategy)
    with as_written_too():
        optimizer = collage_neuron.compile(optimizer, strategy=strategy, verbose=False)
    (p,) = optimizer.param_groups[0]["params"]
    stepped(optimizer, p, 1)
    before = collage_neuron.exact_value(optimizer, p)
    with pytest.raises(ValueError, match=r"the state 'own' .* has negative values, and the format u\d+q16 holds none"):
        stepped(optimizer, p, 1)
    assert torch.equal(collage_neuron.exact_value(optimizer, p), before)


# --- random updates -------------------------------------------------------------------------------------------------

UNARY: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: -x, torch.abs, torch.square, lambda x: x.abs().sqrt(), torch.sign, lambda x: x.clamp_min(0),
    lambda x: x * 0.3, lambda x: x * -2, lambda x: x.pow(3), lambda x: x.clamp(-0.5, 0.5), torch.exp,
)  # fmt: skip
BINARY: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    torch.add, torch.sub, torch.mul, torch.maximum, torch.minimum, lambda x, y: torch.where(x > y, x, y),
    lambda x, y: torch.where(x < 0, x, -x) + y, lambda x, y: x.lerp(y, 0.1), lambda x, y: x.lerp(y, 1.3),
    lambda x, y: x - 0.01 * torch.sign(x - y) * y, lambda x, y: torch.addcmul(x, y, y, value=0.2),
    lambda x, y: x * x.clone() - 0.1 * y, lambda x, y: (x - y) * (x - y), lambda x, y: (x - y) * (2 * x - 2 * y),
)  # fmt: skip


def random_update(seed: int) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]:
    """New values of two states by ten random operations on them and a gradient."""
    draw = random.Random(seed)
    code = [(draw.random() < 0.4, draw.randrange(99), draw.random(), draw.random()) for _ in range(10)]

    def update(v: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        values = [v, w, g]
        for is_unary, which, first, second in code:
            x, y = (values[int(f * len(values))] for f in (first, second))
            values.append(UNARY[which % len(UNARY)](x) if is_unary else BINARY[which % len(BINARY)](x, y))
        return values[-1], v * 0.9 + values[-2] * 0.1

    return update


class Random(Written):
    def __init__(self, params: Any, seed: int) -> None:
        super().__init__(params)
        self.made = random_update(seed)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        s = state
        for name in ("v", "w"):
            s.setdefault(name, torch.zeros_like(p))
        v, w = self.made(s["v"], s["w"], g)
        s["v"].add_(v.square() + v)
        s["w"].copy_(w)
        p.sub_(v)


def test_random_updates_leave_nothing_negative_that_is_said_not_to_be() -> None:
    """Two states from 0 up, after one step: no proof is wrong, and some are found."""
    x = torch.tensor([0.0, 1e-3, 0.3, 0.5, 1.0, 1.7, 40.0], dtype=torch.float64)
    v, w, g = torch.meshgrid(x, x, torch.cat([-x, x, x / 7]), indexing="ij")
    shown = 0
    for seed in range(100):
        p = torch.nn.Parameter(torch.zeros(3))
        p.grad = torch.ones(3)
        optimizer = Random([p], seed)
        recording = capture(Random, optimizer, optimizer.param_groups[0], p, {})
        unsigned = {s for s, role in roles_of(recording.captured, recording.slots).items() if role in ("slow", "sum")}
        changed, new = optimizer.made(v, w, g)
        after = {"v": v + changed.square() + changed, "w": new}
        assumed = {s: (v, w)[s == "w"] for s in after}
        assert set(assumed) == set(after)
        for name in unsigned:
            assert not (after[name] < -1e-9 * after[name].abs().max()).any(), (seed, name)
        shown += len(unsigned)
    assert shown > 4


def test_a_format_without_signs_follows_float64() -> None:
    """Of maxima with decay too, which are shown not to be negative by what they are compared with."""

    def largest(v: Tensor, g: Tensor, b: float) -> Any:
        return v.copy_(torch.maximum(v * b, g.abs() + 1e-8))

    make = partial(Dividing, idiom=of_v(largest))
    p = torch.nn.Parameter(start())
    optimizer = collage_neuron.compile(make([p]), strategy="split422")
    stepped(optimizer, p, 1)
    assert formats(optimizer)["v"] == "u16q16"
    assert error(make, "split422", 100) <= 2e-3
