"""Which steps are traced: those of all classes but the elementwise ones of torch, which are recorded."""

from __future__ import annotations

import os

from torch.optim import Optimizer

from collage_neuron.states import steady
from collage_neuron.trace.recorded import code_of, is_recorded

TRACE = "COLLAGE_NEURON_TRACE"
"""The environment variable with which steps of torch's own classes are traced too, if it is "on"."""


def is_traced(base: type[Optimizer], optimizer: Optimizer) -> bool:
    """Returns True if steps are traced; to record those of torch's elementwise classes costs less."""
    if os.environ.get(TRACE) == "on":
        return True
    seen = steady.of(optimizer)
    if seen is None:
        return not is_recorded(base, optimizer)
    known, code = seen.structure.known, [*code_of(base), *vars(optimizer)]
    if "code" not in known or not steady.are_same(known["code"], code):
        known["code"], known["is recorded"] = code, is_recorded(base, optimizer)
    return not known["is recorded"]
