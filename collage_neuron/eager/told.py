"""Says once that the steps of an optimizer run as written."""

from __future__ import annotations

import logging
import re

from torch.optim import Optimizer

from collage_neuron.errors import UnknownUpdate, UnsupportedUpdate
from collage_neuron.states.bookkeeping import bookkeeping

SAID = "as written"
"""In `Bookkeeping.told` once the line was written."""

log = logging.getLogger("collage_neuron")


ADVICE = re.compile(
    r"(; (?:such an optimizer|only elementwise)|, which cannot be rewritten:"
    r"|: [^:]*leave (?:it|the optimizer) uncompiled).*?(?= \(at |$)",
    re.DOTALL,
)
"""What the reason goes on to advise: to somebody whose optimizer is rejected."""


def why(optimizer: Optimizer) -> str:
    """Why the update is not captured, with its line, and without advice for optimizers that are rejected."""
    return reason_of(bookkeeping(optimizer).as_written)


def reason_of(refusal: str) -> str:
    """The reason alone that a refusal gives."""
    return ADVICE.sub("", refusal.partition(" cannot be compiled: ")[2] or refusal)


def note(base: type[Optimizer], optimizer: Optimizer, refusal: UnsupportedUpdate) -> None:
    """Notes that the next step is not known to be compiled, and says so unless it may be when it is taken."""
    if isinstance(refusal, UnknownUpdate):
        bookkeeping(optimizer).as_written = str(refusal)
    else:
        tell(base, optimizer, refusal)


def tell(base: type[Optimizer], optimizer: Optimizer, refusal: UnsupportedUpdate) -> None:
    """Notes that the steps of `optimizer` run as written from now on, and says so once in one line."""
    ours = bookkeeping(optimizer)
    ours.as_written = str(refusal)
    if SAID in ours.told:
        return
    ours.told.add(SAID)
    elements = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    groups = len(optimizer.param_groups)
    log.warning(
        "%s: step() of %s runs as written on fp32 values of parameters and states, which are stored in their formats "
        "afterwards; a step needs %.3g MB for that, and %.3g MB for each state of the parameters' shape. Why: %s. "
        "unsupported='error' rejects such optimizers",
        base.__name__,
        "its only group" if groups == 1 else f"all {groups} groups",
        8e-6 * elements,
        4e-6 * elements,
        why(optimizer),
    )
