"""Low words that a checkpoint brings for a parameter that stays fp32 (`keep_fp32`, of a run without it).

They join the value that is there when the optimizer is loaded. If the model is loaded after it, that value is replaced
by the high words, and the low ones join them again before the next step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.optim import Optimizer

from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.format_record import record_of
from collage_neuron.states.sharding import local
from collage_neuron.states.state_keys import split_words
from collage_neuron.states.store import read_exact
from collage_neuron.states.write_detection import mark_of

Words = dict[torch.Tensor, tuple[Mapping[str, torch.Tensor], Mapping[str, str]]]
"""By parameter: the further words, and the record of their format."""


def loaded(optimizer: Optimizer) -> Words:
    """The words that `load_state_dict` has brought for fp32 parameters, before they are stored in their format."""
    split = split_words(optimizer.state)
    return {p: (w, dict(record_of(optimizer, p))) for p, w in split.items() if p.dtype == torch.float32}


def note(optimizer: Optimizer, words: Words) -> None:
    """Notes which words have joined, and what the parameters are now."""
    bookkeeping(optimizer).joined = {p: (w, record, mark_of(p)) for p, (w, record) in words.items()}


@torch.no_grad()
def join_again(optimizer: Optimizer) -> None:
    """Before a step: adds the words to the parameters that were written with values of bf16 since they joined."""
    ours = bookkeeping(optimizer)
    for p, (further, record, mark) in ours.joined.items():
        high = p.detach().bfloat16()
        if mark != mark_of(p) and torch.equal(local(high).float(), local(p.detach())):
            p.copy_(read_exact(high, further, "param", record))
    ours.joined.clear()
