"""Small tensors that a step fills with a number (`torch.full_like` of a norm): captured, with a slot for the number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_written import Written, equal, parameters, run, values
from torch import Tensor

import collage_neuron

pytestmark = pytest.mark.usefixtures("rejecting")

FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "alone": lambda n, x: torch.full_like(n, x),
    "in a product": lambda n, x: torch.full_like(n, x) * n,
    "branch": lambda n, x: torch.where(n > 0.5, 1 / n, torch.full_like(n, x)),
    "not finite": lambda n, x: torch.where(torch.isfinite(n), n, torch.full_like(n, x)),
    "new": lambda n, x: n + n.new_full(n.shape, x),
    "by shape": lambda n, x: n + torch.full(n.shape, x, device=n.device),
    "ones": lambda n, x: torch.ones_like(n) + torch.zeros_like(n) * x,
}
SHAPES = ((24, 40), (40, 16))
SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm": lambda g: g.norm(),
    "of rows": lambda g: g.square().mean(-1, keepdim=True).sqrt(),
}


def filling(fill: str, small: str) -> type[Written]:
    class Filling(Written):
        count = 0

        def update(self, p: Any, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p.sub_(g * FILLS[fill](SMALL[small](g), 0.25 + self.count), alpha=group["lr"])

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.count += 1

    return Filling


def trained(make: type[Written]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """In float64: the first values, those after four steps, and how long the way was."""
    params = parameters(torch.float64, SHAPES)
    start, optimizer = [p.detach().clone() for p in params], make(params)
    way = [torch.zeros_like(x) for x in start]
    for number in range(4):
        before = [p.detach().clone() for p in params]
        run(optimizer, 1, first=number)
        way = [w + (p.detach() - x).abs() for w, p, x in zip(way, params, before, strict=True)]
    return start, [p.detach() for p in params], way


@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize("fill", FILLS)
def test_a_small_tensor_may_be_filled(fill: str, small: str) -> None:
    """A step is within 16 roundings of fp32 of its own length, and is added with one of the parameter."""
    make, found = filling(fill, small), []
    for backend in ("reference", "native"):
        params = parameters(torch.bfloat16, SHAPES)
        optimizer = collage_neuron.compile(make(params), strategy="fp32", backend=backend, verbose=False)
        run(optimizer, 4)
        found.append(values(optimizer, params))
    assert equal(*found)
    for ours, start, theirs, way in zip(found[0], *trained(make), strict=True):
        assert way.max() > 2**-10
        assert ((ours - theirs).abs() <= 2**-20 * way + 4 * 2**-24 * (start.abs() + way)).all()
