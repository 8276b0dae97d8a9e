"""Optimizers that see a parameter in another shape, as people write them: Adam-mini by head, and what is like it."""

from __future__ import annotations

from typing import Any

import torch
from as_written import Written
from torch import Tensor

HEADS = 4


class Mini(Written):
    """Adam-mini as its authors have it for queries and keys: moments by head, the first one in the heads' shape."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["m"] = torch.zeros_like(p).view(HEADS, -1)
            state["step"] = 0
            state["vmean"] = torch.zeros_like(state["m"][0:HEADS, 0:1])
        g = g.view(HEADS, -1)
        mean = torch.mean(g * g, dim=1, keepdim=True)
        p.mul_(1 - group["lr"] * 0.1)
        state["step"] += 1
        state["m"].lerp_(g, 1 - 0.9)
        state["vmean"].mul_(0.99).add_(mean, alpha=1 - 0.99)
        h = (state["vmean"].sqrt() / (1 - 0.99 ** state["step"]) ** 0.5).add_(1e-8)
        stepsize = ((1 / (1 - 0.9 ** state["step"])) / h).view(HEADS, 1)
        update = (state["m"] * stepsize).view(p.size())
        update.mul_(group["lr"])
        p.add_(-update)


class Vectors(Written):
    """The same with second moments as a vector, and the first one in the parameter's shape."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(m=torch.zeros_like(p), head=HEADS, v_mean=p.new_zeros(HEADS))
        square = torch.mean((g * g).reshape(state["head"], -1), dim=1)
        h = state["v_mean"].lerp_(square, 0.01).sqrt().add_(1e-8)
        u = (1 / h).view(HEADS, 1).mul(state["m"].lerp_(g, 0.1).view(HEADS, -1))
        p.add_(u.view_as(p), alpha=-group["lr"])


class Fused(Written):
    """For queries, keys and values in one matrix: three dimensions, of which the last is averaged."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(m=torch.zeros_like(p).view(2, 2, -1), v_mean=p.new_zeros(2, 2))
        g = g.view(2, 2, -1)
        m, v = state["m"].lerp_(g, 0.1), state["v_mean"].lerp_((g * g).mean(dim=2), 0.01)
        p.sub_((m / (v.sqrt() + 1e-8).unsqueeze(-1)).view(*p.size()), alpha=group["lr"])


class Blocks(Written):
    """Means over the rows of each half of a parameter, kept for each column."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = g.view(2, -1, p.shape[-1])
        if not state:
            state.update(m=torch.zeros_like(g), col=g.new_zeros(2, 1, p.shape[-1]))
        v = state["col"].mul_(0.9).add_((g * g).mean(dim=1, keepdim=True), alpha=0.1)
        u = state["m"].lerp_(g / (v.sqrt() + 1e-3), 0.1)
        p.copy_((p.view_as(u) - group["lr"] * u / (u.norm() + 1e-3)).view(p.shape))


class Flat(Written):
    """Adam with flat moments: each element by itself, and a sum over all."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = g.flatten()
        if not state:
            state.update(m=torch.zeros_like(g), v=p.new_zeros(p.numel()))
        g = g / (g.norm() + 1e-3)
        m, v = state["m"].lerp_(g, 0.1), state["v"].mul_(0.99).addcmul_(g, g, value=0.01)
        p.view(-1).sub_(m / (v.sqrt() + 1e-8), alpha=group["lr"])


class Moments(Written):
    """Each element by itself, in flat states, of which one is not read; it writes to the gradient too.

    No sum of products is in it, which XLA on the CPU contracts.
    """

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(m=g.new_zeros(g.numel()), last=g.new_zeros(1, g.numel()))
        g.view(-1).mul_(0.5)
        state["last"].copy_(g.view(1, -1))
        p.sub_(state["m"].add_(g.flatten()).view_as(p))


ALL = (Mini, Vectors, Fused, Blocks, Flat)
