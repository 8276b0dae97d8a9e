"""Collage-light and Collage-plus AdamW (Yu et al., "Collage", ICML 2024), written out by hand on torch.bfloat16.

Nothing of the package is used: `a + b`, `a - b`, `a * b`, `a / b` and `sqrt` of bfloat16 tensors round correctly, one
rounding an operation. An expression that takes Python floats is computed in fp32, the floats as fp32 numbers, from
left to right as written, and rounded once by `fl`. What is written on one line rounds in the order it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

BF16 = torch.bfloat16


class State(NamedTuple):
    """What a parameter keeps: theta + dtheta, m, and v, which Collage-plus keeps as v + dv. All bfloat16."""

    theta: Tensor
    dtheta: Tensor
    m: Tensor
    v: Tensor
    dv: Tensor | None


class Hyper(NamedTuple):
    """Hyper-parameters, Python floats."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.1


Pair = tuple[Tensor, Tensor]


def fl(x: Tensor) -> Tensor:
    """Rounds an fp32 or fp64 value to bfloat16."""
    return x.to(BF16)


def fast2sum(a: Tensor, b: Tensor) -> Pair:
    """Fast2Sum: x + y = a + b if |a| >= |b| (Dekker)."""
    x = a + b
    y = b - (x - a)
    return x, y


def two_prod_fma(a: Tensor, b: Tensor) -> Pair:
    """TwoProdFMA: p + e = a * b; fma(a, b, -p) is exact in double."""
    p = a * b
    e = fl(a.double() * b.double() - p.double())
    return p, e


def grow(x: Tensor, y: Tensor, a: Tensor) -> Pair:
    """Grow: (x, y) + a."""
    u, v = fast2sum(x, a)
    return fast2sum(u, y + v)


def mul(x1: Tensor, y1: Tensor, x2: Tensor, y2: Tensor) -> Pair:
    """Mul: (x1, y1) * (x2, y2)."""
    p, e = two_prod_fma(x1, x2)
    e = e + (x1 * y2 + y1 * x2)
    return fast2sum(p, e)


def split(beta: float) -> Pair:
    """The double as two bfloat16 words."""
    hi = torch.tensor(beta, dtype=BF16)
    return hi, torch.tensor(beta - hi.item(), dtype=BF16)


def second_moment_light(v: Tensor, g: Tensor, h: Hyper) -> Tensor:
    """V <- fl(fl(beta2 v) + (1 - beta2) g g), the product from the left, as torch does: g g alone may overflow."""
    v = fl(v.float() * h.beta2)
    return fl(v.float() + (1 - h.beta2) * g.float() * g.float())


def second_moment_plus(v: Tensor, dv: Tensor, g: Tensor, h: Hyper) -> Pair:
    """(v, dv) <- Grow(Mul((v, dv), beta2), fl((1 - beta2) g g)), beta2 as an expansion."""
    b, db = split(h.beta2)
    v, dv = mul(v, dv, b, db)
    x = fl((1 - h.beta2) * g.float() * g.float())
    return grow(v, dv, x)


def adamw(s: State, g: Tensor, t: int, h: Hyper) -> State:
    """One step, t counting from 1: Collage-plus if the state has dv, otherwise Collage-light."""
    delta, m, v, dv = aggregated_update(s, g, t, h)
    theta, dtheta = grow(s.theta, s.dtheta, delta)
    return State(theta, dtheta, m, v, dv)


def aggregated_update(s: State, g: Tensor, t: int, h: Hyper) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """What is grown into theta, the raw update of the metric EDQ, and the new m, v and dv."""
    step = h.lr / (1 - h.beta1**t)
    # Compact decay: theta * (1 - lr wd) would round to theta. 0.0 - x and not -x, so that lr = 0 gives +0.0 * theta.
    decay = fl(s.theta.float() * (0.0 - h.lr * h.weight_decay))
    m = fl(s.m.float() + (1 - h.beta1) * (g.float() - s.m.float()))
    if s.dv is None:
        v, dv = second_moment_light(s.v, g, h), None
    else:
        v, dv = second_moment_plus(s.v, s.dv, g, h)
    denom = fl(v.sqrt().float() / (1 - h.beta2**t) ** 0.5)  # the high word of v alone
    denom = fl(denom.float() + h.eps)
    return fl(m.float() * -step / denom.float()) + decay, m, v, dv


class _Recorder(TorchDispatchMode):
    def __init__(self, results: list[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.dtype == BF16 and result.dim():
            self.results.append(result)
        return result


@contextmanager
def recorded() -> Iterator[list[Tensor]]:
    """The result of every operation that rounds to bfloat16, in the order of execution."""
    results: list[Tensor] = []
    with _Recorder(results):
        yield results
