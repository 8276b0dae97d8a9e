"""Optimizers that read values of tensors with `.item()`, as people write them, and compute with these in Python."""

from __future__ import annotations

import math
from typing import Any

import torch
from as_written import Written
from torch import Tensor


class Scaled(Written):
    """Divides by a norm that Python reads; every operation that such a number has, on either side."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        n = g.norm().item()
        size = abs(-(2 * n)) / math.sqrt(p.numel())
        rate = (1.0 + n) / (9.0 - n) / (n + 3) ** 2 * (n - 0.125) / size**0.5
        p.add_(g, alpha=-group["lr"] * rate)
        p.addcmul_(g, g, value=+rate * 1e-2).div_(1 + n)


class Alpha(Written):
    """Hands 0-d tensors to torch where it takes numbers: torch reads them itself."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        m.mul_(0.9).add_(g, alpha=g.square().mean().sqrt())
        p.addcdiv_(m, g.abs() + 1.0, value=-group["lr"] / (m.norm() + 1.0))


class Relative(Written):
    """Adafactor's two numbers: the step is relative to the size of the parameter, and is clipped by its own."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        v = state.setdefault("v", torch.zeros_like(p)).lerp_(g * g, 0.1)
        alpha = max(1e-3, p.norm(2).item() / p.numel() ** 0.5) * group["lr"]
        u = g / (v.sqrt() + 1e-8)
        p.add_(u, alpha=-alpha / max(1.0, u.norm(2).item() / p.numel() ** 0.5))


class Between(Written):
    """A number between two others, and the smaller of two that are read."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        n, m = g.norm().item(), p.norm().item()
        rate = min(0.5, max(0.1, n / (m + 1e-3)))
        p.sub_(g * rate, alpha=group["lr"] / min(m + 1, n + 1))


class Before(Written):
    """Reads a state of one number, and the parameter's sum, before it changes both."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, size=g.norm())
        size, total = state["size"].item(), p.sum().item()
        state["size"].mul_(0.5).add_(g.norm(), alpha=0.5)
        p.sub_(g, alpha=group["lr"] / (1 + size))
        p.add_(g, alpha=1e-3 * total / (1.0 + abs(total)))
        state["step"] += 1


class ByRow(Written):
    """Means of rows as a state, and a number that Python reads: as `torch.optim.Adafactor` has both."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() > 1:
            row = state.setdefault("row", g.new_zeros((*p.shape[:-1], 1)))
            g = g / (row.lerp_(g.square().mean(dim=-1, keepdim=True), 0.3) + 1e-6).sqrt()
        p.sub_(g, alpha=group["lr"] / max(1.0, 0.9 * g.norm().item() / p.numel() ** 0.5))


ALL = (Scaled, Alpha, Relative, Between, Before, ByRow)
