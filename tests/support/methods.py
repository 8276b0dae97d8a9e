"""Optimizers with methods beside `step`, written as their papers and users write them."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Optimizer


class SophiaG(Optimizer):
    """Liu et al., 2023: every so often the curvature is estimated from gradients of resampled labels."""

    def __init__(self, params: Any, lr: float = 1e-2, betas: Any = (0.9, 0.95), rho: float = 0.04) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "rho": rho, "weight_decay": 0.1})

    def _state_of(self, p: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[p]
        if len(state) == 0:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["hessian"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        return state

    @torch.no_grad()
    def update_hessian(self, bs: int = 1) -> None:
        for group in self.param_groups:
            beta2 = group["betas"][1]
            for p in group["params"]:
                if p.grad is not None:
                    self._state_of(p)["hessian"].mul_(beta2).addcmul_(p.grad, p.grad, value=(1 - beta2) * bs)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1 = group["betas"][0]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self._state_of(p)
                state["step"] += 1
                p.mul_(1 - group["lr"] * group["weight_decay"])
                state["exp_avg"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                ratio = (state["exp_avg"].abs() / (group["rho"] * state["hessian"] + 1e-15)).clamp(None, 1)
                p.addcmul_(state["exp_avg"].sign(), ratio, value=-group["lr"])


class SAM(SGD):
    """Foret et al., 2021, in two steps: up to the worst point nearby, back to the last bit, and down from there."""

    @torch.no_grad()
    def first_step(self, rho: float = 0.05, zero_grad: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad, alpha=rho / (self.grad_norm() + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad: bool = False) -> None:
        self.restore()
        self.step()
        if zero_grad:
            self.zero_grad()

    def restore(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p].pop("old_p")

    def grad_norm(self) -> float:
        norms = [p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None]
        return float(torch.stack(norms).norm())


class Busy(SGD):
    """Methods of all kinds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.calls = 0
        self.log: list[str] = []
        self.set_scale(2.0)

    # numbers

    def set_scale(self, scale: float) -> None:
        self.scale = scale
        for group in self.param_groups:
            group["scale"] = scale

    def get_lr(self) -> list[float]:
        self.calls += 1
        self.log.append("get_lr")
        return [group["lr"] for group in self.param_groups]

    @property
    def rate(self) -> float:
        rate: float = self.param_groups[0]["lr"]
        return rate

    @rate.setter
    def rate(self, lr: float) -> None:
        for group in self.param_groups:
            group["lr"] = lr

    # weights and states

    @property
    def weight_norm(self) -> float:
        squares = [float(p.detach().double().square().sum()) for g in self.param_groups for p in g["params"]]
        return math.sqrt(sum(squares))

    @torch.no_grad()
    def scale_weights(self, factor: float) -> Busy:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(factor)
        return self

    def zero_momentum(self) -> None:
        for state in self.state.values():
            state["momentum_buffer"].zero_()

    def reset(self) -> None:
        self.state.clear()

    def reset_anew(self) -> None:
        self.state = type(self.state)(dict)

    @torch.no_grad()
    def swap_weights(self, others: Any) -> None:
        for p, other in zip((p for g in self.param_groups for p in g["params"]), others, strict=True):
            kept = p.clone()
            p.copy_(other)
            other.copy_(kept)

    def trainable(self) -> list[nn.Parameter]:
        return [p for group in self.param_groups for p in group["params"] if p.requires_grad]

    @torch.no_grad()
    def halve_gradients(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    # what cannot be

    def weight(self) -> Any:
        return self.param_groups[0]["params"][0].detach()

    def buffers(self) -> list[torch.Tensor]:
        return [state["momentum_buffer"] for state in self.state.values()]

    def iterate(self) -> Any:
        for group in self.param_groups:
            yield from group["params"]

    @contextmanager
    def scaled(self, factor: float) -> Any:
        self.scale_weights(factor)
        yield
        self.scale_weights(1 / factor)

    def norm_with_graph(self) -> torch.Tensor:
        norm: torch.Tensor = self.param_groups[0]["params"][0].norm()
        return norm

    def evaluate(self, closure: Any) -> Any:
        self.scale_weights(2.0)
        return closure()

    def evaluate_first(self, closure: Any) -> Any:
        loss = closure()
        self.scale_weights(2.0)
        return loss

    def decay_model(self, model: nn.Module) -> None:
        for p in model.parameters():
            self.state[p]["decayed"] = p * 0.5

    def add_one(self) -> None:
        self.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def hold(self) -> Any:
        return lambda: self.scale_weights(2.0)
