"""Warns of code around the optimizer that loses what bf16 does not hold: writes between steps, averages of a copy.

What such code wants is not known, but what it left is: a sample of weights is compared with that after the last step.
Of all parameters it is taken after the first step, and later of those that were written before. So the first write of a
loop that writes after each step is looked at, and the second one of any other.

* Small changes, of less than an eighth of a weight, are rounded to bf16: one write is reason enough to warn.
* Large ones may be weights that were loaded: TIMES in WINDOW steps are.
* A single write that changes nothing may be a decay of less than half an ulp, or a clamp that is not reached: only
  TIMES_IDLE of them are. Two writes that change nothing are weights that came and went (averages, SAM).

Masks and clamps, which leave zeros and weights at a bound, and loads of a state dict (`external_writes`) are no reason.

Averages of the weights (torch's, Lightning's, one by hand) copy the model and read its parameters, which are the high
words: an average in bf16 does not move where its steps are below half an ulp, and one in fp32 does not have the low
words. `AveragedModel` averages exact values. There is no list of libraries, which all copy a model. A copy is a module
of the model's class and shapes that no optimizer trains. It is an average if it is written twice with other values than
the model has at that time: a frozen reference is not written, and a target network or a worker's model is written with
the model's values. Copies are looked for after 16, 64, 256, ... steps, which lists the objects of the process (half a
second for half a million), and watched for WATCHED steps if there are any; other steps compare a number.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from collage_neuron.errors import RoundedAverage, warn_user
from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping, params_of
from collage_neuron.states.live_objects import copies_of_models
from collage_neuron.states.sharding import local, version

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
    held = set(map(id, params_of(optimizer)))  # one that another optimizer has now is written by that
    written = {p: times for p, times in written.items() if id(p) in held}
    if not any(group.get("lr", 1.0) for group in optimizer.param_groups):
        # torch.distributed.checkpoint has loaded the weights, and takes its hidden step before it loads states.
        book.samples.clear()
        return
    # All at once: this runs in every step of a loop that clamps its weights.
    rows = _in_rows({p: x for p in written if p in book.samples and (x := sample(p)).shape == book.samples[p].shape})
    pairs = [(torch.stack([book.samples[p] for p in params]), now) for params, now in rows if now.numel()]
    small = max((_share(changed(*pair) & _is_near(*pair)) for pair in pairs), default=0.0)
    large = max((_share(changed(*pair)) for pair in pairs), default=0.0)
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
        warn_user(
            f"parameters of this {type(optimizer).__name__} are written between steps: what is written into the "
            f"parameter itself is rounded to bf16, 8 significant bits{what}. Code around the optimizer (Lookahead, "
            "decay in a loop, averages, projections) should read with collage_neuron.exact_value and write with "
            "collage_neuron.set_exact_value; a decay may be the group's weight_decay instead"
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
    if not book.samples:
        return
    for alike, rows in _in_rows({p: sample(p) for p in book.samples}):
        book.samples.update(zip(alike, rows.unbind(), strict=True))


def changed(before: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
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


# --- averages of copies of the model ----------------------------------------------------------------------------------


WATCHED = 16
"""Steps for which copies are watched: an average is seen if two of its updates are in them."""

ELEMENTS = 16
"""Elements of each sampled parameter."""


@dataclass
class Copy:
    """A model and a copy of it, and the copy as it was before the last step."""

    model: ref[torch.nn.Module]
    copy: ref[torch.nn.Module]
    sample: list[torch.Tensor] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    averaged: int = 0
    """How often it was written with other values than the model has."""


def look(optimizer: Optimizer, ours: Bookkeeping) -> None:
    """Before a step: looks for copies, or at those that are watched; in most steps neither."""
    steps = ours.steps
    if steps >= WATCHED and steps & (steps - 1) == 0 and steps.bit_length() & 1:
        ours.copies = _found(optimizer)
        ours.watched_until = steps + WATCHED
    if ours.copies:
        ours.copies = [c for c in ours.copies if not _is_told(c)] if steps < ours.watched_until else []


def _found(optimizer: Optimizer) -> list[Copy]:
    held = {id(p) for p in params_of(optimizer) if p.dtype == torch.bfloat16}
    if len(held) < 2:  # of the many optimizers of a model that have one parameter each
        return []
    return [Copy(ref(model), ref(copy)) for model, copy in copies_of_models(held)]


def _is_told(c: Copy) -> bool:
    """Looks at a copy; returns True if it needs no further look."""
    model, copy = c.model(), c.copy()
    if model is None or copy is None:
        return True
    if _is_written(c, copy):
        rounded = [t.bfloat16().float() for t in c.sample]  # a copy of exact values rounds to what the model has
        c.averaged += not _are_equal(rounded, _sample(model))
    if c.averaged < 2:
        return False
    dtypes = sorted({str(p.dtype).removeprefix("torch.") for p in copy.parameters() if p.is_floating_point()})
    warn_user(
        f"a copy of this {type(model).__name__} ({' and '.join(dtypes)}) is averaged beside training: it is made of "
        "the high words, without the low words that the compiled optimizer keeps, and a copy in bf16 rounds most of "
        "what is added away. Use collage_neuron.AveragedModel(model, optimizer, decay=...), or the callbacks "
        "collage_neuron.trainers.lightning_average and hugging_face_average. If it averages exact values, or "
        "is no average, filter this warning (collage_neuron.RoundedAverage)",
        RoundedAverage,
    )
    return True


def _is_written(c: Copy, copy: torch.nn.Module) -> bool:
    """Returns True if a copy was written since the last look, and remembers what it has now.

    Writes through `.data` leave the version; only on a CPU is it cheap to look at values for them.
    """
    versions, before = [version(p) for p in copy.parameters()], c.versions
    c.versions = versions
    written = bool(before) and versions != before
    if not written and any(p.device.type != "cpu" for p in copy.parameters()):
        return False
    last, c.sample = c.sample, _sample(copy)
    return written or (bool(last) and not _are_equal(c.sample, last))


@torch.no_grad()
def _sample(model: torch.nn.Module) -> list[torch.Tensor]:
    """Some elements of the first, the middle and the last parameter, on the host and in bf16, as the model has them."""
    params = list(model.parameters())
    return [_first(local(params[i].detach())) for i in dict.fromkeys((0, len(params) // 2, len(params) - 1))]


def _first(t: torch.Tensor) -> torch.Tensor:
    row = t if t.numel() == 0 or t.dim() == 0 else t[(0,) * (t.dim() - 1)][:ELEMENTS]
    return row.to("cpu", torch.float32, copy=True)


def _are_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
