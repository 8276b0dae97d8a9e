"""Wrong rules of the compiler, one mistake each, and optimizers that use them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from as_written import Written
from torch.optim import SGD, AdamW, Optimizer, Rprop

from collage_neuron.errors import TranslationError
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.rewrite.arithmetic import Accumulator
from collage_neuron.passes.rewrite.rules import RULES

aten = torch.ops.aten
RIGHT = dict(RULES)


class Spelled(Written):
    """What it does to a parameter is given as a function of its state, the parameter and the gradient."""

    def __init__(self, params: Any, update: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__(params, lr=0.1)
        self.spelled = update

    def update(self, p: Any, g: Any, state: dict[str, Any], group: dict[str, Any]) -> None:
        self.spelled(state, p, g)


def error_of(optimizer: Optimizer) -> str:
    """What validation says of a step; nothing if the step is taken."""
    try:
        optimizer.step()
    except TranslationError as error:
        return str(error)
    return ""


BUGS: dict[str, tuple[Any, Callable[..., Any], Callable[[Any], Optimizer]]] = {
    "lerp with another weight": (
        aten.lerp.Scalar, lambda a, x, y, w: RIGHT[aten.lerp.Scalar](a, x, y, 1 - w), AdamW,
    ),
    "addcdiv without its value": (
        aten.addcdiv.default, lambda a, x, y, z, value=1: RIGHT[aten.addcdiv.default](a, x, y, z), AdamW,
    ),
    "sqrt a little off": (aten.sqrt.default, lambda a, x: RIGHT[aten.sqrt.default](a, x) * (1 + 2**-6), AdamW),
    "add without alpha": (aten.add.Tensor, lambda a, x, y, alpha=1: RIGHT[aten.add.Tensor](a, x, y), SGD),
    "sub adds": (aten.sub.Tensor, RIGHT[aten.add.Tensor], lambda p: Spelled(p, lambda s, q, g: q.copy_(q - 0.1 * g))),
    "decay of the other sign": (
        aten.mul.Tensor,
        lambda a, x, y: RIGHT[aten.mul.Tensor](a, x, Scalar("-", (2, y)) if isinstance(x, Accumulator) else y),
        lambda p: AdamW(p, weight_decay=0.5),
    ),
    "maximum is minimum": (
        aten.maximum.default, RIGHT[aten.minimum.default], lambda p: AdamW(p, amsgrad=True),
    ),
    "where the other way": (
        aten.where.self,
        lambda a, mask, x, y: RIGHT[aten.where.self](a, mask, y, x),
        lambda p: Spelled(p, lambda s, q, g: q.add_(torch.where(g > 0, g, 0.5 * g), alpha=-0.1)),
    ),
    "the sign of another value": (
        aten.sign.default, lambda a, x: -RIGHT[aten.sign.default](a, x), Rprop,
    ),
    "copy keeps the old": (
        aten.copy.default, lambda a, x, source, **_: x, lambda p: Spelled(p, lambda s, q, g: q.copy_(q * 0.5)),
    ),
}  # fmt: skip
"""Mistakes in one rule each, and an optimizer that uses it."""
