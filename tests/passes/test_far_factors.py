"""A factor of the parameter near 1 and one near 0 need two forms; a step takes the one of its numbers.

`p * s` is `p + p * (s - 1)` near 1, where rounding s would change a weight decay, and would cancel near 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_written import Written
from planned import plan
from torch import Tensor
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.passes.ir.scalars import Scalar

Update = Callable[[Tensor, Tensor, Tensor, float], Any]

UPDATES: dict[str, Update] = {
    "multiplied": lambda p, g, kept, c: p.mul_(c),
    "multiplied behind an increment": lambda p, g, kept, c: p.add_(g, alpha=-1e-3).mul_(c),
    "multiplied before one": lambda p, g, kept, c: p.mul_(c).add_(g, alpha=-1e-3 * c),
    "divided and back": lambda p, g, kept, c: p.div_(c).sub_(g * 0.1).mul_(c),
    "towards a state": lambda p, g, kept, c: p.lerp_(kept, 1 - c),
    "a state towards it": lambda p, g, kept, c: p.copy_(kept.lerp_(p, c)),
    "negative": lambda p, g, kept, c: p.mul_(-c),
}
FACTORS = [1.0, 0.9999, 1e-6, 1e-6, 1.0, 0.3, 0.9, 1e-4, 0.5, 1.0]
"""Of ten steps: those from the third on are not all validated."""
BOUND = {"fp32": 2.0**-20, "full": 2.0**-12}
"""Of ten steps with up to three roundings each, of 2**-24 and of a pair's 2**-16 or less."""


class Scaled(Written):
    """Multiplies its parameters by a number that changes."""

    def __init__(self, params: Any, update: Update) -> None:
        super().__init__(params, c=1.0)
        self.of = update

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.of(p, g, state.setdefault("kept", torch.full_like(p, 2.0**-17)), group["c"])


def gradient(step: int) -> Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(step)).bfloat16()


def both(update: Update, strategy: str, **options: Any) -> tuple[Optimizer, torch.nn.Parameter, Optimizer, Any]:
    start = gradient(99)
    p, exact = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.double())
    return collage_neuron.compile(Scaled([p], update), strategy=strategy, **options), p, Scaled([exact], update), exact


def step(optimizer: Optimizer, p: Tensor, number: int) -> None:
    optimizer.param_groups[0]["c"] = FACTORS[number]
    p.grad = gradient(number).to(p.dtype)
    optimizer.step()


@pytest.mark.parametrize("strategy", BOUND)
@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("update", UPDATES)
def test_a_factor_far_from_one_is_a_product(update: str, backend: str, strategy: str) -> None:
    ours, p, theirs, exact = both(UPDATES[update], strategy, backend=backend)
    for number in range(len(FACTORS)):
        step(ours, p, number)
        step(theirs, exact, number)
        value, right = collage_neuron.exact_value(ours, p).double(), exact.detach()
        assert ((value - right).norm() <= BOUND[strategy] * right.norm()).item(), number


@pytest.mark.parametrize("strategy", BOUND)
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_each_of_a_tensor_of_weights_has_its_own_form(backend: str, strategy: str) -> None:
    """Near 0 a weight keeps the parameter, and near 1 the other operand, which is much smaller."""

    def update(p: Tensor, g: Tensor, kept: Tensor, c: float) -> None:
        p.lerp_(kept, (g > 0).to(p.dtype) * (1 - 2.0**-19) + 2.0**-20)

    ours, p, theirs, exact = both(update, strategy, backend=backend)
    step(ours, p, 0)
    step(theirs, exact, 0)
    value, right = collage_neuron.exact_value(ours, p).double(), exact.detach()
    assert ((value - right).abs() <= BOUND[strategy] * right.abs()).all()
    assert ((right.abs() < 2.0**-14).sum() > 200).item()


@pytest.mark.parametrize("backend", ["reference", "native"])
@pytest.mark.parametrize("weight", [0.3, 0.5, 1.0, 2.0, -1.0])
def test_a_lerp_has_the_bits_of_torch_also_where_it_gives_zeros(weight: float, backend: str) -> None:
    def update(p: Tensor, g: Tensor, kept: Tensor, c: float) -> None:
        kept.sign_().mul_(0.0).lerp_(g * 0.0, c).reciprocal_().clamp_(-3.0, 3.0)

    ours, p, *_ = both(update, "fp32", backend=backend)
    theirs = Scaled([q := torch.nn.Parameter(gradient(99).float())], update)
    for optimizer, param in ((ours, p), (theirs, q)):
        optimizer.param_groups[0]["c"] = weight
        for number in range(2):
            param.grad = gradient(number).to(param.dtype)
            optimizer.step()
    assert torch.equal(ours.state[p]["kept"], theirs.state[q]["kept"])


def test_the_form_changes_with_the_number_and_back() -> None:
    ours, p, *_ = both(UPDATES["multiplied"], "fp32")
    far = []
    for number in range(5):
        step(ours, p, number)
        (job,) = plan(Scaled, ours, ours.param_groups[0], 0)
        far.append(job.update.far)
    near: frozenset[Scalar] = frozenset()
    assert far == [near, near, frozenset({Scalar.slot(0)}), frozenset({Scalar.slot(0)}), near]


def test_a_monitor_measures_what_a_product_changes() -> None:
    """The raw update of a parameter that is replaced is its change, all of which arrives in fp32."""
    ours, p, *_ = both(UPDATES["multiplied"], "fp32")
    with collage_neuron.monitor(ours, every=1) as monitor:
        for number in range(3):
            before = collage_neuron.exact_value(ours, p).double()
            step(ours, p, number)
        record = monitor.latest()
    assert record is not None
    change = float((collage_neuron.exact_value(ours, p).double() - before).norm())
    assert record.total.raw_norm == pytest.approx(change, rel=2**-20)
    assert record.total.pair.ratio == pytest.approx(1, rel=2**-20)
