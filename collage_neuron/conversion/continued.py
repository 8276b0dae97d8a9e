"""Low words that another living optimizer keeps of the same parameters.

A new optimizer over a compiled model (a warm restart, the next stage of a training) begins with the values that the
last one left, and not with their high words alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.strategies import NO_ROLES, formats_for
from collage_neuron.optimizer.waiting import is_compiled
from collage_neuron.runtime import wrappers
from collage_neuron.settings import Settings
from collage_neuron.states import kept_formats, low_words
from collage_neuron.states.names import split_params
from collage_neuron.states.store import read_exact, store


@torch.no_grad()
def continue_from_others(optimizer: Optimizer) -> None:
    """Gives bf16 parameters of `optimizer` without low words those that another compiled optimizer keeps of them."""
    split = split_params(optimizer.state)
    bare = {p: group for group in optimizer.param_groups for p in group["params"] if _is_bare(p) and p not in split}
    for other, p in _kept_elsewhere(optimizer, set(bare)) if bare else ():
        fmt = formats_for(Settings.of(bare[p]).strategy, (), NO_ROLES, p.dtype)["param"]
        if len(fmt.components) > 1:
            exact = read_exact(p, other.state[p], "param", kept_formats.of(other, p))
            value = low_words.without_stale(other, p, exact)
            store(p, optimizer.state[p], "param", fmt, value, kept_formats.of(optimizer, p))
            low_words.remember(optimizer, p, low_words.FRESH)


def _is_bare(p: torch.Tensor) -> bool:
    return p.dtype == torch.bfloat16 and not p.is_meta


def _kept_elsewhere(optimizer: Optimizer, params: set[torch.Tensor]) -> Iterator[tuple[Optimizer, torch.Tensor]]:
    """The parameters that other optimizers keep low words of, each once."""
    for other in filter(is_compiled, wrappers.instances("torch.optim", "Optimizer")):
        state = vars(other).get("state", {})  # there is none yet while one is built
        shared = split_params(state) & params if other is not optimizer else set()
        params = params - shared
        yield from ((other, p) for p in shared)
