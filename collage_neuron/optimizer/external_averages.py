"""Warns of averages of the weights that other code makes of a compiled model: torch's, Lightning's, one by hand.

They copy the model and read its parameters, which are the high words: an average in bf16 does not move where its steps
are below half an ulp, and one in fp32 does not have the low words. `AveragedModel` averages exact values.

There is no list of libraries, which all copy a model. A copy is a module of the model's class and shapes that no
optimizer trains. It is an average if it is written twice with other values than the model has at that time: a frozen
reference is not written, and a target network or a worker's model is written with the model's values. Copies are
looked for after 16, 64, 256, ... steps, which lists the objects of the process (half a second for half a million),
and watched for WATCHED steps if there are any; other steps compare a number.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import ref

import torch
from torch.optim import Optimizer

from collage_neuron.errors import RoundedAverage
from collage_neuron.states.bookkeeping import Bookkeeping, params_of
from collage_neuron.states.live_objects import copies_of_models
from collage_neuron.states.sharding import local, version

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
    warnings.warn(
        f"a copy of this {type(model).__name__} ({' and '.join(dtypes)}) is averaged beside training: it is made of "
        "the high words, without the low words that the compiled optimizer keeps, and a copy in bf16 rounds most of "
        "what is added away. Use collage_neuron.AveragedModel(model, optimizer, decay=...), or the callbacks "
        "collage_neuron.trainers.lightning_average and hugging_face_average. If it averages exact values, or "
        "is no average, filter this warning (collage_neuron.RoundedAverage)",
        RoundedAverage,
        stacklevel=8,
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
