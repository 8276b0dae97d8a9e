"""Optimizers written by hand, as loops over parameters."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

Params = Any


class _Loop(Optimizer):
    """A loop over parameters; subclasses update one."""

    def __init__(self, params: Params, lr: float = 1e-2, betas: tuple[float, ...] = (0.9, 0.99, 0.98)) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


class LoopAdamW(_Loop):
    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        b1, b2, *_ = group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        state["m"].mul_(b1).add_(g, alpha=1 - b1)
        state["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
        denom = (state["v"].sqrt() / (1 - b2 ** state["step"]) ** 0.5).add_(group["eps"])
        p.addcdiv_(state["m"], denom, value=-group["lr"] / (1 - b1 ** state["step"]))


class LoopLAMB(_Loop):
    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["step"] += 1
        b1, b2, *_ = group["betas"]
        state["m"].mul_(b1).add_(g, alpha=1 - b1)
        state["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
        u = (state["m"] / (1 - b1 ** state["step"])) / ((state["v"] / (1 - b2 ** state["step"])).sqrt() + group["eps"])
        u = u + group["weight_decay"] * p
        weights, updates = p.norm(), u.norm()
        ratio = torch.where(weights > 0, torch.where(updates > 0, weights / updates, 1.0), 1.0)
        p.sub_(u * (ratio * group["lr"]))


class LoopScheduleFree(_Loop):
    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["z"], state["v"] = p.clone(), torch.zeros_like(p)
        state["step"] += 1
        k, (b1, b2, *_) = state["step"], group["betas"]
        state["v"].mul_(b2).addcmul_(g, g, value=1 - b2)
        g = g / (state["v"] / (1 - b2**k)).sqrt().add_(group["eps"])
        p.lerp_(state["z"], 1 / k)
        p.add_(g, alpha=group["lr"] * (b1 * (1 - 1 / k) - 1))
        state["z"].sub_(g, alpha=group["lr"])


class LoopLion(_Loop):
    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if "m" not in state:
            state["m"] = torch.zeros_like(p)
        b1, b2, *_ = group["betas"]
        p.data.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(state["m"].clone().mul_(b1).add(g, alpha=1 - b1).sign_(), alpha=-group["lr"])
        state["m"].mul_(b2).add_(g, alpha=1 - b2)


class LoopAdan(_Loop):
    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"] = 0
            state["m"], state["d"], state["n"] = torch.zeros_like(p), torch.zeros_like(p), torch.zeros_like(p)
            state["last"] = g.clone()
        state["step"] += 1
        b1, b2, b3 = group["betas"]
        diff = g - state["last"]
        state["m"].lerp_(g, 1 - b1)
        state["d"].lerp_(diff, 1 - b2)
        u = g + b2 * diff
        state["n"].mul_(b3).addcmul_(u, u, value=1 - b3)
        denom = (state["n"] / (1 - b3 ** state["step"])).sqrt().add_(group["eps"])
        step = state["m"] / (1 - b1 ** state["step"]) + b2 * state["d"] / (1 - b2 ** state["step"])
        p.addcdiv_(step, denom, value=-group["lr"]).div_(1 + group["lr"] * group["weight_decay"])
        state["last"].copy_(g)


LOOPS = (LoopAdamW, LoopLAMB, LoopScheduleFree, LoopLion, LoopAdan)
