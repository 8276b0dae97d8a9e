"""Tells from the first value of a state that it is an average of gradients; a step on copies has no graph to show it.

What a state is matters for its format: an average forgets its rounding errors, and a position (Lookahead's slow
weights, an anchor, a copy that the step goes back to) carries each of them back into the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

SAMPLED = 4096
"""How many elements of a state are looked at, once, when it is made."""

ROUNDED = 2.0**-18
"""The relative error of a product or two in fp32, with room."""


def averages(
    group: Mapping[str, Any], p: torch.Tensor, grad: torch.Tensor | None, new: Mapping[str, torch.Tensor]
) -> frozenset[str]:
    """The names of the `new` states that are a gradient or its square, times 1 - beta with a beta of the group.

    So is the first value of an average that begins at zero. Of a sum, without a decay, it would be the gradient itself,
    or times the learning rate. Whatever else is there is not evident: the caller keeps it as the parameter is kept.
    """
    weights = _weights(group)
    if not new or not weights or grad is None:
        return frozenset()
    g, old = _sample(grad), _sample(p)
    return frozenset(name for name, x in new.items() if _is_average(_sample(x), g, old, weights))


def _weights(group: Mapping[str, Any]) -> list[float]:
    """1 - beta for each number of the group that may be a beta, unless a number of the group is that too."""
    numbers = list(_numbers(group.values()))
    found = [1 - x for x in numbers if 0 < x < 1]
    return [w for w in found if all(abs(w - x) > ROUNDED for x in numbers)]


def _numbers(values: Iterable[Any]) -> Iterable[float]:
    for x in values:
        if isinstance(x, float):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from (y for y in x if isinstance(y, float))


def _is_average(x: torch.Tensor, grad: torch.Tensor, old: torch.Tensor, weights: Iterable[float]) -> bool:
    if not x.any() or _is_along(x, old):
        return False
    return any(torch.allclose(x, w * of, ROUNDED, 0.0) for w in weights for of in (grad, grad * grad))


def _is_along(x: torch.Tensor, old: torch.Tensor) -> bool:
    """Returns True if x may be a multiple of the weights: where gradients are, an average of either looks the same."""
    x, old = x.double(), old.double()
    return bool((x @ old) ** 2 > 0.5 * (x @ x) * (old @ old))


def _sample(x: torch.Tensor) -> torch.Tensor:
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].cpu().float()
