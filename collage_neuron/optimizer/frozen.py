"""Parameters that were frozen when `compile` rounded their model, and that an optimizer gets later."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from collage_neuron.errors import RoundedWeights
from collage_neuron.optimizer.kept_values import restore_low_words, written_in_all_processes

rounded: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()
"""Of models that were compiled with an optimizer: the names of frozen parameters that bf16 could not hold.

No optimizer has these, so that its bookkeeping is no place for them: a copy of it would copy the frozen parameters. A
name says which parameter it is after a move to another device, which may make new ones."""


def joined(optimizer: Optimizer, params: Iterable[torch.Tensor], index: int) -> None:
    """Parameters have joined a compiled optimizer: gives them the low words that `compile(model)` kept, or warns."""
    restore_low_words(optimizer, written_in_all_processes())
    tell(params, index)


def tell(params: Iterable[torch.Tensor], index: int) -> None:
    """Warns, once of each, of parameters that a group gets and whose fp32 values are gone."""
    own = {id(p) for p in params}
    for model, names in rounded.items() if own else ():
        gone = [name for name, p in model.named_parameters() if name in names and id(p) in own]
        names.difference_update(gone)
        if gone:
            others = f" and {len(gone) - 1} other parameters" if len(gone) > 1 else ""
            warnings.warn(
                f"param_groups[{index}] has {gone[0]!r}{others} of a {type(model).__name__}, which were frozen when "
                "collage_neuron.compile rounded them to bf16: they are trained from the rounded values, and their low "
                "words start at zero. To start from the fp32 values, write them from the fp32 checkpoint, by "
                "collage_neuron.set_exact_value(optimizer, p, value); or give compile the model alone, which keeps "
                "the fp32 values of frozen parameters (4 bytes each) until an optimizer has them; or name the "
                "parameters in keep_fp32",
                RoundedWeights,
                stacklevel=4,
            )
