"""Weights that other code writes again and again (Lookahead, projections): one warning that bf16 rounds what it writes.

Nothing is looked at until a parameter is seen to be written between two steps (its version counter, `stale`). From then
on a sample of it is kept, so that the next write can be compared: weights that came and went (averages that are
evaluated), masks and clamps are no reason to warn.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from collage_neuron.bookkeeping import bookkeeping
from collage_neuron.sharding import local

SAMPLED, WINDOW, TIMES = 1024, 32, 3
"""Elements of a sample; a warning needs so many such writes in so many steps."""


def sample(p: torch.Tensor) -> torch.Tensor:
    """Some elements of `p`, spread over it; a copy."""
    flat = local(p.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)].clone()


def look(optimizer: Optimizer, written: Sequence[torch.Tensor]) -> None:
    """Before a step: `written` are the parameters that were written since the last one."""
    ours = bookkeeping(optimizer)
    if ours.told_of_writes or not written:
        return
    share = max((_share_changed(ours.samples[p], sample(p)) for p in written if p in ours.samples), default=0.0)
    ours.samples |= dict.fromkeys(written, torch.empty(0))  # filled by the next `stepped`
    if share < 0.02:  # a wrapper may move weights by less than an ulp of most
        return
    ours.writes = [step for step in ours.writes if step > ours.steps - WINDOW] + [ours.steps]
    if len(ours.writes) == TIMES:
        ours.told_of_writes = True
        ours.samples.clear()
        warnings.warn(
            f"parameters of this {type(optimizer).__name__} are written between steps again and again: what is written "
            "into the parameter itself is rounded to bf16, 8 significant bits. Code around the optimizer (Lookahead, "
            "averages, projections) should read with collage_neuron.exact_value and write with "
            "collage_neuron.set_exact_value",
            stacklevel=6,
        )


def stepped(optimizer: Optimizer) -> None:
    """After a step: samples what was seen to be written."""
    ours = bookkeeping(optimizer)
    ours.steps += 1
    for p in ours.samples:
        ours.samples[p] = sample(p)


def _share_changed(before: torch.Tensor, now: torch.Tensor) -> float:
    """The share of elements that changed, but to what masks and clamps write: zeros, and the bounds."""
    if before.shape != now.shape or not now.numel():
        return 0.0
    changed = (now != before) & (now != 0) & (now != now.max()) & (now != now.min())
    share: float = changed.double().mean().item()
    return share
