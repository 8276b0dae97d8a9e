"""A hint for models that were bf16 already when they were compiled: were their weights rounded from fp32?

`compile` keeps what rounding to bf16 drops, but only of weights that it rounds itself. Training from scratch in bf16
loses nothing; a model that was loaded in fp32 and cast before the line begins with rounded weights, silently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.strategies import NO_ROLES, formats_for
from collage_neuron.optimizer import first_step
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.state_keys import split_params
from collage_neuron.torch_privates import is_flattened

SAID = "bf16 before"
"""In `Bookkeeping.told` once it was said."""


def tell(base: type[Optimizer], optimizer: Optimizer) -> None:
    """Before the first step of an optimizer object that was compiled: says it, once, as the line after the step.

    Not of a compiled class: libraries that take one need a bf16 model.
    """
    ours = bookkeeping(optimizer)
    if not ours.compiled_with or SAID in ours.told or not _starts_from_high_words(optimizer):
        return
    ours.told.add(SAID)
    if first_step.says(optimizer):
        first_step.say(
            f"the parameters of this {base.__name__} were bf16 already when it was compiled: training "
            "starts from exactly these values. If they were rounded from fp32 weights (model.to(torch.bfloat16), "
            "dtype=torch.bfloat16), compile the fp32 model instead, and what rounding drops is kept in low words"
        )


def _starts_from_high_words(optimizer: Optimizer) -> bool:
    """Returns True if every trained parameter is bf16, would be kept in further words too, and has none yet.

    It has them if `compile` or a checkpoint brought fp32 values. FSDP1's have to be bf16 before they are compiled.
    """
    trained = [(p, group) for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if not trained or split_params(optimizer.state) or any(is_flattened(p) for p, _ in trained):
        return False
    return all(p.dtype == torch.bfloat16 and _has_words(group, p.dtype) for p, group in trained)


def _has_words(group: dict[str, Any], dtype: torch.dtype) -> bool:
    formats = formats_for(Settings.of(group).strategy, (), NO_ROLES, dtype)
    return len(formats["param"].components) > 1
