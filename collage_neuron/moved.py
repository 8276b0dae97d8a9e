"""Parameters that are exchanged after `compile` and before the first step take the low words of those they replace.

On an XLA device a move makes new parameters, and who moves the model then (accelerate's `prepare`) puts them into the
optimizer's groups. torch's own optimizers have no state at that point that could be left behind; ours have low words.
"""

from __future__ import annotations

from torch.optim import Optimizer

from collage_neuron import stale
from collage_neuron.bookkeeping import bookkeeping
from collage_neuron.states import is_component, is_host_scalar


def remember(optimizer: Optimizer) -> None:
    """Notes the parameters of `optimizer`, which was compiled just now."""
    bookkeeping(optimizer).compiled_with = [list(group["params"]) for group in optimizer.param_groups]


def follow(optimizer: Optimizer) -> None:
    """Hands what the state has of a parameter to the one that is in its place now."""
    for params, group in zip(bookkeeping(optimizer).compiled_with, optimizer.param_groups, strict=False):
        for i, (old, new) in enumerate(zip(params, group["params"], strict=False)):
            if old is not new and old in optimizer.state and new.shape == old.shape:
                params[i] = new
                state = optimizer.state.pop(old)
                optimizer.state[new] = {
                    k: v if is_host_scalar(v, old) and not is_component(k, state) else v.to(new.device)
                    for k, v in state.items()
                }
                stale.replace(optimizer, old, new)


def forget(optimizer: Optimizer) -> None:
    """After the first step nothing is exchanged any more."""
    bookkeeping(optimizer).compiled_with = []
