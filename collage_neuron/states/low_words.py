"""Where the low words of a parameter are: in its state, cleared from it, left with it, or with another optimizer.

The further words of a parameter are stored in its state, although they are part of the weights.
`optimizer.state.clear()`, `optimizer.state = defaultdict(dict)` and `del optimizer.state[p]` are common ways to drop
moments: the words are put back before they are needed. Only loading a checkpoint, or another strategy, removes them.

Several compiled optimizers may have a parameter, at one time or one after the other: all have the same value. The first
word is the parameter itself. Each has further words of its own, and takes those of the optimizer that has stored the
last ones (`_take_newer`) before it reads, saves, copies or steps: a parameter comes to it by `compile`,
`add_param_group`, or in a list of `param_groups`.

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
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import (
    FRESH,
    LOADED,
    Bookkeeping,
    LowWords,
    Marks,
    bookkeeping,
    mark_of,
    params_of,
)
from collage_neuron.states.living_optimizers import compiled_optimizers, noted_words
from collage_neuron.states.sharding import local
from collage_neuron.states.state_keys import split_words, words_of
from collage_neuron.states.store import Record, is_idle, is_stored, read_exact, record_of, store_beside


def low_words_of(optimizer: Optimizer, p: torch.Tensor) -> LowWords:
    """The low words of `p` as they were noted; if nobody has, nothing is known of them."""
    return bookkeeping(optimizer).marks.params.get(p) or LowWords(LOADED, None, {})


def restore(optimizer: Optimizer, are_to_stay: bool = False) -> list[torch.Tensor]:
    """Sees to it that the states have the low words that belong to the parameters of the optimizer.

    Words that were cleared away with a state are put back; with parameters that have also left the groups, they stay,
    for another optimizer. A state that was moved here from another one has words of its own, in formats that this one
    has not chosen. `are_to_stay`: the weights that are there are those of a step, and not of a moment.

    Returns:
        The parameters that have got words which other optimizers have stored, or left.
    """
    split = step_inventory.once(optimizer, "split", lambda: set(map(id, split_words(optimizer.state))))
    known = bookkeeping(optimizer).marks.params
    there = [(p, low) for p, low in known.items() if low.words and id(p) in split]
    other = [p for p, low in there if not all(optimizer.state[p].get(k) is w for k, w in low.words.items())]
    if other:
        _take_over(optimizer, other)
    cleared = [(p, low) for p, low in known.items() if low.words and id(p) not in split]
    if cleared:
        step_inventory.changed(optimizer)
        held = set(map(id, params_of(optimizer)))
        for p, low in cleared:
            if id(p) in held:
                optimizer.state.setdefault(p, {}).update(low.words)
            else:
                leave(p, low, record_of(optimizer, p))
    return _take_newer(optimizer, are_to_stay)


def _take_over(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """What another optimizer noted of these, if their states have the very words that it noted, counts from now on.

    So does what was noted of another parameter whose words and whose memory a parameter has now, in the same formats.
    """
    noted = noted_words()
    for p in params:
        words = words_of(optimizer.state[p]).values()
        left, of_left = getattr(p, LEFT, (None, {}))
        found = [noted[id(word)] for word in words if id(word) in noted]
        x, q, low = found[0] if found else (optimizer, p, low_words_of(optimizer, p))
        if x is not optimizer and q is p:
            note_as(optimizer, p, low, record_of(x, p))
        elif left is not None and any(word is w for word in words for w in left.words.values()):
            note_as(optimizer, p, left, of_left)
        elif q is not p:
            state, known = optimizer.state[p], bookkeeping(optimizer).marks.params
            step_inventory.changed(optimizer)
            own = words_of(state)
            if _has_memory_of(p, low) and record_of(x, q) == record_of(optimizer, p):
                state.update({key: word.clone() for key, word in own.items()})  # the other one may get its own again
                known[p] = low._replace(mark=mark_of(p)).with_words(words_of(state))
            else:  # the state is another parameter's, and the weights are not
                for key in own:
                    del state[key]
                state.update(known[p].words)


def _has_memory_of(p: torch.Tensor, low: LowWords) -> bool:
    """Returns True if `p` has the memory of the parameter that low words were noted of: that is told by its address."""
    return low.mark is not None and low.mark[1] != 0 and low.mark[1] == mark_of(p)[1]


def note_as(optimizer: Optimizer, p: torch.Tensor, low: LowWords, record: Mapping[str, str]) -> None:
    """Notes low words of `p`, and the formats of what is in its state, as another optimizer or parameter had them."""
    bookkeeping(optimizer).marks.params[p] = low
    own = record_of(optimizer, p)
    own.clear()
    own.update(record)


def drop_idle(optimizer: Optimizer) -> None:
    """Takes away the states of parameters that have left the groups and that have nothing but low words there.

    Plain torch has no state of them, and its `state_dict` knows no name for one. The words stay with the parameter.
    """
    held = set(map(id, params_of(optimizer)))
    states: Mapping[Any, Any] = optimizer.state
    gone = {p: state for p, state in states.items() if isinstance(p, torch.Tensor) and id(p) not in held}
    for p in [p for p, state in gone.items() if state and is_idle(state)]:
        del optimizer.state[p]
        step_inventory.changed(optimizer)


# --- of other optimizers ----------------------------------------------------------------------------------------------


@torch.no_grad()
def _take_newer(optimizer: Optimizer, are_to_stay: bool) -> list[torch.Tensor]:
    """Gives the parameters the words that other compiled optimizers have stored later, or left with them.

    Words of another format become those of this one by the first word: not by one that is there for a moment.
    """
    known, taken = bookkeeping(optimizer).marks.params, list[torch.Tensor]()
    wanted = [p for p in params_of(optimizer) if p.dtype == torch.bfloat16]
    wanted = [p for p in wanted if p not in known or not known[p].is_of(p)]
    ids = set(map(id, wanted))
    living = compiled_optimizers() if wanted else ()
    others = [x for x in living if x is not optimizer and not ids.isdisjoint(bookkeeping(x).marks.known())]
    formats = formats_of(optimizer) if others or any(hasattr(p, LEFT) for p in wanted) else {}
    for p, fmt in ((p, formats[p]) for p in wanted if p in formats):
        low, record = _newest(p, known.get(p), others)
        if low is not None and all(optimizer.state[p].get(key) is word for key, word in low.words.items()):
            note_as(optimizer, p, low, record)  # a state that was moved
        elif low is not None and (
            are_to_stay or low.mark == mark_of(p) or is_stored(p, low.words, "param", fmt, record)
        ):
            _give_words(optimizer, p, fmt, low.words, record)
            known[p] = low.with_words(words_of(optimizer.state[p]))
            taken.append(p)
    if taken:
        step_inventory.changed(optimizer)
    return taken


def _newest(p: torch.Tensor, own: LowWords | None, others: Iterable[Optimizer]) -> tuple[LowWords | None, Record]:
    """The words of `p` that were stored last, and their record; None if those are its `own`."""
    found = [(bookkeeping(x).marks.params.get(p), record_of(x, p)) for x in others]
    left, of_left = vars(p).pop(LEFT, (None, {}))
    if left is not None and left.mark == mark_of(p):  # of what was written since, nobody says how
        found.append((left, of_left))
    newer = [each for each in found if _is_newer(each[0], own, p)]
    return max(newer, key=lambda each: _when(each[0], p), default=(None, {}))


def _is_newer(low: LowWords | None, own: LowWords | None, p: torch.Tensor) -> bool:
    if low is None or not low.words or low.mark is None:
        return False
    if own is not None and own.mark == low.mark:  # both are of one value, whoever has noted it later
        return low.event == LOADED and own.event != LOADED
    if own is not None and own.event == LOADED:  # of what `p` will hold, unless a step came after the load
        return own.mark is not None and low.is_of(p) and low.stored > own.stored
    return _when(low, p) > _when(own, p)


def _when(low: LowWords | None, p: torch.Tensor) -> tuple[bool, int]:
    """When words were stored, in an order in which those of what `p` is now come last."""
    return (False, 0) if low is None or low.mark is None else (low.is_of(p), low.stored)


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


def optimizers_with(params: Iterable[Any]) -> list[Optimizer]:
    """The living compiled optimizers that keep some of these parameters."""
    held = set(map(id, params))
    # A parameter whose group has moved to another optimizer is still among the states of the first.
    living = compiled_optimizers() if held else []
    return [x for x in living if not held.isdisjoint(map(id, chain(params_of(x), x.state)))]


# --- left with parameters ---------------------------------------------------------------------------------------------


LEFT = "_collage_left"
"""An attribute of parameters whose compiled optimizer is gone, or has them no more: its `LowWords`, and its record of
their format."""


def leave_all(optimizer: Optimizer, ours: Bookkeeping) -> None:
    """Sees to it that low words stay with the parameters when the optimizer goes."""
    ours.leaving = weakref.finalize(optimizer, _leave, ours.formats, ours.marks)
    ours.leaving.atexit = False


def _leave(formats: Mapping[torch.Tensor, Mapping[str, str]], marks: Marks) -> None:
    others = [own for x in compiled_optimizers() if (own := bookkeeping(x).marks) is not marks]
    for p, low in marks.params.items():
        known = [own.params[p] for own in others if id(p) in own.known()]
        if not any(x.words and _when(x, p) >= _when(low, p) for x in known):  # else memory that nobody reads
            leave(p, low, formats.get(p, {}))


def leave(p: torch.Tensor, low: LowWords, record: Mapping[str, str]) -> None:
    """Leaves low words with their parameter, which may get another optimizer; what is there may be newer."""
    there, _ = getattr(p, LEFT, (None, {}))
    if low.words and low.mark is not None and _when(low, p) >= _when(there, p):
        own = {name: fmt for name, fmt in record.items() if name == "param"}
        setattr(p, LEFT, (low._replace(bits=None), own))


def leave_value(p: torch.Tensor, value: torch.Tensor) -> None:
    """The same with the fp32 `value` of `p`, which is that value in bf16."""
    leave(p, LowWords.of(FRESH, mark_of(p), {"param" + MASTER: local(value)}), {"param": "bf16+fp32"})


def left_with(p: torch.Tensor) -> tuple[Mapping[str, torch.Tensor], Record]:
    """The further words that a compiled optimizer left with `p`, if they are of what it is now, and their record."""
    low, record = getattr(p, LEFT, (None, {}))
    return (low.words, record) if low is not None and low.mark == mark_of(p) else ({}, {})
