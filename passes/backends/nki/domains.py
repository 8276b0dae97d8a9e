"""The documented domains of ScalarE's functions, and guards that keep their operands inside.

A guard is a clamp, so values inside the domain keep their bits. A divisor made of a square root, `sqrt(x) * s + c`,
needs no guard of its own: x is clamped so that the divisor is in its domain too, to bounds that the host computes in
each step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from collage_neuron.passes.backends.nki.ir import Column, Operand, Tile, Value

DOMAINS = {"sqrt": (2.0**-116, 2.0**118), "log": (2.0**-64, 2.0**64), "reciprocal": (2.0**-42, 2.0**42)}
"""Where ScalarE's approximations are valid (NKI documentation, table of activation functions)."""

MARGIN = 2.0**-16
"""Relative margin between a divisor and the edges of its domain, since the approximated root is a few ulps off."""


def lowest_square(root: torch.Tensor | float) -> torch.Tensor:
    """The least number of sqrt's domain whose root is `root` or more."""
    # Where eps alone is above the divisor's lower bound this root is negative, and no square is too small.
    return _fp32(root).clamp(min=0.0).square().clamp(*DOMAINS["sqrt"])


def highest_square(root: torch.Tensor | float) -> torch.Tensor:
    """The greatest number of sqrt's domain whose root is `root` or less."""
    return lowest_square(root)  # a function of its own, since the docstring of a kernel shows its name


def root_of(divisor: Value) -> tuple[list[Value], tuple[Column, Column]] | None:
    """The chain `[sqrt(x), sqrt(x) * s, ..., divisor]` and the bounds of x, or None for any other divisor."""
    low, high = DOMAINS["reciprocal"]
    bounds: list[Operand] = [low * (1 + MARGIN), high * (1 - MARGIN)]
    chain = [divisor]
    while chain[0].op != "sqrt":
        step = chain[0]
        if (
            step.op not in ("multiply", "add")
            or step.dtype != "float32"
            or not isinstance(step.args[0], Value)
            or not isinstance(step.args[1], (Column, float))
        ):
            return None
        # The divisor's bounds are solved for the root, back along the chain: the host does it in each step.
        inverse = operator.truediv if step.op == "multiply" else operator.sub
        bounds = [Column(target=inverse, args=(b, step.args[1])) for b in bounds]  # type: ignore[arg-type]
        chain.insert(0, step.args[0])
    if chain[0].dtype != "float32":
        return None
    return chain, (Column(target=lowest_square, args=(bounds[0],)), Column(target=highest_square, args=(bounds[1],)))  # type: ignore[arg-type]


def unguarded(root: Value) -> Value:
    """The operand of a square root as it was before a guard; that of a root of a root has none."""
    (x,) = root.tiles()
    return next(x.tiles()) if x.op == "clamp" else x


def least(x: Operand, known: dict[Value, Operand]) -> Operand:
    """A number that `x` is not below, by the numbers of the step, if no state is negative; `known` are found ones."""
    if not isinstance(x, Value):
        return 0.0 if isinstance(x, Tile) else x
    if x not in known:
        if x.op == "sqrt":
            known[x] = _number(_root, least(unguarded(x), known))
        elif x.op in LEASTS:
            known[x] = _number(LEASTS[x.op], *(least(a, known) for a in x.args))
        else:
            known[x] = least(x.args[0], known) if x.op in ("copy", "own_copy", "clamp", "fill") else 0.0
    return known[x]


def _number(f: Callable[..., Any], *args: Operand) -> Operand:
    """`f` of numbers: a number, or a column if the step has one of them."""
    if any(isinstance(a, Column) for a in args):
        zero = next((i for i, a in enumerate(args) if not isinstance(a, Column) and a == 0.0), None)
        if zero is None or f not in (operator.add, _product):
            return Column(target=f, args=args)  # type: ignore[arg-type]  # of numbers
        return 0.0 if f is _product else args[1 - zero]
    return float(f(*args))


def _root(x: Any) -> torch.Tensor:
    return _fp32(x).clamp(min=0.0).sqrt()


def _product(x: Any, y: Any) -> torch.Tensor:
    # Of a factor that may be negative, such as one of a square, nothing is known: it counts as 0.
    a, b = (_fp32(v).clamp(min=0.0) for v in (x, y))
    return a * b


def _fp32(x: Any) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float32)


def _smaller(x: Any, y: Any) -> torch.Tensor:
    return torch.minimum(_fp32(x), _fp32(y))


LEASTS: Mapping[str, Callable[..., Any]] = {
    "add": operator.add, "multiply": _product, "minimum": _smaller,
    "maximum": lambda x, y: torch.maximum(_fp32(x), _fp32(y)), "select": lambda mask, x, y: _smaller(x, y),
}  # fmt: skip
"""The least result of an operation by the least of its operands."""


def is_root(x: Operand) -> bool:
    """Returns True for a square root, unrounded: that of a clamped number lies in the domain of another one."""
    return isinstance(x, Value) and x.op == "sqrt" and x.dtype == "float32"
