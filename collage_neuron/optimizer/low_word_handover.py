"""Low words of parameters that a compiled optimizer gets: those that another one keeps, or has left, and lost ones.

A new optimizer over a compiled model (a warm restart, the next stage of a training) begins with the values that the
last one left, and not with their high words alone. The last one may be gone by then: `optimizer = AdamW(...)` lets go
of it before the new one is compiled. So when a compiled optimizer goes, its low words stay with the parameters.
Optimizers that have the same parameters at one time take over from one another: each begins its step with the values
that the last one has left.

Parameters that were frozen when `compile` rounded their model have lost theirs, and others were left in fp32.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.optim import Optimizer

from collage_neuron.errors import RoundedWeights, warn_user
from collage_neuron.numerics.strategies import param_format
from collage_neuron.optimizer.pending_models import is_compiled, restore_low_words, written_in_all_processes
from collage_neuron.runtime import wrappers
from collage_neuron.settings import Settings
from collage_neuron.states import external_writes, step_inventory
from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping, params_of
from collage_neuron.states.format_record import record_of
from collage_neuron.states.state_keys import split_params
from collage_neuron.states.store import read_exact
from collage_neuron.states.write_detection import Mark, Marks, mark_of

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
    """Sees to it, once, that low words stay with the parameters when the optimizer goes."""
    if ours.leaving is None:
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
    params = _without_words(optimizer)
    if params:
        _take(optimizer, _meet_others(optimizer), params)
    else:  # they were fp32 until now, and no other one has them: to look takes long
        bookkeeping(optimizer).sharing = bookkeeping(optimizer).sharing or []


@torch.no_grad()
def take_over(optimizer: Optimizer) -> None:
    """Takes the exact values of parameters of which another optimizer took the last step, or was compiled before."""
    ours = bookkeeping(optimizer)
    others = _meet_others(optimizer) if ours.sharing is None else _alive(ours.sharing)
    if ours.sharing:
        external_writes.restore_words(optimizer)
        stepped = [x for x in others if bookkeeping(x).steps]
        theirs = {p for p in ours.moved() if _is_left(p) or any(_took_last_step(x, p) for x in stepped)}
        _take(optimizer, stepped, theirs | _without_words(optimizer))


def _alive(references: Iterable[Any]) -> list[Any]:
    return [x for reference in references if (x := reference()) is not None]


def _took_last_step(other: Optimizer, p: torch.Tensor) -> bool:
    """Returns True if a step of another optimizer was the last that wrote a parameter."""
    return bookkeeping(other).marks.params.get(p) == (external_writes.STEPPED, mark_of(p))


def _is_left(p: torch.Tensor) -> bool:
    """Returns True if that optimizer is gone."""
    left: Left | None = vars(p).get(LEFT)
    return left is not None and left.fits(p)


def _meet_others(optimizer: Optimizer) -> list[Any]:
    """The other compiled optimizers that keep some of its parameters; they know of one another from then on."""
    own = set(map(id, params_of(optimizer)))
    compiled = filter(is_compiled, wrappers.instances("torch.optim", "Optimizer"))
    candidates = (x for x in compiled if x is not optimizer and {"param_groups", "state"} <= vars(x).keys())
    # A parameter whose group has moved to this optimizer is still among the states of the other.
    others = [x for x in candidates if not own.isdisjoint(map(id, [*params_of(x), *x.state]))]
    bookkeeping(optimizer).sharing = [*map(weakref.ref, others)]
    for x in others:
        known = [other for other in _alive(bookkeeping(x).sharing or ()) if other is not optimizer]
        bookkeeping(x).sharing = [*map(weakref.ref, [*known, optimizer])]
    return others


def _without_words(optimizer: Optimizer) -> set[torch.Tensor]:
    """The bf16 parameters that have no low words yet."""
    split = split_params(optimizer.state)
    return {p for p in params_of(optimizer) if p.dtype == torch.bfloat16 and not p.is_meta and p not in split}


def _take(optimizer: Optimizer, others: Sequence[Any], params: set[torch.Tensor]) -> None:
    strategies = {p: Settings.of(group).strategy for group in optimizer.param_groups for p in group["params"]}
    split = {p: fmt for p in params if len((fmt := param_format(strategies[p], p.dtype)).components) > 1}
    for p, value in _values(others, set(split)):
        step_inventory.changed(optimizer)
        external_writes.put(optimizer, p, split[p], value)


def _values(others: Sequence[Any], params: set[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The exact values of parameters of which somebody has low words: who took the last step, else anybody."""
    for is_last, other in product((True, False), others):
        shared = {p for p in split_params(other.state) & params if not is_last or _took_last_step(other, p)}
        params = params - shared
        for p in shared:
            exact = read_exact(p, other.state[p], "param", record_of(other, p))
            yield p, external_writes.without_stale(other, p, exact)
    for p in params:
        left: Left | None = vars(p).pop(LEFT, None)
        if left is not None and left.fits(p):
            yield p, read_exact(p, left.words, "param", left.record)


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
            "torch.bfloat16 under ZeRO-1), or compile the optimizer object, which splits them into hi and lo",
            UserWarning,
        )


def warn_of_rounded(params: Iterable[torch.Tensor], index: int) -> None:
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
