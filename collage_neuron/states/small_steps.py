"""Warns of steps that are small beside the last place of the parameters, where these are kept in 24 bits.

AdamW was simulated with parameters in 24 bits and everything else exact (2000 steps, learning rates 1e-6 to 1e-3,
weights of .02 and of 1). The error depends on one number, the learning rate in units of the largest rounding of a
weight, 2**-15 of it: a twentieth divided by that number, from 5 on; 7e-2 at 1; nothing is left of a step below a
quarter.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence

import torch
import torch.fx as fx
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.rounding import digits
from collage_neuron.numerics.strategies import StrategyLike, formats_for
from collage_neuron.passes.analysis.accumulators import denominators
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import local

ENOUGH = 8
"""From this many roundings of a weight on, the error is below 6e-3 of the distance travelled."""


class SmallSteps(UserWarning):
    """The learning rate is so small that 24 bits of the parameters lose a part of each step."""


def tell(
    optimizer: Optimizer, index: int, strategy: StrategyLike, params: Sequence[torch.Tensor], graph: fx.Graph
) -> None:
    """Warns, once in the life of an optimizer, if the steps of a group are too small for the format of `params`.

    Asked where steps have the size of the learning rate, because the update divides by a root or takes a sign (Adam,
    Lion). What a scheduler that warms up has set first does not count.
    """
    fmt, told = formats_for(strategy, (), frozenset(), torch.bfloat16)["param"], bookkeeping(optimizer).told
    group = optimizer.param_groups[index]
    rate = max((float(group[key]) for key in ("lr", "initial_lr") if key in group), default=0.0)
    if not is_short(fmt) or SmallSteps.__name__ in told or not rate > 0 or not _is_normalized(graph):
        return
    size = _size(params)
    rounding = 2.0 ** -digits(fmt) * size
    if rate < ENOUGH * rounding:
        told.add(SmallSteps.__name__)
        warnings.warn(_sentence(index, strategy, fmt, rate, size, rounding), SmallSteps, stacklevel=6)


def is_short(fmt: Format) -> bool:
    """Returns True for a parameter with a low word and fewer bits than the paper's pair, as measured (`digits`)."""
    return len(fmt.components) > 1 and digits(fmt) < digits(format_named("bf16x2"))


def _is_normalized(graph: fx.Graph) -> bool:
    return bool(denominators(graph)) or any("sign" in str(node.target) for node in graph.nodes)


def _sentence(index: int, strategy: StrategyLike, fmt: Format, rate: float, size: float, rounding: float) -> str:
    ratio = rate / rounding
    lost = f"about {0.05 / ratio:.1g}" if ratio > 2 else "a tenth or more"
    return (
        f"param_groups[{index}]: strategy={strategy!r} keeps parameters as {fmt.name}, which rounds weights of "
        f"{size:.2g} (their root mean square) by up to {rounding:.2g}, and the learning rate is {rate:.2g}. Steps of "
        f"that size, {ratio:.2g} times the rounding, lose {lost} of the distance travelled. Use a strategy with "
        "4 bytes for the parameter: strategy='split422' has no such limit; if steps are larger than the learning rate, "
        "filter this warning (collage_neuron.SmallSteps)"
    )


def _size(params: Iterable[torch.Tensor]) -> float:
    """The root mean square of parameters, in one transfer; 0.0 if it is not known."""
    found = [local(p.detach()) for p in _looked_at(list(params)) if not p.is_meta and p.numel()]
    if not found:
        return 0.0
    sums = torch.stack([x.float().square().sum().cpu() for x in found])
    size = math.sqrt(float(sums.sum()) / max(1, sum(x.numel() for x in found)))
    return size if math.isfinite(size) else 0.0


def _looked_at(params: list[torch.Tensor]) -> list[torch.Tensor]:
    """All of them; on a lazy device, where each would be a program, the smallest matrix."""
    lazy = [p for p in params if p.device.type in ("xla", "neuron")]
    return params if not lazy else sorted(lazy, key=lambda p: (p.dim() < 2, p.numel()))[:1]
