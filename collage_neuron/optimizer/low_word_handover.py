"""Low words of parameters that a compiled optimizer gets: those that another one keeps, or has left, and lost ones.

A new optimizer over a compiled model (a warm restart, the next stage of a training) begins with the values that the
last one left, and not with their high words alone. The last one may be gone by then: `optimizer = AdamW(...)` lets go
of it before the new one is compiled. So when a compiled optimizer goes, its low words stay with the parameters.
Optimizers that have the same parameters at one time hand on what they store (`states/shared_params.py`).

Parameters that were frozen when `compile` rounded their model have lost theirs, and others were left in fp32.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from collage_neuron.errors import RoundedWeights, warn_user
from collage_neuron.optimizer.pending_models import restore_low_words, written_in_all_processes
from collage_neuron.states import external_writes, shared_params
from collage_neuron.states.bookkeeping import Bookkeeping, Mark, Marks, bookkeeping, mark_of
from collage_neuron.states.format_record import record_of
from collage_neuron.states.state_keys import split_params
from collage_neuron.states.store import read_exact, store_beside

LEFT = "_collage_left"
"""An attribute of parameters whose compiled optimizer is gone: a `Left`."""


class Left(NamedTuple):
    """The further words of a parameter."""

    words: Mapping[str, torch.Tensor]
    record: Mapping[str, str]
    """Their format, as in the record of the optimizer that is gone."""
    mark: Mark
    """The mark of the parameter when they were its own."""

    def fits(self, p: torch.Tensor) -> bool:
        """Returns True if the parameter was not written since."""
        return self.mark == mark_of(p)


def leave_words(optimizer: Optimizer, ours: Bookkeeping) -> None:
    """Sees to it that low words stay with the parameters when the optimizer goes."""
    ours.leaving = weakref.finalize(optimizer, _leave, ours.formats, ours.marks)
    ours.leaving.atexit = False


def _leave(formats: Mapping[torch.Tensor, Mapping[str, str]], marks: Marks) -> None:
    for p, further in marks.words.items():
        _, mark = marks.params.get(p, ("", None))
        if mark is not None:
            record = {name: fmt for name, fmt in formats.get(p, {}).items() if name == "param"}
            setattr(p, LEFT, Left(dict(further), record, mark))


@torch.no_grad()
def continue_from_others(optimizer: Optimizer) -> None:
    """Gives bf16 parameters of `optimizer` without low words those that another compiled one keeps of them, or left."""
    split = split_params(optimizer.state)
    wanted = {p: fmt for p, fmt in shared_params.formats_of(optimizer).items() if p not in split}
    for other in shared_params.meet(optimizer):
        external_writes.restore_words(other)
        for p in split_params(other.state) & wanted.keys():
            fmt, words, record = wanted.pop(p), other.state[p], record_of(other, p)
            if external_writes.are_its_own(other, p):
                shared_params.give_words(optimizer, p, fmt, words, record)
            else:
                exact = external_writes.without_stale(other, p, read_exact(p, words, "param", record))
                store_beside(p, optimizer.state[p], fmt, exact, record_of(optimizer, p))
            external_writes.remember(optimizer, p, external_writes.FRESH)
    for p, fmt in wanted.items():
        left: Left | None = vars(p).pop(LEFT, None)
        if left is not None and left.fits(p):
            shared_params.give_words(optimizer, p, fmt, left.words, left.record)
            external_writes.remember(optimizer, p, external_writes.FRESH)


# --- parameters that an optimizer gets later --------------------------------------------------------------------------


rounded: WeakKeyDictionary[torch.nn.Module, set[str]] = WeakKeyDictionary()
"""By model that was compiled with an optimizer: the names of frozen parameters that bf16 could not hold.

No optimizer has these, so that its bookkeeping is no place for them: a copy of it would copy the frozen parameters. A
name says which parameter it is after a move to another device, which may make new ones."""

COMPILED = "_collage_compiled"
"""An attribute of the parameters of models that `compile` has cast: what is fp32 is so because it was to stay."""


def adopt_params(optimizer: Optimizer, params: Iterable[torch.Tensor], index: int) -> None:
    """Parameters have joined a compiled optimizer: gives them the low words that `compile(model)` kept, or warns."""
    stay = {p for p in params if p.dtype == torch.float32 and hasattr(p, COMPILED)}
    bookkeeping(optimizer).fp32 |= stay
    _warn_of_fp32(p for p in params if p not in stay)
    continue_from_others(optimizer)
    restore_low_words(optimizer, split_params(optimizer.state) | written_in_all_processes())
    warn_of_rounded(params, index)


def _warn_of_fp32(params: Iterable[torch.Tensor]) -> None:
    if any(p.dtype == torch.float32 for p in params):
        warn_user(
            "a parameter group with float32 parameters was added to a compiled optimizer: they are updated in plain "
            "fp32 and save no memory. Convert the model first (model.to(torch.bfloat16), or optimizer_dtype="
            "torch.bfloat16 under ZeRO-1), or compile the optimizer object, which splits them into hi and lo"
        )


def warn_of_rounded(params: Iterable[torch.Tensor], index: int) -> None:
    """Warns, once of each, of parameters that a group gets and whose fp32 values are gone."""
    own = {id(p) for p in params}
    for model, names in rounded.items() if own else ():
        gone = [name for name, p in model.named_parameters() if name in names and id(p) in own]
        names.difference_update(gone)
        if gone:
            others = f" and {len(gone) - 1} other parameters" if len(gone) > 1 else ""
            warn_user(
                f"param_groups[{index}] has {gone[0]!r}{others} of a {type(model).__name__}, which were frozen when "
                "collage_neuron.compile rounded them to bf16: they are trained from the rounded values, and their low "
                "words start at zero. To start from the fp32 values, write them from the fp32 checkpoint, by "
                "collage_neuron.set_exact_value(optimizer, p, value); or give compile the model alone, which keeps "
                "the fp32 values of frozen parameters (4 bytes each) until an optimizer has them; or name the "
                "parameters in keep_fp32",
                RoundedWeights,
            )
