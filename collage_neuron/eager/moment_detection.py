"""Tells from the first value of a state that it is an average of gradients; a step as written has no graph to show it.

What a state is matters for its format: an average forgets its rounding errors, and a position (Lookahead's slow
weights, an anchor, a copy that the step goes back to) carries each of them back into the weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import permutations
from typing import Any

import torch

from collage_neuron.runtime import process_agreement
from collage_neuron.states.sharding import is_sharded

SAMPLED = 4096
"""How many elements of a state are looked at, once, when it is made."""

ROUNDED = 2.0**-18
"""The relative error of a product or two in fp32, with room."""


def averages(
    group: Mapping[str, Any], p: torch.Tensor, grad: torch.Tensor | None, new: Mapping[str, torch.Tensor]
) -> frozenset[str]:
    """The names of the `new` states whose first values are those of averages that begin at zero.

    These are a gradient or its square times 1 - beta, with a beta of the group; and two states that are so of anything
    else and of its square (a gradient that was scaled, or has a decay in it). Of a sum without a decay the first value
    is the gradient itself, or times the learning rate. What is not evident the caller keeps as the parameter is kept.
    """
    numbers = list(_numbers(group.values()))
    weights = [1 - x for x in numbers if 0.5 <= x < 1 - ROUNDED]
    clear = [w for w in weights if all(abs(w - x) > ROUNDED for x in numbers)]  # and no learning rate
    if not new or not clear or grad is None:
        return frozenset()
    g, old = _sample(grad), _sample(p)
    sampled = {name: _sample(x) for name, x in new.items()}
    firsts = {name: x for name, x in sampled.items() if x.any() and not _is_along(x, old)}
    alone = {n for n, x in firsts.items() if _is_one_of(x, [w * of for w in clear for of in (g, g * g)])}
    factors = [v / w**2 for v in weights for w in clear]
    pairs = {n for n in permutations(firsts, 2) if _is_one_of(firsts[n[1]], [c * firsts[n[0]] ** 2 for c in factors])}
    return frozenset(alone.union(*pairs))


def counts(grad: torch.Tensor | None, states: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The names of the states that seem to count: whole numbers from 0 on, where gradients are no whole numbers."""
    if grad is None or not states or _is_whole(_sample(grad)):
        return frozenset()
    sampled = {name: _sample(x) for name, x in states.items()}
    # Zeros may become anything: they are looked at again in later steps.
    return frozenset(n for n, x in sampled.items() if x.any() and bool((x >= 0).all()) and _is_whole(x))


def _is_whole(x: torch.Tensor) -> bool:
    return torch.equal(x, x.round())


def _numbers(values: Iterable[Any]) -> Iterable[float]:
    for x in values:
        if isinstance(x, float):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from (y for y in x if isinstance(y, float))


def _is_one_of(x: torch.Tensor, others: Iterable[torch.Tensor]) -> bool:
    return any(torch.allclose(x, other, ROUNDED, 0.0) for other in others)


def _is_along(x: torch.Tensor, old: torch.Tensor) -> bool:
    """Returns True if x may be a multiple of the weights."""
    # Where gradients are one too, an average of either looks the same.
    x, old = x.double(), old.double()
    return bool((x @ old) ** 2 > 0.5 * (x @ x) * (old @ old))


def _sample(x: torch.Tensor) -> torch.Tensor:
    if is_sharded(x):  # all processes come to the same conclusion
        return process_agreement.sample_of_dtensor(x, SAMPLED)
    flat = x.detach().reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].cpu().float()
