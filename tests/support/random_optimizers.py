"""Random elementwise optimizers: a program of a few statements, drawn by hypothesis, and a class that runs it.

A program is data, so that an example that fails prints as what it does. `RandomOptimizer.step` spells each statement
the way somebody might: in place or not, through `.data`, `_foreach_` or a method; the spelling is part of the program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from as_written import Written
from hypothesis import strategies as st
from torch import Tensor


class Program(NamedTuple):
    """What an optimizer does in a step, in this order."""

    direction: Any
    """The expression that the states accumulate, over the gradient and the parameter."""
    states: tuple[tuple[str, str, float, Any], ...]
    """For each state its kind, its spelling, its decay, and the expression that it accumulates."""
    update: Any
    """The expression that is subtracted, over gradient, states and direction."""
    denominator: str
    """How the update is divided: by nothing, or by the root of a state of squares."""
    weight_decay: tuple[str, float]
    rate: str
    """How the learning rate depends on the step."""
    apply: str
    """How the parameter is written."""


KINDS = ("average", "square", "sum", "square_sum", "momentum", "maximum", "previous", "slow_weights", "trace")
STATE_NAMES = ("first", "second", "third")
SQUARES = {"square", "square_sum"}
UNSUPPORTED = ("erfinv", "std", "norm", "item", "cumsum", "randn", "sort", "slice", "int")
"""Operations that no elementwise rule can have, or none has: each must be refused, in words."""

Numbers = st.sampled_from([0.5, 0.9, 0.99, 0.1, 2.0, 0.3])


def expressions(leaves: Sequence[str]) -> st.SearchStrategy[Any]:
    """Expression trees over named leaves, as nested tuples."""
    return st.recursive(st.sampled_from(leaves), _grown, max_leaves=4)


def _grown(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    two = st.tuples(st.sampled_from(["add", "sub", "mul", "minimum", "maximum"]), inner, inner)
    scaled = st.tuples(st.sampled_from(["add_alpha", "lerp"]), inner, inner, Numbers)
    one = st.tuples(st.sampled_from(["neg", "abs", "sign", "square", "root", "sigmoid", "log1p", "decayed"]), inner)
    by = st.tuples(st.sampled_from(["times", "over", "clip", "power"]), inner, Numbers)
    mask = st.tuples(st.sampled_from(["where", "masked", "mask_times", "masked_fill", "assign"]), inner, inner)
    return st.one_of(two, scaled, one, by, mask)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """A random optimizer; about one in twelve does something that cannot be rewritten."""
    count = draw(st.integers(0, 3))
    names = list(STATE_NAMES[:count])
    direction = draw(expressions(["grad", "grad", "param"]))
    states = tuple(
        (
            draw(st.sampled_from(KINDS)),
            draw(st.sampled_from(["in_place", "new", "foreach", "lerp"])),
            draw(st.sampled_from([0.9, 0.99, 0.999, 0.5])),
            draw(st.sampled_from(["direction", "grad", *names[:i]])),
        )
        for i in range(count)
    )
    update = draw(expressions(["grad", "direction", *names, *names]))
    if draw(st.integers(0, 11)) == 7:
        update = (draw(st.sampled_from(UNSUPPORTED)), update)
    return Program(
        direction=direction,
        states=states,
        update=update,
        denominator=draw(st.sampled_from(["none", "root", "corrected", "rsqrt"])),
        weight_decay=(draw(st.sampled_from(["none", "decoupled", "divided", "after", "l2"])), draw(Numbers) / 10),
        rate=draw(st.sampled_from(["constant", "warmup", "inverse", "every_other", "tensor"])),
        apply=draw(st.sampled_from(["add_", "sub_", "data", "foreach", "addcdiv_", "copy_", "reassign", "lerp_"])),
    )


class RandomOptimizer(Written):
    """Runs a program."""

    def __init__(self, params: list[torch.nn.Parameter], program: Program, lr: float = 0.02) -> None:
        rate = torch.tensor(lr, dtype=torch.float64) if program.rate == "tensor" else lr
        super().__init__(params, lr=rate, program=program)

    def update(self, p: Any, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        _step(group["program"], p, g, state, group["lr"])


def _step(program: Program, p: torch.nn.Parameter, grad: Tensor, state: dict[str, Any], lr: Any) -> None:
    state["step"] = t = state.get("step", 0) + 1
    lr = _rate(program.rate, lr, t)
    decay, amount = program.weight_decay
    if decay == "decoupled":
        p.mul_(1 - lr * amount)
    elif decay == "divided":
        p.div_(1 + lr * amount)
    elif decay == "l2":
        grad = grad.add(p, alpha=amount)
    values = {"grad": grad, "param": p}
    values["direction"] = value_of(program.direction, values)
    for name, (kind, spelling, beta, source) in zip(STATE_NAMES, program.states, strict=False):
        if name not in state:
            state[name] = p.clone() if kind == "slow_weights" else _initial(kind, p)
        STATES[kind](state, name, values[source], beta, spelling, p)
        values[name] = state[name]
    update = value_of(program.update, values)
    root = _denominator(program, state, t)
    _apply(program.apply, p, update, root, lr)
    if decay == "after":
        p.add_(p, alpha=-lr * amount)


def _rate(kind: str, lr: Any, t: int) -> Any:
    if kind == "every_other":
        return lr if t % 2 else 0.5 * lr
    return {"warmup": lr * min(1.0, t / 3), "inverse": lr / (1 + 0.1 * t)}.get(kind, lr)


def _initial(kind: str, p: Tensor) -> Tensor:
    if kind == "maximum":
        return torch.full_like(p, 0.1)
    return torch.ones_like(p) if kind == "trace" else torch.zeros(p.shape, device=p.device, dtype=p.dtype)


def _average(state: dict[str, Any], name: str, x: Tensor, beta: float, spelling: str, p: Tensor) -> None:
    """name <- beta * name + (1 - beta) * x, in one of four spellings."""
    if spelling == "in_place":
        state[name].mul_(beta).add_(x, alpha=1 - beta)
    elif spelling == "new":
        state[name] = beta * state[name] + (1 - beta) * x
    elif spelling == "lerp":
        state[name].lerp_(x, 1 - beta)
    else:
        torch._foreach_mul_([state[name]], beta)
        torch._foreach_add_([state[name]], [x], alpha=1 - beta)


def _square(state: dict[str, Any], name: str, x: Tensor, beta: float, spelling: str, p: Tensor) -> None:
    if spelling == "in_place":
        state[name].mul_(beta).addcmul_(x, x, value=1 - beta)
    elif spelling == "foreach":
        torch._foreach_mul_([state[name]], beta)
        torch._foreach_addcmul_([state[name]], [x], [x], 1 - beta)
    else:
        _average(state, name, x.square() if spelling == "lerp" else x**2, beta, spelling, p)


def _sum(state: dict[str, Any], name: str, x: Tensor, beta: float, spelling: str, p: Tensor) -> None:
    if spelling == "new":
        state[name] = state[name] + x
    else:
        state[name].add_(x)


def _square_sum(state: dict[str, Any], name: str, x: Tensor, beta: float, spelling: str, p: Tensor) -> None:
    if spelling == "in_place":
        state[name].addcmul_(x, x)
    else:
        _sum(state, name, x * x, beta, spelling, p)


def _momentum(state: dict[str, Any], name: str, x: Tensor, beta: float, spelling: str, p: Tensor) -> None:
    if spelling == "new":
        state[name] = x + beta * state[name]
    else:
        state[name].mul_(beta).add_(x)


def _maximum(state: dict[str, Any], name: str, x: Tensor, beta: float, spelling: str, p: Tensor) -> None:
    if spelling == "in_place":
        torch.maximum(state[name].mul_(beta), x.abs(), out=state[name])
    else:
        state[name] = torch.maximum(state[name] * beta, x.abs().add_(1e-8))


def _previous(state: dict[str, Any], name: str, x: Tensor, beta: float, spelling: str, p: Tensor) -> None:
    if spelling == "new":
        state[name] = x.clone()
    else:
        state[name].copy_(x)


def _slow_weights(state: dict[str, Any], name: str, x: Tensor, beta: float, spelling: str, p: Tensor) -> None:
    _average(state, name, p, beta, spelling, p)


def _trace(state: dict[str, Any], name: str, x: Tensor, beta: float, spelling: str, p: Tensor) -> None:
    """Grows where x is positive, shrinks where it is not, between bounds."""
    factor = torch.where(x > 0, 1.2, 0.5)
    state[name] = (state[name] * factor).clamp(0.125, 8.0)


STATES: dict[str, Callable[..., None]] = {
    "average": _average,
    "square": _square,
    "sum": _sum,
    "square_sum": _square_sum,
    "momentum": _momentum,
    "maximum": _maximum,
    "previous": _previous,
    "slow_weights": _slow_weights,
    "trace": _trace,
}


def _denominator(program: Program, state: dict[str, Any], t: int) -> Tensor | None:
    named = zip(STATE_NAMES, program.states, strict=False)
    squares = [(name, beta) for name, (kind, _, beta, _) in named if kind in SQUARES]
    if program.denominator == "none" or not squares:
        return None
    name, beta = squares[-1]
    square: Tensor = state[name]
    if program.denominator == "rsqrt":
        return (square + 1e-4).rsqrt_().reciprocal()
    if program.denominator == "corrected":
        return (square.sqrt() / math.sqrt(1 - beta**t)).add_(1e-2)
    return square.sqrt().add_(1e-2)


def _apply(spelling: str, p: torch.nn.Parameter, update: Tensor, root: Tensor | None, lr: Any) -> None:
    if spelling == "addcdiv_" and root is not None:
        p.addcdiv_(update, root, value=-float(lr))
        return
    update = update if root is None else update / root
    if spelling == "sub_":
        p.sub_(lr * update)
    elif spelling == "data":
        p.data.add_(update, alpha=-float(lr))
    elif spelling == "foreach":
        torch._foreach_add_([p], [update], alpha=-float(lr))
    elif spelling == "copy_":
        p.copy_(p - lr * update)
    elif spelling == "reassign":
        p.data = p.data - lr * update
    elif spelling == "lerp_":
        p.lerp_(p - update, float(lr))
    else:
        p.add_(update, alpha=-float(lr))


def value_of(e: Any, values: dict[str, Tensor]) -> Tensor:
    """The value of an expression, a new tensor unless it is a leaf."""
    if isinstance(e, str):
        return values[e]
    operation, *operands = e
    args = [x if isinstance(x, float) else value_of(x, values) for x in operands]
    return OPERATIONS[operation](*args)


def _assigned(x: Tensor, y: Tensor) -> Tensor:
    z = x.clone()
    z[y > 0] = 0.25
    return z


def _sliced(x: Tensor) -> Tensor:
    z = x.clone()
    z[1:] = 0.0
    return z


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "minimum": torch.minimum,
    "maximum": torch.maximum,
    "add_alpha": lambda x, y, a: torch.add(x, y, alpha=a),
    "lerp": lambda x, y, a: torch.lerp(x, y, min(a, 1.0)),
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "square": lambda x: x.clamp(-4, 4).square(),
    "root": lambda x: (x.abs() + 0.01).sqrt_(),
    "sigmoid": torch.sigmoid,
    "log1p": lambda x: (x.abs() + 1).log(),
    "decayed": lambda x: torch.exp(-x.abs()),
    "times": lambda x, a: a * x,
    "over": lambda x, a: x / a,
    "clip": lambda x, a: x.clamp(-a, a),
    "power": lambda x, a: (x.abs() + 0.1) ** (3 if a > 1 else a),
    "where": lambda x, y: torch.where(x > y, x, 0.5 * y),
    "masked": lambda x, y: x.masked_fill(y < 0, 0.5),
    "masked_fill": lambda x, y: torch.where((x > 0) & ~(y > 0.5), x, torch.zeros_like(x)),
    "mask_times": lambda x, y: x * (x * y > 0).to(x.dtype),
    "assign": _assigned,
    "erfinv": torch.erfinv,
    "std": lambda x: x - x.std(0),
    "norm": lambda x: x / (x.norm(p=4, dim=0) + 1),
    "item": lambda x: x * (1.0 if x.abs().max() > 0 else 0.5),
    "cumsum": lambda x: x.cumsum(0),
    "randn": lambda x: x + torch.randn_like(x),
    "sort": lambda x: x.sort(0).values,
    "slice": _sliced,
    "int": lambda x: x.int().to(x.dtype),
}
