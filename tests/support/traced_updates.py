"""What updates for traced steps are, and the two tables that they are in (`traced_cases` has all of them).

Each is the update of one parameter: `(optimizer, p, gradient, state, lr, number of the step)`. In `LAUNCHED` are those
whose steps are compiled; `COMPUTED` need a value at once, or do what cannot be compiled, and run as written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

Update = Callable[[Any, Any, Any, dict[str, Any], float, int], object]


LAUNCHED: dict[str, Update] = {}


COMPUTED: dict[str, Update] = {}


def launched(update: Update) -> Update:
    """Registers an update that is compiled."""
    return LAUNCHED.setdefault(update.__name__, update)


def computed(update: Update) -> Update:
    """Registers one that is not."""
    return COMPUTED.setdefault(update.__name__, update)


class Stepping(torch.optim.Optimizer):
    """The optimizer of an update; `kept` is what it keeps."""

    def __init__(self, params: Any, update: Update, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.update, self.t = update, 0
        self.kept: dict[Any, Any] = {}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(self, p, p.grad, self.state[p], group["lr"], self.t)


def all_of(o: Any) -> list[Any]:
    return [q for group in o.param_groups for q in group["params"]]


def initial(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Parameter]:
    """The parameters of a case."""
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape).bfloat16().to(device, dtype)) for shape in ((4, 6), (6,), (5, 5))]


def set_gradients(params: list[Any], t: int) -> None:
    """Gives the parameters the gradients of a step."""
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * t + i)).bfloat16()
        p.grad = g.to(p.device, p.dtype)


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """The largest error of a parameter, in distances that it has moved."""
    start = initial(torch.float32)
    each = zip(found, exact, start, strict=True)
    return max(float((x.double() - y.double()).norm() / (y - p).detach().double().norm()) for x, y, p in each)
