"""Optimizers that treat the parameters of one group differently, each in a way of its own; and some that only may."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

# Third-party code is rarely typed: `Any` here keeps the spellings as they are found.


class Descent(Optimizer):
    """Plain descent, each parameter with the rate that `rate` says: the control, since here all have the same."""

    def __init__(self, params: Any, lr: float = 0.125) -> None:
        super().__init__(params, {"lr": lr, "t": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] * self.rate(group, i, p))

    def rate(self, group: Any, i: int, p: Any) -> Any:
        return 1.0


class Attribute(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        return getattr(p, "lr_scale", 1.0)


class AttributeOfItsClass(Descent):
    class Slow(torch.nn.Parameter):
        lr_scale = 0.1

    def rate(self, group: Any, i: int, p: Any) -> Any:
        return p.lr_scale if hasattr(p, "lr_scale") else 1.0


class TensorAttribute(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        if getattr(p, "main_grad", None) is not None:
            p.add_(p.main_grad)
        return 1.0


class CountingAttribute(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        p.steps = getattr(p, "steps", 0) + 1
        return 1.0 / p.steps


class Buffer(Descent):
    """Momentum as an attribute of the parameter."""

    def rate(self, group: Any, i: int, p: Any) -> Any:
        if not hasattr(p, "buf"):
            p.buf = torch.zeros_like(p)
        p.buf.lerp_(p.grad, 0.1)
        p.add_(p.buf, alpha=-group["lr"])
        return 0.0


class LayerWise(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        return 0.5 ** (len(group["params"]) - 1 - i)


class First(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        return 1.0 if p is group["params"][0] else 0.1


class Named(Descent):
    """Rates by name: newer torch keeps the names of named parameters in the group."""

    def rate(self, group: Any, i: int, p: Any) -> Any:
        return 0.1 if group["param_names"][i].endswith("bias") else 1.0


class Size(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        return 1.0 / sum(q.numel() for q in group["params"])


class KeyedById(Descent):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.rates = {id(self.param_groups[0]["params"][-1]): 0.1}

    def rate(self, group: Any, i: int, p: Any) -> Any:
        return self.rates.get(id(p), 3.0)


class Held(Descent):
    """Compares with a parameter that the optimizer holds on to."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.head = [self.param_groups[0]["params"][-1]]

    def rate(self, group: Any, i: int, p: Any) -> Any:
        return 0.1 if any(p is q for q in self.head) else 1.0


class OwnList(Descent):
    """Goes through a list of its own instead of the groups."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.mine = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.mine:
            p.add_(p.grad, alpha=-0.125)


class CountedInTheLoop(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        group["t"] += 1
        return 1.0 / group["t"]


RATES: dict[Any, float] = {}
MOMENTA: dict[int, torch.Tensor] = {}


class ModuleById(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        return RATES.get(id(p), 1.0)


class ModuleByParameter(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        return RATES.get(p, 1.0)


class ModuleMomentum(Descent):
    def rate(self, group: Any, i: int, p: Any) -> Any:
        momentum = MOMENTA.setdefault(id(p), torch.zeros_like(p))
        p.add_(momentum.lerp_(p.grad, 0.1), alpha=-group["lr"])
        return 0.0


class Neighbour(Descent):
    """Moves one parameter by another one's gradient."""

    def rate(self, group: Any, i: int, p: Any) -> Any:
        p.add_(group["params"][i - 1].grad)
        return 1.0


class Listed(Descent):
    """The same for all parameters, but the last one's rate; on lists."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = self.param_groups[0]["params"]
        rates = [0.125] * (len(params) - 1) + [0.0125]
        torch._foreach_sub_(params, torch._foreach_mul([p.grad for p in params], rates))


class ByGroup(Descent):
    """Each group slower than the one before it."""

    def rate(self, group: Any, i: int, p: Any) -> Any:
        return 0.5 ** next(j for j, g in enumerate(self.param_groups) if g is group)


class CountedByGroup(Descent):
    """An attribute that is advanced for each group."""

    count = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            self.count = self.count + 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / self.count)


class LaterFirst(Descent):
    """From the third step on the first parameter is decayed."""

    def rate(self, group: Any, i: int, p: Any) -> Any:
        step = self.state[p]["step"] = self.state[p].get("step", 0) + 1
        if step > 2 and p is group["params"][0]:
            p.mul_(0.5)
        return 1.0


class Harmless(Descent):
    """Looks at identities, places and names, holds on to its parameters, and makes nothing of it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.all, self.scratch = list(self.param_groups[0]["params"]), torch.zeros(3)

    def rate(self, group: Any, i: int, p: Any) -> Any:
        known = {id(q): j for j, q in enumerate(group["params"])}
        corrections = torch.tensor([0.9, 0.99]).pow_(2)
        return 1.0 if known[id(p)] == i and len(self.all) and corrections[0] < 1 else 2.0
