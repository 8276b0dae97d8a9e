"""Optimizers that step another one: published wrappers, and some of our own that hold it in other ways.

Each is a function of parameters. `LAUNCHED` are those of which each step is; the others run as written.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron

Make = Callable[[list[Parameter]], Any]

LAUNCHED: dict[str, Make] = {}
WRITTEN: dict[str, Make] = {}

LR = 0.01


def published(name: str, *args: Any, **kwargs: Any) -> Any:
    """A wrapper of pytorch_optimizer, in training mode."""
    import pytorch_optimizer

    made = getattr(pytorch_optimizer, name)(*args, **kwargs)
    if hasattr(made, "train"):
        made.train()
    return made


def adam(params: list[Parameter]) -> AdamW:
    return AdamW(params, lr=LR)


def sgd(params: list[Parameter]) -> SGD:
    return SGD(params, lr=LR, momentum=0.9)


LAUNCHED |= {
    "lookahead": lambda ps: published("Lookahead", adam(ps), k=3),
    "pullback": lambda ps: published("Lookahead", sgd(ps), k=3, pullback_momentum="pullback"),
    "schedule-free": lambda ps: published("ScheduleFreeWrapper", adam(ps)),
    "magma": lambda ps: published("Magma", adam(ps)),
}
WRITTEN |= {
    "sam": lambda ps: published("SAM", ps, AdamW, lr=LR),
    "ortho": lambda ps: published("OrthoGrad", adam(ps)),
    "trac": lambda ps: published("TRAC", adam(ps)),
    "ortho around lookahead": lambda ps: published("OrthoGrad", published("Lookahead", adam(ps), k=3)),
}
TAKE_CLOSURES = {"sam"}


class Timm(Optimizer):
    """As timm's Lookahead: the groups of the inner one, a state that stays empty, slow weights in the inner state."""

    def __init__(self, inner: Optimizer, alpha: float = 0.5, k: int = 3) -> None:
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        self._base_optimizer, self.alpha, self.k = inner, alpha, k
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, defaultdict(dict)
        for group in self.param_groups:
            group.setdefault("lookahead_step", 0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self._base_optimizer.step(closure)
        for group in self.param_groups:
            group["lookahead_step"] += 1
            for p in group["params"] if group["lookahead_step"] % self.k == 0 else ():
                state = self._base_optimizer.state[p]
                if "slow" not in state:
                    state["slow"] = torch.empty_like(p)
                    state["slow"].copy_(p)
                state["slow"].add_(p - state["slow"], alpha=self.alpha)
                p.copy_(state["slow"])

    def state_dict(self) -> Any:
        return self._base_optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self._base_optimizer.load_state_dict(state_dict)
        self.param_groups = self._base_optimizer.param_groups


class Bare(Timm):
    """Makes no hooks, or a plain `dict` of them, as the wrappers of pytorch_optimizer 3.10 do."""

    def __init__(self, inner: Optimizer) -> None:
        self._optimizer_step_pre_hooks: Any = {}
        self._base_optimizer, self.alpha, self.k, self.state = inner, 0.5, 3, defaultdict(dict)
        self.param_groups, self.defaults = inner.param_groups, {}
        for group in self.param_groups:
            group.setdefault("lookahead_step", 0)


class Listed(Optimizer):
    """Optimizers in a list, with groups of its own; their states are in no `state_dict()`."""

    def __init__(self, *inner: Optimizer) -> None:
        super().__init__([p for x in inner for group in x.param_groups for p in group["params"]], {})
        self.many = list(inner)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for x in self.many:
            x.step()


class Anchored(Optimizer):
    """An inner optimizer in a dictionary, and a state of its own under a name that the inner one has too."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.kept = {"an inner one": inner}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.kept["an inner one"].step()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = p.clone()
                state["exp_avg"].lerp_(p, 0.1)
                p.lerp_(state["exp_avg"], 0.05)


class Holding(Optimizer):
    """Holds the state of a parameter of the inner one from the first step on, and reads it there."""

    def __init__(self, inner: Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner, self.held = inner, list[Any]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.inner.step()
        params = [p for group in self.param_groups for p in group["params"]]
        self.held = self.held or [self.inner.state[p] for p in params]
        for p, state in zip(params, self.held, strict=True):
            p.sub_(state["exp_avg"], alpha=1e-3)


LAUNCHED |= {
    "timm": lambda ps: Timm(adam(ps)),
    "bare": lambda ps: Bare(adam(ps)),
    "listed": lambda ps: Listed(adam(ps[:1]), sgd(ps[1:])),
    "anchored": lambda ps: Anchored(adam(ps)),
    "holding": lambda ps: Holding(adam(ps)),
}


class AsksForTypes(SGD):
    """An inner optimizer that does what placeholders cannot have."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=LR * (1.0 if type(p) is Parameter else 7.0))


WRITTEN["asks for types"] = lambda ps: Listed(AsksForTypes(ps))

CASES = LAUNCHED | WRITTEN
SHAPES = ((4, 5), (7,), (70, 80))


def initial() -> list[Parameter]:
    g = torch.Generator().manual_seed(0)
    return [Parameter(torch.randn(shape, generator=g)) for shape in SHAPES]


def gradient(p: Tensor, g: torch.Generator) -> Tensor:
    return torch.randn(p.shape, generator=g).bfloat16().to(p.dtype)


def run(name: str, optimizer: Any, params: list[Parameter], steps: int, first: int = 0) -> None:
    """Steps with gradients that depend on nothing but the number of the step."""
    for number in range(first, first + steps):
        torch.manual_seed(number)  # Magma draws
        g = torch.Generator().manual_seed(number)

        def closure(g: torch.Generator = g) -> float:
            for p in params:
                p.grad = gradient(p, g)
            return 1.0

        closure()
        optimizer.step(*([closure] if name in TAKE_CLOSURES else []))


def compiled(make: Make, strategy: str = "fp32", **options: Any) -> tuple[Any, list[Parameter]]:
    params = initial()
    settings: dict[str, Any] = {"strategy": strategy, "verbose": False, "validate": "off", **options}
    return collage_neuron.compile(make(params), **settings), params


def plain(make: Make) -> tuple[Any, list[Parameter]]:
    params = initial()
    return make(params), params


def error(optimizer: Any, params: list[Parameter], exact: list[Parameter]) -> float:
    found = zip(params, exact, strict=True)
    return max(float((collage_neuron.exact_value(optimizer, p) - q.detach()).abs().max()) for p, q in found)


NEAR = {"fp32": 1e-5, "plus": 2**-8, "split433": 2**-13}
"""Of plus: 10 steps of .01, and more of momentum, of which the first moment is off by 2**-9."""
