"""Parameters that several compiled optimizers have, at one time or one after the other: all keep the same value.

What one of them has stored, the others get at once, so that each can be read, saved, copied and stepped by itself. The
first word is the parameter, which all have; only further words are written.

A new optimizer over a compiled model (a warm restart, the next stage of a training) begins with the values that the
last one left, and not with their high words alone. The last one may be gone by then: `optimizer = AdamW(...)` lets go
of it before the new one is compiled. So when a compiled optimizer goes, its low words stay with the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import MASTER, Format
from collage_neuron.numerics.strategies import param_format
from collage_neuron.settings import Settings
from collage_neuron.states import external_writes
from collage_neuron.states.bookkeeping import (
    FRESH,
    STEPPED,
    Bookkeeping,
    LowWords,
    Marks,
    bookkeeping,
    compiled_optimizers,
    mark_of,
    params_of,
)
from collage_neuron.states.format_record import record_of
from collage_neuron.states.sharding import local
from collage_neuron.states.state_keys import split_params
from collage_neuron.states.store import Record, is_stored, read_exact, store_beside


def meet(optimizer: Optimizer) -> list[Any]:
    """The other compiled optimizers that keep some of its parameters; they know of one another from then on."""
    others = [x for x in optimizers_with(params_of(optimizer)) if x is not optimizer]
    bookkeeping(optimizer).sharing = [*map(weakref.ref, others)]
    for book in filter(lambda book: book.sharing is not None, map(bookkeeping, others)):  # else it looks for all itself
        known = [other for other in _alive(book.sharing) if other is not optimizer]
        book.sharing = [*map(weakref.ref, [*known, optimizer])]
    return others


def optimizers_with(params: Iterable[Any]) -> list[Optimizer]:
    """The living compiled optimizers that keep some of these parameters."""
    held = set(map(id, params))
    # A parameter whose group has moved to another optimizer is still among the states of the first.
    living = compiled_optimizers() if held else []
    return [x for x in living if not held.isdisjoint(map(id, chain(params_of(x), x.state)))]


def _alive(references: Iterable[Any]) -> list[Any]:
    return [x for reference in references if (x := reference()) is not None]


@torch.no_grad()
def hand_on(optimizer: Optimizer) -> None:
    """Gives the values that `optimizer` has just stored to all others that have these parameters."""
    ours = bookkeeping(optimizer)
    others = meet(optimizer) if ours.sharing is None else _alive(ours.sharing)
    own = set(map(id, params_of(optimizer))) if others else set()
    for other in others:
        if bookkeeping(other).presented is not None:
            continue  # its step, or its method, stores what it has at its end
        external_writes.restore_words(other)
        for p, fmt in formats_of(other).items():
            low = external_writes.low_words_of(other, p)
            if id(p) in own and not (low.event == STEPPED and low.is_of(p)):
                _give_words(other, p, fmt, optimizer.state.get(p, {}), record_of(optimizer, p))
                external_writes.remember(other, p, STEPPED)


def _give_words(
    optimizer: Optimizer, p: torch.Tensor, fmt: Format, words: Mapping[str, Any], record: Mapping[str, str]
) -> None:
    """Stores the value that others have in their further `words` of a parameter in `fmt`; the first word stays."""
    state, own = optimizer.state.setdefault(p, {}), record_of(optimizer, p)
    if not is_stored(p, words, "param", fmt, record):
        store_beside(p, state, fmt, read_exact(p, words, "param", record), own)
    elif is_stored(p, state, "param", fmt, own):
        for key in fmt.keys("param")[1:]:
            local(state[key]).copy_(local(words[key]))
    else:
        state.update({key: words[key].clone() for key in fmt.keys("param")[1:]})
        own["param"] = fmt.name


def formats_of(optimizer: Optimizer) -> dict[torch.Tensor, Format]:
    """The formats of the bf16 parameters that the settings keep in several words."""
    found: dict[torch.Tensor, Format] = {}
    for group in optimizer.param_groups:
        fmt = param_format(Settings.of(group).strategy, torch.bfloat16)
        if len(fmt.components) > 1:
            found.update((p, fmt) for p in group["params"] if p.dtype == torch.bfloat16 and not p.is_meta)
    return found


# --- the next optimizer -----------------------------------------------------------------------------------------------


def leave_words(optimizer: Optimizer, ours: Bookkeeping) -> None:
    """Sees to it that low words stay with the parameters when the optimizer goes."""
    ours.leaving = weakref.finalize(optimizer, _leave, ours.formats, ours.marks)
    ours.leaving.atexit = False


def _leave(formats: Mapping[torch.Tensor, Mapping[str, str]], marks: Marks) -> None:
    for p, low in marks.params.items():
        external_writes.leave(p, low, formats.get(p, {}))


def leave_value(p: torch.Tensor, value: torch.Tensor) -> None:
    """The same with the fp32 `value` of `p`, which is that value in bf16."""
    record = {"param": "bf16+fp32"}
    external_writes.leave(p, LowWords(FRESH, mark_of(p), {"param" + MASTER: local(value)}), record)


def left_with(p: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], Record]:
    """The further words that a compiled optimizer left with `p`, if they are of what it is now, and their record."""
    low, record = getattr(p, external_writes.LEFT, (None, {}))
    return (low.words, record) if low is not None and low.mark == mark_of(p) else ({}, {})


@torch.no_grad()
def continue_from_others(optimizer: Optimizer) -> None:
    """Gives bf16 parameters of `optimizer` without low words those that another compiled one keeps of them, or left."""
    split = split_params(optimizer.state)
    wanted = {p: fmt for p, fmt in formats_of(optimizer).items() if p not in split}
    for other in compiled_optimizers() if wanted else ():
        external_writes.restore_words(other)  # or leaves them, if it has the parameter no more
    for other in meet(optimizer):
        for p in split_params(other.state) & wanted.keys():
            fmt, words, record = wanted.pop(p), other.state[p], record_of(other, p)
            if external_writes.low_words_of(other, p).is_of(p):
                _give_words(optimizer, p, fmt, words, record)
            else:
                exact = external_writes.without_stale(other, p, read_exact(p, words, "param", record))
                store_beside(p, optimizer.state[p], fmt, exact, record_of(optimizer, p))
            external_writes.remember(optimizer, p, FRESH)
    for p, fmt in wanted.items():
        words, record = left_with(p)
        if words:
            _give_words(optimizer, p, fmt, words, record)
            external_writes.remember(optimizer, p, FRESH)
        vars(p).pop(external_writes.LEFT, None)
