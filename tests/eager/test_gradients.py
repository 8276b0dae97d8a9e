"""Gradients of steps as written by other names than `p.grad`; memory that gradients, parameters and states share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_written import Written, values
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate


class Scaled(Written):
    """Scales gradients by a name of its own, before it reads `p.grad`."""

    def __init__(self, params: Any, name: Callable[[list[Parameter]], list[Tensor]]) -> None:
        super().__init__(params)
        self.name = name

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        for g in self.name(params):
            g.mul_(0.25).clamp_(-0.3, 0.3)
        for p in params:
            p.sub_(p.grad * float(p.grad.norm() > 0), alpha=0.01)


def _in_a_list(params: list[Parameter]) -> Callable[[Any], list[Tensor]]:
    grads = [p.grad for p in params if p.grad is not None]
    return lambda _: grads


def _in_a_buffer(params: list[Parameter]) -> Any:
    flat = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)
    return flat


@pytest.mark.parametrize("buffer", [False, True])
def test_gradients_are_the_same_by_every_name(buffer: bool) -> None:
    def left(dtype: torch.dtype) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        params = [Parameter(torch.randn(n, 3).bfloat16().to(dtype)) for n in (4, 1, 5)]
        for p in params:
            p.grad = torch.randn_like(p).bfloat16().to(dtype)
        named = _in_a_buffer(params) if buffer else _in_a_list(params)
        optimizer: Any = Scaled(params, (lambda _: [optimizer.flat]) if buffer else named)
        if buffer:
            optimizer.flat = named
        if dtype == torch.bfloat16:
            optimizer = collage_neuron.compile(optimizer, strategy="fp32")
        for _ in range(3):
            optimizer.step()
        grads = [p.grad.float() for p in params if p.grad is not None]
        return values(optimizer, params) if dtype == torch.bfloat16 else params, grads

    (found, grads), (exact, expected) = left(torch.bfloat16), left(torch.float32)
    assert all(torch.allclose(x, y, rtol=2**-7) for x, y in zip(grads, expected, strict=True))
    assert all(torch.allclose(x, y, atol=2e-4) for x, y in zip(found, exact, strict=True))


# --- names that are not followed --------------------------------------------------------------------------------------

HELD: dict[str, Tensor] = {}
"""Flat buffers of gradients that no optimizer holds."""


def _nothing_to(params: list[Parameter]) -> None:
    pass


class OfAGlobal(Written):
    """Steps, and uses a flat buffer of gradients before or after that."""

    def __init__(self, params: Any, before: Any, after: Any, looks: bool) -> None:
        super().__init__(params)
        self.before, self.after, self.looks = before, after, looks

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        if self.looks:  # so that it runs as written
            params[0].grad.numpy()
        self.before(params)
        for p in params:
            p.sub_(p.grad, alpha=0.1)
        self.after(params)


def _parts(params: list[Parameter], flat: Tensor) -> None:
    for p, part in zip(params, flat.split([p.numel() for p in params]), strict=True):
        p.grad = part.view_as(p)


def _put(params: list[Parameter]) -> None:
    if "own" not in HELD:
        HELD["own"] = torch.cat([p.grad.flatten() for p in params if p.grad is not None])
        _parts(params, HELD["own"])
    HELD["own"].mul_(0.5)


NOT_FOLLOWED: dict[str, tuple[Any, Any, str]] = {
    "a buffer, before": (lambda ps: HELD["flat"].mul_(0.5), _nothing_to, "writes to the memory of a gradient"),
    "a buffer, after": (_nothing_to, lambda ps: HELD["flat"].zero_(), "writes to the memory of a gradient"),
    "a buffer of its own": (_put, _nothing_to, "gives a parameter a gradient that is a part of a tensor"),
}


@pytest.mark.parametrize("looks", [False, True])
@pytest.mark.parametrize("name", NOT_FOLLOWED)
def test_a_name_of_a_gradient_that_is_not_followed_is_rejected(name: str, looks: bool) -> None:
    """Parameters would miss what is written to it, or see what is written after them."""
    before, after, message = NOT_FOLLOWED[name]
    params = [Parameter(torch.ones(n, 3).bfloat16()) for n in (4, 1)]
    HELD.clear()
    HELD["flat"] = torch.ones(15).bfloat16()
    _parts(params, HELD["flat"])
    optimizer: Any = collage_neuron.compile(OfAGlobal(params, before, after, looks), strategy="plus", verbose=False)
    with pytest.raises(UnsupportedUpdate, match=f"{message}.*; nothing was updated"):
        optimizer.step()
    assert all(torch.equal(p, torch.ones_like(p)) for p in params)


# --- memory that is shared --------------------------------------------------------------------------------------------


class Normed(Written):
    """Reads a norm, so that it runs as written."""

    def update(self, p: Any, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g / float(g.norm() + 1), alpha=group["lr"])


def _arena(params: list[Parameter]) -> None:
    """Parameters and gradients lie in one buffer."""
    size = sum(p.numel() for p in params)
    buffer = torch.zeros(2 * size + 8, dtype=params[0].dtype)
    first = 0
    for p in params:
        for k, x in enumerate((p.data, torch.randn_like(p))):
            part = buffer[k * size + first : k * size + first + p.numel()].view(p.shape)
            part.copy_(x)
            setattr(p, ("data", "grad")[k], part)
        first += p.numel()


def test_parameters_and_gradients_may_lie_in_one_buffer() -> None:
    def left(dtype: torch.dtype, **settings: Any) -> list[Tensor]:
        torch.manual_seed(0)
        params = [Parameter(torch.randn(n, 3).bfloat16().to(dtype)) for n in (4, 2, 5)]
        _arena(params)
        optimizer: Any = Normed(params)
        if settings:
            optimizer = collage_neuron.compile(optimizer, **settings)
        for i in range(6):
            torch.manual_seed(i)
            with torch.no_grad():
                for g in (p.grad for p in params if p.grad is not None):
                    g.copy_(torch.randn(g.shape).bfloat16())
            optimizer.step()
        return values(optimizer, params) if settings else [p.detach() for p in params]

    found, exact = left(torch.bfloat16, strategy="fp32"), left(torch.float32)
    for x, y in zip(found, exact, strict=True):  # within some roundings of each step
        assert torch.allclose(x, y, rtol=2**-20, atol=2**-22)
