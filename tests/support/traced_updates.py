"""What hostile updates are, the two tables that they are in (`traced_cases` has all of them), and what is compared.

Each is the update of one parameter: `(optimizer, p, gradient, state, lr, number of the step)`. In `LAUNCHED` are those
whose steps are launched; `COMPUTED` need a value at once, or do what cannot be launched, and run as written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.numerics.formats import is_component

Update = Callable[[Any, Any, Any, dict[str, Any], float, int], object]


LAUNCHED: dict[str, Update] = {}


COMPUTED: dict[str, Update] = {}


def launched(update: Update) -> Update:
    """Registers an update that is launched."""
    return _added(LAUNCHED, update)


def computed(update: Update) -> Update:
    """Registers one that is not."""
    return _added(COMPUTED, update)


def _added(table: dict[str, Update], update: Update) -> Update:
    assert update.__name__ not in LAUNCHED | COMPUTED, update.__name__
    return table.setdefault(update.__name__, update)


class Stepping(torch.optim.Optimizer):
    """The optimizer of an update; `kept` is what it keeps, at first what the update's own `kept` makes."""

    def __init__(self, params: Any, update: Update, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})
        self.update, self.t = update, 0
        self.kept: dict[Any, Any] = getattr(update, "kept", lambda _: {})(all_of(self))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(self, p, p.grad, self.state[p], group["lr"], self.t)


def all_of(o: Any) -> list[Any]:
    return [q for group in o.param_groups for q in group["params"]]


def place(o: Any, p: Any) -> int:
    """The place of a parameter among all."""
    return next(i for i, q in enumerate(all_of(o)) if q is p)


def initial(dtype: torch.dtype, device: torch.device | str = "cpu") -> list[Parameter]:
    """The parameters of a case."""
    torch.manual_seed(0)
    return [Parameter(torch.randn(shape).bfloat16().to(device, dtype)) for shape in ((4, 6), (6,), (5, 5))]


def set_gradients(params: list[Any], t: int) -> None:
    """Gives the parameters the gradients of a step."""
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=torch.Generator().manual_seed(1000 * t + i)).bfloat16()
        p.grad = g.to(p.device, p.dtype)


def stepped_beside(
    make: Any, params: list[Parameter], strategy: str | None, steps: int, **settings: Any
) -> tuple[Any, list[Tensor]]:
    """An optimizer after some steps, compiled if there is a strategy, and the values of its parameters."""
    optimizer = make(params)
    if strategy:
        optimizer = collage_neuron.compile(optimizer, strategy=strategy, **{"verbose": False, **settings})
    torch.manual_seed(1)
    for t in range(1, steps + 1):
        set_gradients(params, t)
        optimizer.step()
    read = collage_neuron.exact_value if strategy else lambda _, p: p.detach()
    return optimizer, [read(optimizer, p).clone() for p in params]


def error(found: list[Tensor], exact: list[Tensor], start: list[Tensor] | None = None) -> float:
    """The largest error of a parameter, in distances that it has moved; `start` is where a case begins."""
    triples = zip(found, exact, initial(torch.float32) if start is None else start, strict=True)
    each = [(float((x.double() - y.double()).norm()), float((y - p).detach().double().norm())) for x, y, p in triples]
    return max(off / far if far else off for off, far in each)


def left(optimizer: Any) -> str:
    """What steps leave on the host, as text: attributes, groups, gradients and states; of tensors shapes only."""
    own = {k: v for k, v in vars(optimizer).items() if not k.startswith("_") and k not in ("state", "defaults")}
    params = all_of(optimizer)
    states = [dict.get(optimizer.state, p, {}) for p in params]
    visible = [{k: v for k, v in state.items() if not is_word(k, state)} for state in states]
    return str(_told([own, visible, [(p.grad, vars(p), p.requires_grad) for p in params]]))


def is_word(name: Any, state: dict[Any, Any]) -> bool:
    """Returns True for a word of a value that plain torch has in one tensor."""
    return isinstance(name, str) and bool(is_component(name, state))


def _told(x: Any) -> Any:
    if isinstance(x, Tensor):
        return list(x.shape)
    if isinstance(x, dict):
        named = [(str(k) if isinstance(k, (str, float, tuple)) else type(k).__name__, v) for k, v in x.items()]
        return [(k, _told(v)) for k, v in named if not k.lstrip("_").startswith("collage_")]
    if isinstance(x, (list, tuple, deque)):
        return list(map(_told, x))
    return x if isinstance(x, (int, float, str, bool, type(None))) else type(x).__name__
