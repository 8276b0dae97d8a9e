"""Warns of states that are kept in one word although the update divides by them and their role is not recognised.

`plus` gives two words to states that are recognised to accumulate slowly (`passes/analysis/accumulators.py`). First
moments lose little in bf16. Any other state of which the parameter's update takes a root, or by which it divides, may
be a second moment that was not recognised: it would stand still, and the step could be wrong by any factor.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.fx as fx
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.strategies import STRATEGIES
from collage_neuron.passes.analysis.accumulators import lossy_denominators, slow_states
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import bookkeeping


class ImpreciseState(UserWarning):
    """A state by which the update divides is kept in bf16 and may stand still; the message names it and the remedy."""


def imprecise_states(graph: fx.Graph, settings: Settings, dtype: torch.dtype) -> frozenset[str]:
    """Names of the states of a captured update to which a strategy gives fewer bits than they may need.

    Mappings, and strategies that store all states alike, are never reported: they are the user's choice.
    """
    strategy = STRATEGIES.get(settings.strategy) if isinstance(settings.strategy, str) else None
    if strategy is None or dtype == torch.float32:
        return frozenset()
    if format_named(strategy.slow).bytes <= format_named(strategy.state).bytes:
        return frozenset()
    return lossy_denominators(graph)


def tell(
    base: type[Optimizer], optimizer: Optimizer, graph: fx.Graph, settings: Settings, formats: Mapping[str, Format]
) -> None:
    """Warns of the imprecise states of an update of bf16 parameters, of each once in the life of an optimizer."""
    told = bookkeeping(optimizer).told
    found = imprecise_states(graph, settings, torch.bfloat16) & formats.keys()  # others are one number, in fp32
    new = sorted(name for name in found - told if formats[name].name != "fp32")
    if new:
        told.update(new)
        warnings.warn(_sentence(base, new, graph, settings, formats), ImpreciseState, stacklevel=2)


def _sentence(
    base: type[Optimizer], names: Sequence[str], graph: fx.Graph, settings: Settings, formats: Mapping[str, Format]
) -> str:
    wide = format_named(STRATEGIES[str(settings.strategy)].slow).name
    mapping = {"param": formats["param"].name} | dict.fromkeys(sorted({*slow_states(graph), *names}), wide)
    which = ", ".join(f"state[p][{name!r}]" for name in names)
    return (
        f"{base.__name__}: strategy={settings.strategy!r} keeps {which} in {formats[names[0]].name}, and the update "
        "divides by it or takes its root. It adds to itself in a way that is not recognised as a second moment; if it "
        "is one, with a decay near 1, what is less than 2**-9 of it is lost in every step, and it stands still. Use "
        f"strategy='full', or strategy={mapping!r}; if one word is enough for it, filter this warning "
        "(collage_neuron.ImpreciseState)"
    )
