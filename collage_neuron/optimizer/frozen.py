"""Parameters that an optimizer gets later: frozen when `compile` rounded their model, or left in fp32 by it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from collage_neuron.errors import RoundedWeights, warn_user
from collage_neuron.optimizer.continued import continue_from_others
from collage_neuron.optimizer.kept_values import restore_low_words, written_in_all_processes
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.state_keys import split_params

rounded: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()
"""Of models that were compiled with an optimizer: the names of frozen parameters that bf16 could not hold.

No optimizer has these, so that its bookkeeping is no place for them: a copy of it would copy the frozen parameters. A
name says which parameter it is after a move to another device, which may make new ones."""

COMPILED = "_collage_compiled"
"""An attribute of the parameters of models that `compile` has cast: what is fp32 is so because it was to stay."""


def joined(optimizer: Optimizer, params: Iterable[torch.Tensor], index: int) -> None:
    """Parameters have joined a compiled optimizer: gives them the low words that `compile(model)` kept, or warns."""
    stay = {p for p in params if p.dtype == torch.float32 and hasattr(p, COMPILED)}
    bookkeeping(optimizer).fp32 |= stay
    _tell_of_fp32(p for p in params if p not in stay)
    continue_from_others(optimizer)
    restore_low_words(optimizer, split_params(optimizer.state) | written_in_all_processes())
    tell(params, index)


def _tell_of_fp32(params: Iterable[torch.Tensor]) -> None:
    if any(p.dtype == torch.float32 for p in params):
        warn_user(
            "a parameter group with float32 parameters was added to a compiled optimizer: they are updated in plain "
            "fp32 and save no memory. Convert the model first (model.to(torch.bfloat16), or optimizer_dtype="
            "torch.bfloat16 under ZeRO-1), or compile the optimizer object, which splits them into hi and lo",
            UserWarning,
        )


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
