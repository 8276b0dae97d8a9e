"""Warns once if other code writes weights repeatedly (Lookahead, projections), since bf16 rounds what it writes.

Nothing is read until a parameter was written between two steps (by its version counter, `low_words`). From then on a
sample of it is kept, to compare with the next write: weights that are swapped in and out (to evaluate averages), masks
and clamps do not cause the warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping
from collage_neuron.states.sharding import local

SAMPLED, WINDOW, TIMES, TIMES_IDLE = 1024, 32, 3, 20
"""Sample size; a warning needs TIMES writes in WINDOW steps, or TIMES_IDLE if they change nothing."""


def sample(p: torch.Tensor) -> torch.Tensor:
    """Some elements of `p`, spread over it; a view of it, where that is possible."""
    flat = local(p.detach()).reshape(-1)
    return flat[:: max(1, flat.numel() // SAMPLED)]


def _in_rows(samples: Mapping[torch.Tensor, torch.Tensor]) -> list[tuple[list[torch.Tensor], torch.Tensor]]:
    """The parameters whose samples are of one length, dtype and device, and copies of these, one in each row."""
    alike: dict[Any, list[torch.Tensor]] = {}
    for p, x in samples.items():
        alike.setdefault((x.numel(), x.dtype, x.device), []).append(p)
    return [(params, torch.stack([samples[p] for p in params])) for params in alike.values()]


def look(optimizer: Optimizer, written: Sequence[torch.Tensor]) -> None:
    """Before a step: `written` are the parameters that were written since the last one."""
    ours = bookkeeping(optimizer)
    written = [p for p in written if p.device.type != "xla"]  # a lazy device would have to run what is pending
    if ours.told_of_writes or not written:
        return
    # All at once: this runs in every step of a loop that clamps its weights.
    rows = _in_rows({p: x for p in written if p in ours.samples and (x := sample(p)).shape == ours.samples[p].shape})
    pairs = [(torch.stack([ours.samples[p] for p in params]), now) for params, now in rows if now.numel()]
    share = max((_share_changed(*pair) for pair in pairs), default=0.0)
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    ours.samples |= dict.fromkeys(written, nothing)  # filled by the next `stepped`
    if share >= 0.02:  # a wrapper may move weights by less than an ulp of most
        ours.writes = _within(ours.writes, ours.steps)
        _tell(optimizer, "", len(ours.writes) >= TIMES)
    elif pairs and not any(_is_bounded(now) for _, now in pairs):
        ours.idle_writes = _within(ours.idle_writes, ours.steps)
        _tell(optimizer, "; here it changes (almost) nothing, as a decay below half an ulp does: its effect is lost",
              len(ours.idle_writes) >= TIMES_IDLE)  # fmt: skip


def _within(steps: list[int], now: int) -> list[int]:
    """The steps of the window, and this one."""
    return [step for step in steps if step > now - WINDOW] + [now]


def _tell(optimizer: Optimizer, what: str, due: bool) -> None:
    ours = bookkeeping(optimizer)
    if due:
        ours.told_of_writes = True
        ours.samples.clear()
        warnings.warn(
            f"parameters of this {type(optimizer).__name__} are written between steps again and again: what is written "
            f"into the parameter itself is rounded to bf16, 8 significant bits{what}. Code around the optimizer "
            "(Lookahead, decay in a hook, averages, projections) should read with collage_neuron.exact_value and write "
            "with collage_neuron.set_exact_value",
            stacklevel=7,
        )


def stepped(ours: Bookkeeping) -> None:
    """After a step: samples what was seen to be written."""
    ours.steps += 1
    for params, rows in _in_rows({p: sample(p) for p in ours.samples}):
        ours.samples.update(zip(params, rows.unbind(), strict=True))


def _share_changed(before: torch.Tensor, now: torch.Tensor) -> float:
    """The largest share of a row that changed, but to what masks and clamps write: zeros, and the bounds."""
    changed = (now != before) & (now != 0) & (now != now.amax(1, keepdim=True)) & (now != now.amin(1, keepdim=True))
    share: float = changed.double().mean(1).max().item()
    return share


def _is_bounded(x: torch.Tensor) -> bool:
    """Returns True if elements of a row lie together at a bound or at zero, where clamps and masks put them."""
    at_bound = torch.stack([x == 0, x == x.amax(1, keepdim=True), x == x.amin(1, keepdim=True)]).sum(2) > 1
    return bool(at_bound.any())
