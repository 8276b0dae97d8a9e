"""Chooses a strategy: by memory for `compile(..., bytes=N)`, the safest one that fits, or by COLLAGE_STRATEGY.

The environment variable overrides the strategy of `compile`, so that an unchanged script runs under another.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate, naming
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import BY_ACCURACY, STRATEGIES, StrategyLike, possible
from collage_neuron.passes.ir.update import Recording
from collage_neuron.runtime.step_plan import Records
from collage_neuron.runtime.update_formats import formats_of
from collage_neuron.settings import Settings
from collage_neuron.states import visible_states, word_encoding

NEGLECTED = 0.05
"""Bytes per element of shared words, for one state, that are not counted; blocks of 128 need 0.03."""

log = logging.getLogger("collage_neuron")


def check_budget(budget: object, strategy: object, needs_optimizer: bool) -> None:
    """Raises for a number of bytes that cannot be one, or that says the same as another argument."""
    if not isinstance(budget, int) or isinstance(budget, bool):
        raise TypeError(f"bytes is {budget!r}; give a whole number of bytes per parameter, its gradient included")
    if strategy is not None:
        raise ValueError(f"bytes={budget} chooses the strategy, and strategy={strategy!r} names one: leave one out")
    if needs_optimizer:
        raise ValueError(
            f"bytes={budget} depends on the states of the optimizer, which a class does not tell: compile the "
            "optimizer, or name a strategy"
        )


def within(base: type[Optimizer], optimizer: Optimizer, settings: Settings, budget: int, records: Records) -> Settings:
    """The settings with the first strategy of BY_ACCURACY that needs at most `budget` bytes for any parameter.

    Counted are a bf16 parameter with its further words, the states that the optimizer's own code has, and the gradient.
    The words that blocks of elements share are not, unless rows are so short that they need more than NEGLECTED bytes
    per element; nor are states of one number, unless parameters are as small.

    Raises:
        ValueError: no strategy needs as little.
    """
    groups = [group for group in optimizer.param_groups if group["params"]]
    try:
        with naming(base):
            found = [each for group in groups for each in _updates(group, records)]
    except UnsupportedUpdate as refusal:
        raise UnsupportedUpdate(
            f"{refusal}. bytes={budget} needs an update that is captured, which says what states there will be: name a "
            "strategy instead"
        ) from refusal
    # In this order: the first that fits is the most accurate.
    under = {name: replace(settings, strategy=name) for name in BY_ACCURACY if possible(name, settings.arithmetic)}
    sizes = {name: max((_size(*each, own) for each in found), default=0) for name, own in under.items()}
    fitting = [name for name, size in sizes.items() if size <= budget]
    if not fitting:
        least = min(sizes, key=lambda name: sizes[name])
        raise ValueError(
            f"bytes={budget} is less than any strategy needs with {base.__name__}: the smallest is {least!r} with "
            f"{sizes[least]:.3g} bytes per parameter, gradient included"
        )
    chosen = fitting[0]
    log.info("bytes=%d: strategy %r, %.3g bytes per parameter with %s", budget, chosen, sizes[chosen], base.__name__)
    return replace(settings, strategy=chosen)


def _updates(group: dict[str, Any], records: Records) -> list[tuple[Recording, list[Any]]]:
    """The updates of a group, each with its parameters: one for each shape, if the step looks at shapes."""
    first = records(group, group["params"][0])
    if not first.by_shape:
        return [(first, group["params"])]
    of_shapes: dict[Any, list[Any]] = {}
    for p in group["params"]:
        of_shapes.setdefault(p.shape, []).append(p)
    found = [(records(group, params[0]), params) for params in of_shapes.values()]
    return [(update, params) for update, params in found if update.captured.may_be_of(params[0].shape)]


def _size(update: Recording, params: Sequence[torch.Tensor], settings: Settings) -> float:
    """Bytes per parameter of a group with this update."""
    formats = formats_of(update, settings, torch.bfloat16)
    shared = [_shared(fmt, params) for fmt in formats.values()]  # of each state: below NEGLECTED they do not count
    elements = max(1, sum(p.numel() for p in params))
    shared += [size / elements for size in visible_states.bytes_of(update.captured, params).values()]
    return word_encoding.bytes_of(formats) + max(map(_gradient, params)) + sum(x for x in shared if x > NEGLECTED)


def _shared(fmt: Format, params: Sequence[torch.Tensor]) -> float:
    """Bytes per element of the words that blocks share: many in a convolution, whose rows are three elements long."""
    shared = (
        math.prod(word_encoding.shape_of(c, p.shape)) * c.bytes for p in params for c in fmt.components if c.block
    )
    return sum(shared) / max(1, sum(p.numel() for p in params))


def _gradient(p: torch.Tensor) -> int:
    """Bytes per element of the gradient of `p`; that of an fp32 parameter becomes bf16 with it."""
    return p.grad.element_size() if p.grad is not None and p.dtype == torch.bfloat16 else torch.bfloat16.itemsize


# --- the environment variable -----------------------------------------------------------------------------------------


VARIABLE = "COLLAGE_STRATEGY"
"""Its value is the name of a strategy; unset or empty, `compile` does what it is told."""


def overridden(strategy: StrategyLike | None, budget: int | None) -> tuple[StrategyLike | None, int | None]:
    """The strategy and the bytes that `compile` goes by: those it was given, or the strategy of the variable.

    Each override is a line in the log `collage_neuron`, level WARNING, which Python prints unless it is told not to.

    Raises:
        ValueError: the variable names no strategy.
    """
    name = os.environ.get(VARIABLE)
    if not name:
        return strategy, budget
    if name not in STRATEGIES:
        raise ValueError(
            f"{VARIABLE} is {name!r}; set it to one of {', '.join(STRATEGIES)}, or unset it; one of your own has to be "
            "registered before compile (collage_neuron.extend.STRATEGIES)"
        )
    given = f"bytes={budget}" if budget is not None else f"strategy={strategy!r}"
    log.warning("%s; compile was given %s", line_of(name), given)
    return name, None


def line_of(strategy: str) -> str:
    """How the line of the log begins, by which `compare` knows that the variable was read."""
    return f"{VARIABLE}={strategy} overrides the strategy"
