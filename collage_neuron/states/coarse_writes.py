"""Warns if other code changes weights between steps by less than bf16 holds (decay, Lookahead, projections).

What such code wants is not known, but what it left is: a sample of weights is compared with that after the last step.
Of all parameters it is taken after the first step, and later of those that were written before. So the first write of a
loop that writes after each step is looked at, and the second one of any other.

* Small changes, of less than an eighth of a weight, are rounded to bf16: one write is reason enough to warn.
* Large ones may be weights that were loaded: TIMES in WINDOW steps are.
* A single write that changes nothing may be a decay of less than half an ulp, or a clamp that is not reached: only
  TIMES_IDLE of them are. Two writes that change nothing are weights that came and went (averages, SAM).

Masks and clamps, which leave zeros and weights at a bound, and loads of a state dict (`external_writes`) are no reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping
from collage_neuron.states.sharding import local

SAMPLED, WINDOW, TIMES, TIMES_IDLE = 1024, 32, 3, 20
"""Sample size, and how many writes are a reason to warn."""

IDLE = (
    "; here it changes (almost) nothing: weights that come and go (an evaluation, SAM) lose nothing, but a decay "
    "of less than half an ulp changes nothing either, and its effect is lost"
)

SMALL = 2.0**-3
"""A small change of a weight, as a part of it."""


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


def check_writes(optimizer: Optimizer, written: Mapping[torch.Tensor, int]) -> None:
    """Before a step: how often each parameter was written since the last one."""
    book = bookkeeping(optimizer)
    written = {p: times for p, times in written.items() if _is_sampled(p)}
    if book.told_of_writes or not written:
        return
    if not any(group.get("lr", 1.0) for group in optimizer.param_groups):
        # torch.distributed.checkpoint has loaded the weights, and takes its hidden step before it loads states.
        book.samples.clear()
        return
    # All at once: this runs in every step of a loop that clamps its weights.
    rows = _in_rows({p: x for p in written if p in book.samples and (x := sample(p)).shape == book.samples[p].shape})
    pairs = [(torch.stack([book.samples[p] for p in params]), now) for params, now in rows if now.numel()]
    small = max((_share(_changed(*pair) & _is_near(*pair)) for pair in pairs), default=0.0)
    large = max((_share(_changed(*pair)) for pair in pairs), default=0.0)
    nothing = torch.empty(0, dtype=torch.float32, device="cpu")
    book.samples |= dict.fromkeys(written, nothing)  # filled by the next `sample_after_step`
    if max(small, large) >= 0.02:  # a wrapper may move weights by less than an ulp of most
        book.writes = _within(book.writes, book.steps)
        _warn(optimizer, "", small >= 0.02 or len(book.writes) >= TIMES)
    elif pairs and max(written.values()) == 1 and not any(_is_bounded(now) for _, now in pairs):
        book.idle_writes = _within(book.idle_writes, book.steps)
        _warn(optimizer, IDLE, len(book.idle_writes) >= TIMES_IDLE)


def _is_sampled(p: torch.Tensor) -> bool:
    return p.device.type != "xla" and p.dtype == torch.bfloat16  # a lazy device would have to run what is pending


def _within(steps: list[int], now: int) -> list[int]:
    """The steps of the window, and this one."""
    return [step for step in steps if step > now - WINDOW] + [now]


def _warn(optimizer: Optimizer, what: str, due: bool) -> None:
    book = bookkeeping(optimizer)
    if due:
        book.told_of_writes = True
        book.samples.clear()
        warnings.warn(
            f"parameters of this {type(optimizer).__name__} are written between steps: what is written into the "
            f"parameter itself is rounded to bf16, 8 significant bits{what}. Code around the optimizer (Lookahead, "
            "decay in a loop, averages, projections) should read with collage_neuron.exact_value and write with "
            "collage_neuron.set_exact_value; a decay may be the group's weight_decay instead",
            stacklevel=7,
        )


def sample_after_step(book: Bookkeeping, params: Iterable[torch.Tensor]) -> None:
    """After a step over `params` with low words: samples what was seen to be written; after the first one, all."""
    book.steps += 1
    if book.told_of_writes:
        return
    if book.steps == 1:
        book.samples |= dict.fromkeys(filter(_is_sampled, params), torch.empty(0, dtype=torch.float32, device="cpu"))
    elif book.steps == 2:
        book.samples = {p: x for p, x in book.samples.items() if not x.numel()}  # `check_writes` emptied those written
    for alike, rows in _in_rows({p: sample(p) for p in book.samples}):
        book.samples.update(zip(alike, rows.unbind(), strict=True))


def _changed(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Where rows changed, but to what masks and clamps write: zeros, and the bounds."""
    return (now != before) & (now != 0) & (now != now.amax(1, keepdim=True)) & (now != now.amin(1, keepdim=True))


def _is_near(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Where the change is small."""
    old = before.float()
    return (now.float() - old).abs() <= SMALL * old.abs()


def _share(where: torch.Tensor) -> float:
    """The largest share of a row."""
    share: float = where.double().mean(1).max().item()
    return share


def _is_bounded(x: torch.Tensor) -> bool:
    """Returns True if elements of a row lie together at a bound or at zero, where clamps and masks put them."""
    at_bound = torch.stack([x == 0, x == x.amax(1, keepdim=True), x == x.amin(1, keepdim=True)]).sum(2) > 1
    return bool(at_bound.any())
