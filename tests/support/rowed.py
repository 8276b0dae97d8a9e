"""Optimizers with means over rows and columns of matrices, as people write them: captured in stages."""

from __future__ import annotations

import math
from typing import Any

import torch
from as_written import Written
from torch import Tensor


class Factored(Written):
    """Adafactor without a factor of the rate: second moments of rows and columns, kept with a dimension of one."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        factored = p.dim() > 1
        if not state:
            state.update(step=0, m=torch.zeros_like(p))
            if factored:
                state["row"] = g.new_zeros((*p.shape[:-1], 1))
                state["col"] = g.new_zeros((*p.shape[:-2], 1, p.shape[-1]))
            else:
                state["v"] = torch.zeros_like(p)
        state["step"] += 1
        decay = 1 - state["step"] ** -0.8
        square = g * g + 1e-30
        if factored:
            state["row"].lerp_(square.mean(-1, keepdim=True), 1 - decay)
            state["col"].lerp_(square.mean(-2, keepdim=True), 1 - decay)
            v = state["row"] / state["row"].mean(-2, keepdim=True) * state["col"]
        else:
            v = state["v"].lerp_(square, 1 - decay)
        u = g / v.sqrt()
        u = u / (u.norm() / math.sqrt(max(u.numel(), 1))).clamp(min=1.0)
        p.sub_(state["m"].mul_(0.9).add_(u, alpha=0.1), alpha=group["lr"])


class Came(Written):
    """CAME as it is published: means of rows and columns of squares, and of what is left of them, as vectors."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["m"] = torch.zeros_like(p)
            for name in ("sq", "res") if p.dim() > 1 else ():
                state[f"{name}_row"] = torch.zeros(p.shape[:-1], dtype=g.dtype, device=g.device)
                state[f"{name}_col"] = torch.zeros((*p.shape[:-2], p.shape[-1]), dtype=g.dtype, device=g.device)
            if p.dim() < 2:
                state["v"] = torch.zeros_like(g)
        if p.dim() < 2:
            u = state["v"].mul_(0.999).add_(g * g + 1e-30, alpha=0.001).rsqrt() * g
        else:
            u = self.inverse_root(state, "sq", g * g + 1e-30, 0.999) * g
        u.div_((u.norm(2) / max(u.numel(), 1) ** 0.5).clamp_(min=1.0))
        m = state["m"].mul_(0.9).add_(u, alpha=0.1)
        if p.dim() > 1:
            m = self.inverse_root(state, "res", (u - m) ** 2 + 1e-16, 0.9999) * m
        p.add_(m, alpha=-group["lr"])

    def inverse_root(self, state: dict[str, Any], name: str, x: Tensor, decay: float) -> Tensor:
        row = state[f"{name}_row"].mul_(decay).add_(x.mean(dim=-1), alpha=1.0 - decay)
        col = state[f"{name}_col"].mul_(decay).add_(x.mean(dim=-2), alpha=1.0 - decay)
        r = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        return torch.mul(r, col.unsqueeze(-2).rsqrt())


class ByNeuron(Written):
    """Adam with one second moment for each row of a matrix, as Adam-mini has it."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        square = (g * g).mean(dim=-1, keepdim=True) if p.dim() > 1 else g * g
        if not state:
            state.update(step=torch.tensor(0.0), m=torch.zeros_like(p), v=torch.zeros_like(square))
        state["step"] += 1
        t = float(state["step"])
        m, v = state["m"].lerp_(g, 0.1), state["v"].lerp_(square, 0.01)
        p.sub_(m / (1 - 0.9**t) / ((v / (1 - 0.99**t)).sqrt() + 1e-8), alpha=group["lr"])


class Normed(Written):
    """No states: gradients with the mean of each column taken away, divided by the norms of their rows."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() > 1:
            g = g - g.mean(dim=-2, keepdim=True)
            size = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
            g = torch.where(size > 1e-3, g / (size + 1e-6), g)
        p.sub_(g, alpha=group["lr"])


class Outer(Written):
    """The second moment as a product of a column and a row, as torch's Adafactor has it."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() == 2:
            if not state:
                state.update(row=g.new_zeros(p.shape[0], 1), col=g.new_zeros(1, p.shape[1]))
            square = g.square() + 1e-20
            row = state["row"].mul_(0.9).add_(square.sum(1, keepdim=True), alpha=0.1)
            col = state["col"].mul_(0.9).add_(square.sum(0, keepdim=True), alpha=0.1)
            g = g / (row @ col / row.sum()).sqrt()
        p.sub_(g, alpha=group["lr"])


class Products(Written):
    """Scaled by a norm of what has a value for each element, and is made of means of rows and columns alone."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() > 1:
            g = g * (g.mean(-1, keepdim=True) * g.mean(-2, keepdim=True)).norm()
        p.sub_(g, alpha=group["lr"])


ALL = (Factored, Came, ByNeuron, Normed, Outer)
