"""Optimizers with norms and means of whole tensors, as people write them: captured in stages."""

from __future__ import annotations

import math
from typing import Any

import torch
from as_written import Written
from torch import Tensor


class Lamb(Written):
    """LAMB: each step is scaled by the quotient of two norms, which is 1 where one of them is 0, and at most 10."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        m, v = state["exp_avg"].lerp_(g, 0.1), state["exp_avg_sq"].mul_(0.999).addcmul_(g, g, value=0.001)
        t = state["step"]
        u = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * p
        of_p, of_u = p.norm(), u.norm()
        ratio = torch.where((of_p > 0) & (of_u > 0), of_p / of_u, torch.ones_like(of_p)).clamp(max=10.0)
        p.add_(u * ratio, alpha=-group["lr"])


class Lars(Written):
    """LARS: momentum of gradients that are scaled by the quotient of two norms."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p)
        g = g + 1e-3 * p
        of_p, of_g = torch.linalg.vector_norm(p), torch.linalg.vector_norm(g)
        ratio = torch.where(of_p * of_g > 0, 0.1 * of_p / (of_g + 1e-8), 1.0)
        p.sub_(state["momentum_buffer"].mul_(0.9).add_(g * ratio), alpha=group["lr"])


class StableAdamW(Written):
    """StableAdamW: the rate is divided by the root mean square of g / sqrt(v), if that is above 1."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        t = float(state["step"])
        m, v = state["exp_avg"].lerp_(g, 0.1), state["exp_avg_sq"].lerp_(g * g, 0.01)
        v_hat = v / (1 - 0.99**t)
        rms = (g.square() / v_hat.clamp(min=1e-12)).mean().sqrt()
        rate = group["lr"] / rms.clamp(min=1.0)
        p.mul_(1 - 0.1 * rate)
        p.sub_(rate * (m / (1 - 0.9**t)) / (v_hat.sqrt() + 1e-8))


class Chained(Written):
    """A sum of what another sum has scaled, and masks of numbers: three levels, which no one needs."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        centered = g - g.mean()
        deviation = centered.square().mean().sqrt()
        scaled = torch.where(deviation > 1e-12, centered / deviation, centered)
        size = scaled.abs().sum() / math.sqrt(p.numel() or 1)
        p.sub_(torch.where(size > 2.0, scaled / size, scaled), alpha=group["lr"])


ALL = (Lamb, Lars, StableAdamW, Chained)


class Novograd(Written):
    """NovoGrad: the second moment is one number of the parameter, the average of the square of the gradient's norm."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        square = g.pow(2).sum()
        if not state:
            state.update(step=0, v=square, m=torch.zeros_like(p))
        else:
            state["v"].mul_(0.98).add_(square, alpha=0.02)
        state["step"] += 1
        p.sub_(state["m"].mul_(0.95).add_(g / (state["v"].sqrt() + 1e-8)), alpha=group["lr"])


class Clipping(Written):
    """Clips each gradient by the running maximum of norms, which is made on the device and halved every third step."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(
                step=torch.tensor(0.0), largest=torch.zeros((), device=p.device), before=torch.ones_like(p.sum())
            )
        state["step"] += 1
        old = state["largest"].clone()
        state["largest"].copy_(torch.maximum(old, g.norm()))
        if float(state["step"]) % 3 == 0:
            state["largest"].mul_(0.5)
        p.sub_(g / (state["largest"] + 0.1 * state["before"] + 1e-6), alpha=group["lr"])
        state["before"] = old if float(state["step"]) != 4 else torch.zeros_like(old)


class Decaying(Written):
    """Its number never depends on the gradient: a rate that decays on the device, without any reduction."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["rate"] = p.new_ones(())
        p.sub_(g * state["rate"], alpha=group["lr"])
        state["rate"].mul_(0.9)


ONE_NUMBER = (Novograd, Clipping, Decaying)
"""Optimizers with states of one number, computed from tensors."""
