"""Warns once that the steps of an optimizer run as written."""

from __future__ import annotations

import re

from torch.optim import Optimizer

from collage_neuron.errors import RunsAsWritten, UnknownUpdate, UnsupportedUpdate, warn_user
from collage_neuron.states.bookkeeping import bookkeeping, params_of

SAID = "as written"
"""In `Bookkeeping.told` once it was warned of."""

# The reason goes on to advise somebody whose optimizer is rejected: here it runs.
ADVICE = re.compile(
    r"(; (?:such an optimizer|only elementwise)|, which cannot be rewritten:"
    r"|: [^:]*leave (?:it|the optimizer) uncompiled).*?(?= \(at |$)",
    re.DOTALL,
)


def why(optimizer: Optimizer) -> str:
    """Why the update is not captured, with its line, and without advice for optimizers that are rejected."""
    return reason_of(bookkeeping(optimizer).as_written)


def reason_of(refusal: str) -> str:
    """The reason alone that a refusal gives."""
    return ADVICE.sub("", refusal.partition(" cannot be compiled: ")[2] or refusal)


def note(base: type[Optimizer], optimizer: Optimizer, refusal: UnsupportedUpdate) -> None:
    """Notes that the next step is not known to be compiled; warns of it unless it may be when it is taken."""
    warn(base, optimizer, refusal)
    bookkeeping(optimizer).as_written = str(refusal)


def warn(base: type[Optimizer], optimizer: Optimizer, refusal: UnsupportedUpdate) -> None:
    """Warns, once, that a step of `optimizer` runs as written; not where it is not known yet.

    Raises:
        RunsAsWritten: the filters of `warnings` make it an error. So it is called before anything is changed.
    """
    told = bookkeeping(optimizer).told
    if SAID in told or isinstance(refusal, UnknownUpdate):
        return
    try:
        warn_user(_sentence(base, optimizer, refusal), RunsAsWritten)
    except RunsAsWritten as error:
        raise RunsAsWritten(str(refusal)) from refusal.__cause__ or error  # with advice, and again in the next step
    told.add(SAID)


def _sentence(base: type[Optimizer], optimizer: Optimizer, refusal: UnsupportedUpdate) -> str:
    groups, elements = optimizer.param_groups, sum(p.numel() for p in params_of(optimizer))
    return (
        f"{base.__name__} cannot be compiled: {reason_of(str(refusal))}. So step() of "
        f"{'its only group' if len(groups) == 1 else f'all {len(groups)} groups'} runs as written, on fp32 values of "
        "parameters and states, which are stored in their formats afterwards; a step needs "
        f"{8e-6 * elements:.3g} MB for that, and {4e-6 * elements:.3g} MB for each state of the parameters' shape. "
        "warnings.simplefilter('error', collage_neuron.RunsAsWritten) makes it an error before anything is changed"
    )
