"""Warns of steps that are small beside the last place of the parameters, where these are kept in 24 bits.

AdamW was simulated with parameters in 24 bits and everything else exact (2000 steps, learning rates 1e-6 to 1e-3,
weights of .02 and of 1). The error depends on one number, the learning rate in units of the largest rounding of a
weight, 2**-15 of it: a twentieth divided by that number, from 5 on; 7e-2 at 1; nothing is left of a step below a
quarter.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.rounding import digits
from collage_neuron.numerics.strategies import NO_ROLES, StrategyLike, formats_for
from collage_neuron.passes.analysis.accumulators import denominators
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import local

ENOUGH = 8
"""From this many roundings of a weight on, the error is below 6e-3 of the distance travelled."""

RATES = ("lr", "initial_lr", "max_lr")
"""Where a group and its schedulers keep learning rates: the largest counts."""


_REMEDY = "Use a strategy with 4 bytes for the parameter: 'split422', or 'split412' with a byte less, has no such limit"


class SmallSteps(UserWarning):
    """Steps are so small that 24 bits of the parameters lose a part of each."""


def tell(
    optimizer: Optimizer, index: int, strategy: StrategyLike, params: Sequence[torch.Tensor], graph: fx.Graph
) -> None:
    """Warns, once of each group, if its steps are too small for the format of one of `params`.

    Asked where steps have the size of the learning rate, because the update divides by a root or takes a sign (Adam,
    Lion). What a scheduler that warms up has set first does not count.
    """
    fmt, told = formats_for(strategy, (), NO_ROLES, torch.bfloat16)["param"], bookkeeping(optimizer).told
    group, once = optimizer.param_groups[index], f"{SmallSteps.__name__} {index}"
    if not is_short(fmt) or once in told or not _is_normalized(graph):
        return
    rate = rate_of(group)
    if not rate > 0:
        return
    sizes = _sizes(params)
    coarse = [p for p, size in sizes.items() if rate < ENOUGH * 2.0 ** -digits(fmt) * size]
    if coarse:
        told.add(once)
        worst = max(coarse, key=lambda p: sizes[p])
        which = f"{len(coarse)} of its {len(params)} parameters (the worst has shape {list(worst.shape)})"
        warnings.warn(_sentence(index, strategy, fmt, rate, sizes[worst], which), SmallSteps, stacklevel=6)


def rate_of(group: Mapping[str, Any], keys: Sequence[str] = RATES) -> float:
    """The largest learning rate that a group has under `keys`; 0.0 if it has none."""
    return max((float(group[key]) for key in keys if isinstance(group.get(key), (int, float, torch.Tensor))), default=0)


def is_measured(optimizer: Optimizer, index: int, fmt: Format, graph: fx.Graph) -> bool:
    """Returns True if `tell` cannot know the steps of a group, which is still to be warned of if they are small."""
    told = f"{SmallSteps.__name__} {index}" in bookkeeping(optimizer).told
    return is_short(fmt) and not told and not _is_normalized(graph)


def tell_measured(optimizer: Optimizer, index: int, strategy: StrategyLike, fmt: Format, arrived: float) -> None:
    """Warns, once of each group, that only the share `arrived` of its steps reaches the parameters."""
    bookkeeping(optimizer).told.add(f"{SmallSteps.__name__} {index}")
    warnings.warn(
        f"param_groups[{index}]: strategy={strategy!r} keeps parameters as {fmt.name}, and {max(arrived, 0.0):.0%} of "
        "the steps that were looked at arrived there: they are too small beside the rounding of the weights, which is "
        f"{2.0 ** -digits(fmt):.2g} of each. {_REMEDY}, or filter this warning (collage_neuron.SmallSteps)",
        SmallSteps,
        stacklevel=6,
    )


def is_short(fmt: Format) -> bool:
    """Returns True for a parameter with a low word and fewer bits than the paper's pair, as measured (`digits`)."""
    return len(fmt.components) > 1 and digits(fmt) < digits(format_named("bf16x2"))


def _is_normalized(graph: fx.Graph) -> bool:
    return bool(denominators(graph)) or any("sign" in str(node.target) for node in graph.nodes)


def _sentence(index: int, strategy: StrategyLike, fmt: Format, rate: float, size: float, which: str) -> str:
    rounding = 2.0 ** -digits(fmt) * size
    ratio = rate / rounding
    lost = f"about {0.05 / ratio:.1g}" if ratio > 2 else "a tenth or more"
    return (
        f"param_groups[{index}]: strategy={strategy!r} keeps parameters as {fmt.name}, which rounds weights of "
        f"{size:.2g} (the root mean square of a parameter) by up to {rounding:.2g}, and the learning rate is "
        f"{rate:.2g}. Steps of that size, {ratio:.2g} times the rounding, lose {lost} of the distance travelled; this "
        f"concerns {which}. {_REMEDY}; if steps are larger than the learning rate, filter this warning "
        "(collage_neuron.SmallSteps)"
    )


def _sizes(params: Sequence[torch.Tensor]) -> dict[torch.Tensor, float]:
    """The root mean square of each parameter that is looked at, in one transfer; 0.0 if it is not finite."""
    found = [p for p in _looked_at(params) if not p.is_meta and local(p.detach()).numel()]
    if not found:
        return {}
    squares = [_on_host_if_lazy(local(p.detach())).float().square().mean() for p in found]
    sizes = torch.stack([x.to(squares[0].device) for x in squares]).sqrt().tolist()
    return {p: size if math.isfinite(size) else 0.0 for p, size in zip(found, sizes, strict=True)}


def _is_lazy(p: torch.Tensor) -> bool:
    return p.device.type in ("xla", "neuron")


def _on_host_if_lazy(x: torch.Tensor) -> torch.Tensor:
    return x.cpu() if _is_lazy(x) else x  # a lazy device would compile a program for each shape


def _looked_at(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """All of them; on a lazy device, from which each is fetched, vectors (gains near 1) and the smallest matrix."""
    matrices = sorted((p for p in params if _is_lazy(p) and p.dim() > 1), key=torch.numel)
    left_out = set(map(id, matrices[1:]))
    return [p for p in params if id(p) not in left_out]
