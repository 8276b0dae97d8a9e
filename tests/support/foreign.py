"""Optimizers as other people write them: in their habits and spellings, not in ours, and unaware of any compiler."""

from __future__ import annotations

import math
from typing import Any

import torch
from as_written import Written
from torch.optim import Optimizer

# Third-party code is rarely typed: `Any` here keeps the spellings as they are found.


class TransformersAdamW(Optimizer):
    """AdamW as a well-known library shipped it for years: int step, math on the host, eps outside the correction."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.999), eps: float = 1e-6,
                 weight_decay: float = 0.01, correct_bias: bool = True) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "correct_bias": correct_bias}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad
                if grad.is_sparse:
                    raise RuntimeError("sparse gradients are for SparseAdam")
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = 0
                    state["exp_avg"] = torch.zeros_like(p.data)
                    state["exp_avg_sq"] = torch.zeros_like(p.data)
                m, v = state["exp_avg"], state["exp_avg_sq"]
                beta1, beta2 = group["betas"]
                state["step"] += 1
                m.mul_(beta1).add_(grad, alpha=(1.0 - beta1))
                v.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
                denom = v.sqrt().add_(group["eps"])
                size = group["lr"]
                if group["correct_bias"]:
                    size = size * math.sqrt(1.0 - beta2 ** state["step"]) / (1.0 - beta1 ** state["step"])
                p.addcdiv_(m, denom, value=-size)
                if group["weight_decay"] > 0.0:
                    p.add_(p, alpha=(-group["lr"] * group["weight_decay"]))
        return None


class Lion(Written):
    """Chen et al., 2023: the sign of an interpolation; the moment is updated afterwards with another decay."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99), weight_decay: float = 0.1) -> None:
        super().__init__(params, lr, betas=betas, weight_decay=weight_decay)

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if len(state) == 0:
            state["exp_avg"] = torch.zeros_like(p)
        p.data.mul_(1.0 - group["lr"] * group["weight_decay"])
        p.add_(state["exp_avg"].clone().mul_(beta1).add(g, alpha=1.0 - beta1).sign_(), alpha=-group["lr"])
        state["exp_avg"].mul_(beta2).add_(g, alpha=1.0 - beta2)


class Lamb(Written):
    """You et al., 2020: Adam's direction, scaled for each layer by the ratio of two norms, or not scaled."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.01, trust: bool = True) -> None:
        super().__init__(params, lr, betas=(0.9, 0.99), weight_decay=weight_decay, trust=trust)

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        state["m"] = beta1 * state["m"] + (1 - beta1) * g
        state["v"] = beta2 * state["v"] + (1 - beta2) * g.pow(2)
        update = state["m"] / (state["v"].sqrt() + 1e-6) + group["weight_decay"] * p
        ratio: Any = 1.0
        if group["trust"]:
            w_norm, u_norm = p.norm(), update.norm()
            ratio = torch.where(w_norm > 0, torch.where(u_norm > 0, w_norm / u_norm, 1.0), 1.0)
        p.add_(update * ratio, alpha=-group["lr"])


class Sophia(Optimizer):
    """Liu et al., 2023, in its habits: a diagonal curvature every fourth step, and a clipped ratio with it."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: Any = (0.96, 0.99), rho: float = 0.04) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho, "weight_decay": 0.1, "interval": 4})

    @torch.no_grad()
    def step(self, closure: Any = None, bs: int = 16) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if len(state) == 0:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                    state["hessian"] = torch.zeros_like(p, memory_format=torch.preserve_format)
                if state["step"] % group["interval"] == 0:
                    state["hessian"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                ratio = (state["exp_avg"].abs() / (group["rho"] * bs * state["hessian"] + 1e-15)).clamp(None, 1)
                p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class ScheduleFreeAdamW(Optimizer):
    """Defazio et al., 2024: no schedule but an average; z starts as a clone of p; k, weight_sum live in the group."""

    def __init__(self, params: Any, lr: float = 2.5e-3, betas: Any = (0.9, 0.999), weight_decay: float = 0.01,
                 warmup_steps: int = 4) -> None:  # fmt: skip
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "warmup_steps": warmup_steps, "k": 0,
                    "weight_sum": 0.0, "lr_max": -1.0}  # fmt: skip
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            k = group["k"]
            lr = group["lr"] * min(1.0, (k + 1) / group["warmup_steps"])
            lr_max = group["lr_max"] = max(lr, group["lr_max"])
            weight = lr_max**2
            weight_sum = group["weight_sum"] = group["weight_sum"] + weight
            ckp1 = weight / weight_sum if weight_sum else 0
            for y in group["params"]:
                if y.grad is None:
                    continue
                state = self.state[y]
                if "z" not in state:
                    state["z"] = torch.clone(y, memory_format=torch.preserve_format)
                    state["exp_avg_sq"] = torch.zeros_like(y, memory_format=torch.preserve_format)
                z, v = state["z"], state["exp_avg_sq"]
                v.mul_(beta2).addcmul_(y.grad, y.grad, value=1 - beta2)
                direction = y.grad.div(v.div(1 - beta2 ** (k + 1)).sqrt_().add_(1e-8))
                direction.add_(y, alpha=group["weight_decay"])
                y.lerp_(end=z, weight=ckp1)
                y.add_(direction, alpha=lr * (beta1 * (1 - ckp1) - 1))
                z.sub_(direction, alpha=lr)
            group["k"] = k + 1


class Langevin(Written):
    """Stochastic gradient Langevin dynamics: adds noise."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.add_(g, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=math.sqrt(2 * group["lr"]))
