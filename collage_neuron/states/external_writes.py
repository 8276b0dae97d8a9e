"""Weights and states that other code wrote: what becomes of their low words, at any time (docs/checkpoints.md).

Other code may write a parameter between `compile` and the first step, between steps, or as it loads a model:

* An element whose bf16 bits are what they were when its low word was stored keeps that.
* What a load after some steps brings begins anew, with low words of zero, if a bit of it differs anywhere: most weights
  of a checkpoint of some steps before have the bits of now (`_brought_others`).
* An element whose bits changed is what was written, with a low word of zero, where the old bits are known. They are
  from `compile` to the first step, and from a `load_state_dict` of the model to the next step (`LowWords.bits`); and a
  master tells them at any time, since it rounds to them.
* Elsewhere (`p.clamp_()` after a step) an old low word stays as far as it fits: it is half an ulp of bf16 of what was
  written at most. This holds for writes through `p.data` or shared memory too, which nobody notices, since no format
  reads more out of a low word (`Format.decode_param`, `Format.always_fits`).

Low words from a checkpoint are kept where hi + lo rounds to hi, in whatever order weights and state were loaded; of
integers, which count parts of the last place of whatever high word is there, these are all. `set_exact_value` writes a
parameter with its low word.

Processes of DDP begin with the weights of one of them, of which the others do not have the low words: what is written
in replicas before the first step costs all of its low words, in all processes alike.

`optimizer.state.clear()`, `optimizer.state = defaultdict(dict)` and `del optimizer.state[p]` are common ways to drop
moments. The further words of a parameter are stored there too, although they are part of the weights: they are put back
before they are needed. Only loading a checkpoint, or another strategy, removes them.

The low words of states that were written or exchanged are kept where hi + lo rounds to hi. The codes of states whose
words blocks share are integers, on which arithmetic means nothing: `state["exp_avg"].fill_(1e-4)` makes integer codes
0, and `mul_(2)` of a fourth root is a factor of 16; torch raises for few such writes. Nobody can tell what was meant,
so the next step raises, and so do checkpoints and copies. A tensor of values that is assigned has another type, and is
encoded (`store.kept_format`). Codes that were moved or copied are as they were.

Writes are noticed by cheap signs: a parameter's version counter and address, a state's version counter and identity.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.numerics.formats import MASTER, Format, format_named
from collage_neuron.states import coarse_writes, fitting_words, step_inventory, word_encoding
from collage_neuron.states.bookkeeping import FRESH as FRESH
from collage_neuron.states.bookkeeping import LOADED as LOADED
from collage_neuron.states.bookkeeping import STEPPED as STEPPED
from collage_neuron.states.bookkeeping import (
    Bookkeeping,
    LowWords,
    Split,
    bookkeeping,
    compiled_optimizers,
    mark_of,
    noted_words,
    params_of,
)
from collage_neuron.states.format_record import record_of
from collage_neuron.states.live_objects import groups_of
from collage_neuron.states.sharding import is_distributed, is_sharded, local, version
from collage_neuron.states.state_keys import names_in, split_words, words_of
from collage_neuron.states.store import Record, is_idle, is_stored, kept_format, store


def remember(optimizer: Optimizer, p: torch.Tensor, what: str = "") -> None:
    """Notes that the low words of `p` belong to what `p` holds now (FRESH, STEPPED), or will hold (LOADED).

    By default FRESH before the first step of `p`, and STEPPED after it.
    """
    state = optimizer.state.get(p, {})
    low = LowWords(what or (FRESH if is_idle(state) else STEPPED), mark_of(p), words_of(state))
    if low.event == FRESH and "param" + MASTER not in low.words:  # a master tells what it belongs to
        low = _with_bits(low, p)
    bookkeeping(optimizer).marks.params[p] = low


def _with_bits(low: LowWords, p: torch.Tensor) -> LowWords:
    """The same with a copy of the bits of `p`, if it has low words, until the next step.

    On the host, since before the first step no states are there yet, and a lazy device would compile the copy.
    """
    if not low.words or p.dtype != torch.bfloat16 or p.is_meta:
        return low
    return low._replace(bits=(local(p.detach()).to("cpu", copy=True), version(p)))


def put(optimizer: Optimizer, p: torch.Tensor, fmt: Format, value: torch.Tensor, what: str = "") -> None:
    """Stores the exact `value` of `p`, from which training goes on; `what` is its event, as of `remember`."""
    store(p, optimizer.state[p], "param", fmt, value, record_of(optimizer, p))
    remember(optimizer, p, what)


def remember_replaced(optimizer: Optimizer, old: torch.Tensor, low: LowWords | None, new: torch.Tensor) -> None:
    """Notes a parameter that has taken the place and the low words of an `old` one before the first step.

    On another device or in shards it is the same; beside it, elements may be others, which the noted bits tell.
    """
    is_beside = type(new) is type(old) and new.device == old.device and not _is_replica(new)
    if is_beside and low is not None and low.bits is not None:
        bookkeeping(optimizer).marks.params[new] = low._replace(mark=None, words=words_of(optimizer.state[new]))
    else:
        remember(optimizer, new, FRESH)


def before_load(params: Iterable[torch.Tensor]) -> None:
    """Called before `load_state_dict` of a model writes each of `params` once, if it does not raise."""
    written = {id(p): p for p in params if p.dtype == torch.bfloat16}
    for optimizer in compiled_optimizers() if written else ():
        own = {id(p) for group in groups_of(optimizer) for p in group["params"]}
        known = bookkeeping(optimizer).marks.params
        for p in (p for key, p in written.items() if key in own and p in known):
            low = known[p]
            if low.event == STEPPED and low.bits is None and low.is_of(p):
                low = _with_bits(low, p)
            if low.bits is not None:
                bits, expected = low.bits
                known[p] = low._replace(bits=(bits, expected + 1))


def remember_step(optimizer: Optimizer, ended: bool = True) -> None:
    """After a step, or before one that has not `ended` goes on: all low words belong to their parameters."""
    book, in_step = bookkeeping(optimizer), step_inventory.of(optimizer)
    if in_step is None:
        found: Mapping[Any, Any] = optimizer.state
        owners = [p for p in found if isinstance(p, torch.Tensor)]
        states = [found[p] for p in owners]
        split = _look_for_low_words(owners, states)
    else:
        split, states = _split(in_step), in_step.states
    book.marks.mark_all(split, states)
    if ended:
        coarse_writes.sample_after_step(book, split.params)


def _split(in_step: step_inventory.Seen) -> Split:
    """Where there are low words."""
    look = partial(_look_for_low_words, in_step.owners, in_step.states)
    found: Split = in_step.structure.once("low words", look)
    return found


def _look_for_low_words(owners: Sequence[torch.Tensor], states: Sequence[Mapping[str, Any]]) -> Split:
    names = [*enumerate(map(names_in, states))]
    watched = [(i, name) for i, of_state in names for name in of_state.watched]
    highs = [(i, name) for i, name in watched if isinstance(states[i][name], torch.Tensor)]
    words = [(i, key) for i, of_state in names for key in of_state.words]
    return Split(owners, [owners[i] for i, of_state in names if of_state.words], highs, words)


def low_words_of(optimizer: Optimizer, p: torch.Tensor) -> LowWords:
    """The low words of `p` as they were noted; if nobody has, nothing is known of them."""
    return bookkeeping(optimizer).marks.params.get(p) or LowWords(LOADED, None, {})


def drop_stale(optimizer: Optimizer) -> None:
    """Before a step: takes care of the low words of what was written since they were remembered.

    Raises:
        ValueError: codes were written; nothing was changed.
    """
    book, in_step = bookkeeping(optimizer), step_inventory.of(optimizer)
    if in_step is not None and book.marks.are_those_of(_split(in_step), in_step.states):
        return  # states are not cleared either: the low words are where the last step left them
    _drop_stale_of_states(optimizer)
    restore_words(optimizer)
    written = {p: low for p, low in book.marks.params.items() if not low.is_of(p)}
    if not written:
        return
    stepped = {p: low for p, low in written.items() if low.event == STEPPED and low.bits is None}
    marks = {p: low.mark for p, low in stepped.items() if low.mark is not None}
    coarse_writes.check_writes(optimizer, {p: version(p) - mark[0] for p, mark in marks.items()})
    split = _split_among(optimizer, written)
    counting = {p: what for p, fmt in split.items() if (what := _what_counts(book, p, fmt)) != ALL}
    fitting = {p: split[p] for p, what in counting.items() if what == FITTING and written[p].event == STEPPED}
    mismatched = 0.0
    for p in counting.keys() - fitting_words.reset_at_once(optimizer, fitting):
        if (where := _stale(optimizer, p, counting[p])).any():
            fitting_words.reset_where(p, optimizer.state[p], "param", split[p], where)
            if written[p].event == LOADED:
                mismatched = max(mismatched, where.double().mean().item())
    if mismatched:
        warn_user(
            f"the low words that were loaded do not belong to the weights (in {100 * mismatched:.2g} % of the elements "
            "of a parameter) and were dropped there: load the model's state from the same checkpoint as the "
            "optimizer's"
        )


NONE, UNCHANGED, FITTING, ALL = "none", "unchanged", "fitting", "all"
"""Which low words of a parameter that was written count: those of elements whose bits are what they were, those that
belong to what is there, or all, as a format reads no more out of each than fits."""


def _what_counts(book: Bookkeeping, p: torch.Tensor, fmt: Format) -> str:
    """Says this of `p`, which was written: the one policy, as at the top of this file."""
    low = book.marks.params[p]
    if low.event == FRESH and _is_replica(p):
        return NONE
    if _is_known(low, p):
        return NONE if low.event == STEPPED and _brought_others(book) else UNCHANGED
    return ALL if fmt.always_fits and low.event != LOADED else FITTING


def _is_replica(p: torch.Tensor) -> bool:
    """Returns True if other processes have the same parameter, and must keep the same low words."""
    return is_distributed() and not is_sharded(p)


def _is_known(low: LowWords, p: torch.Tensor) -> bool:
    """Returns True if it is known what `p` was when its low words were stored, in all processes alike."""
    # Processes load alike, and each knows of it; of what one of them sent to the others, these know nothing.
    return low.bits is not None and (not _is_replica(p) or version(p) == low.bits[1])


def _stale(optimizer: Optimizer, p: torch.Tensor, what: str) -> torch.Tensor:
    """Where the low word of `p` does not count any more, if of all low words those count; on the CPU."""
    if what == UNCHANGED:
        return torch.ne(*_bits(bookkeeping(optimizer).marks.params[p], p))
    return torch.ones(p.shape, dtype=torch.bool, device="cpu") if what == NONE else ~belongs(optimizer, p)


def _bits(low: LowWords, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of `p`, and those that were noted; on the CPU."""
    assert low.bits is not None
    return _on_host(p).view(torch.int16), low.bits[0].view(torch.int16)


def _brought_others(book: Bookkeeping) -> bool:
    """Returns True if a load since the last step brought other weights: then all that it brought begin anew.

    Most weights of a checkpoint of some steps before have the bits that they have now, with other low words. Where no
    bit differs in any parameter, weights were swapped in and out, for an evaluation.
    """
    loaded = {p: low for p, low in book.marks.params.items() if low.event == STEPPED and _is_known(low, p)}
    versions = [version(p) for p in loaded]
    if book.load_compared is None or book.load_compared[0] != versions:
        differ = any(not torch.equal(*_bits(low, p)) for p, low in loaded.items())
        book.load_compared = versions, differ
    return book.load_compared[1]


def belongs(optimizer: Optimizer, p: torch.Tensor, name: str = "param") -> torch.Tensor:
    """Where the value kept for `p` (or its state `name`) is within half a bf16 ulp of its first word; on the CPU."""
    return fitting_words.belongs(p, optimizer.state[p], name, _format(optimizer, p, name))


def _format(optimizer: Optimizer, p: torch.Tensor, name: str = "param") -> Format:
    """The format that `p`, or its state `name`, is kept in; a user may have cast the words of a state."""
    return kept_format(p, optimizer.state.get(p, {}), name, record_of(optimizer, p))


def _split_among(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> dict[torch.Tensor, Format]:
    """The formats of those of `params` that are kept in several words, all as their formats have them."""
    in_step = step_inventory.of(optimizer)
    known = (
        _split_formats(optimizer, params)
        if in_step is None
        else in_step.structure.once("split formats", lambda: _split_formats(optimizer, in_step.owners))
    )
    return {p: known[id(p)] for p in params if id(p) in known}


def _split_formats(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> dict[int, Format]:
    """The formats of parameters that are kept in several words, by the ids of the parameters."""
    split = {}
    for p in params:
        fmt, state = _format(optimizer, p), optimizer.state.get(p, {})
        if len(fmt.components) > 1 and is_stored(p, state, "param", fmt, record_of(optimizer, p)):
            split[id(p)] = fmt
    return split


@torch.no_grad()
def without_stale(optimizer: Optimizer, p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, the sum of the words of `p`, but of its high word alone where the next step would drop the low one.

    Nothing is dropped yet: other weights may be there for a moment only (an average, for an evaluation).
    """
    book = bookkeeping(optimizer)
    low = book.marks.params.get(p)
    split = {} if low is None or low.is_of(p) else _split_among(optimizer, [p])
    if split and (what := _what_counts(book, p, split[p])) != ALL:
        own = local(value)
        own.copy_(torch.where(_stale(optimizer, p, what).to(own.device), local(p.detach()).float(), own))
    return value


# --- states ----------------------------------------------------------------------------------------------------


Noted = tuple[torch.Tensor, int]
"""The first word of a state, and its version when its low words were found to be its own."""

Written = tuple[torch.Tensor, str, torch.Tensor, Noted | None]
"""A parameter, the name of a state of it, the first word, and what was noted: nothing of a new one (loaded, copied)."""


def _written_states(optimizer: Optimizer) -> Iterator[Written]:
    """The states with further words that were written in place or exchanged since these were noted, or are new."""
    states: Mapping[Any, Any] = optimizer.state
    marks = bookkeeping(optimizer).marks.states
    for p, state in states.items():
        for name in names_in(state).watched if isinstance(p, torch.Tensor) else ():
            high, noted = state[name], marks.get(p, {}).get(name)
            is_same = noted is not None and noted[0] is high and noted[1] == version(high)
            if isinstance(high, torch.Tensor) and not is_same:
                yield p, name, high, noted


def remember_states(optimizer: Optimizer) -> None:
    """Notes that the low words of all states belong to what the states hold now."""
    marks = bookkeeping(optimizer).marks.states
    for p, name, high, _ in _written_states(optimizer):
        marks.setdefault(p, {})[name] = high, version(high)


@torch.no_grad()
def _drop_stale_of_states(optimizer: Optimizer) -> None:
    """Resets the low words of states that were written, where they do not fit."""
    written = check_codes(optimizer)
    for p, name, *_ in written:
        fmt, state = _format(optimizer, p, name), optimizer.state[p]
        keys = fmt.keys(name)
        if name in names_in(state).coded or any(state[key].numel() != p.numel() for key in keys):
            continue  # the step raises
        for key in keys[1:]:  # the first word may have been exchanged for one of another shape
            if state[key].shape != state[name].shape:
                state[key] = state[key].reshape(state[name].shape)
        stale = ~belongs(optimizer, p, name)
        if stale.any():
            fitting_words.reset_where(p, state, name, fmt, stale)
    if written:
        remember_states(optimizer)


def check_codes(optimizer: Optimizer) -> list[Written]:
    """Raises ValueError if other code wrote codes since the last step; returns the states that were written."""
    written, marks = list(_written_states(optimizer)), bookkeeping(optimizer).marks.states
    gone = [q for q in marks if q not in optimizer.state] if written else []  # whose states may be a new parameter's
    for p, name, high, noted in written:
        if name in names_in(optimizer.state[p]).coded:
            if noted is not None:
                _check_unwritten(p, name, high, noted, record_of(optimizer, p))
            for q in [p] if noted is not None else [q for q in gone if name in marks[q]]:
                if name in record_of(optimizer, q):
                    _check_values(p, name, optimizer.state[p], marks[q][name][0], record_of(optimizer, q))
    return written


def _check_unwritten(p: torch.Tensor, name: str, now: torch.Tensor, noted: Noted, record: Mapping[str, str]) -> None:
    """Raises for codes that are not those that were noted with their version; values have another type."""
    before, its_version = noted
    if now.dtype == before.dtype and (
        version(before) != its_version or not torch.equal(_on_host(now), _on_host(before))
    ):
        raise ValueError(
            f"the state {name!r} of a parameter of shape {list(p.shape)} was written between steps, and it holds codes "
            f"({record.get(name, 'of blocks')}, {now.dtype}), not values. Nothing was updated: assign a floating-point "
            f"tensor of values, optimizer.state[p][{name!r}] = torch.zeros_like(p, dtype=torch.float32), which the "
            "next step encodes, or use optimizer.state_dict() and load_state_dict(), which hold values"
        )


FAR = 100.0
"""How many times larger than what it was a state of numbers like its codes is, which nobody means."""


def _check_values(p: torch.Tensor, name: str, state: Mapping[str, Any], codes: torch.Tensor, record: Record) -> None:
    """Raises for values that were computed from codes as if these were values: `state["exp_avg"] = m * 0.5`, of `m`."""
    values = state[name]
    are_comparable = values.is_floating_point() and not codes.is_floating_point() and codes.dim() > 0
    if not are_comparable or values.shape[1:] != codes.shape[1:]:
        return
    rows = min(len(values), len(codes))  # of a new parameter there may be more, or fewer
    pairs = torch.stack([_on_host(values)[:rows].double(), _on_host(codes)[:rows].double()]).flatten(1)
    pairs = pairs[:, pairs[0] != 0]  # masks
    fmt = format_named(record[name])
    words = [local(codes), *(local(state[key]) for key in fmt.keys(name)[1:])]
    was = word_encoding.decode(fmt, words, name).abs().max().cpu()
    numbers = pairs[0]
    if (numbers == numbers[:1]).all() or numbers.abs().max() <= FAR * was:  # one number tells nothing
        return
    if torch.corrcoef(pairs)[0, 1].abs() > 1 - 2**-10 or (numbers == numbers.round()).all():
        raise ValueError(
            f"the state {name!r} of a parameter of shape {list(p.shape)} was computed from its codes "
            f"({record[name]}), which are no values. Nothing was updated: compute it from the values, which "
            "optimizer.state_dict() has, and assign that, or load it by load_state_dict()"
        )


def _on_host(x: torch.Tensor) -> torch.Tensor:
    return local(x.detach()).cpu()


# --- states that user code cleared ------------------------------------------------------------------------------------


def restore_words(optimizer: Optimizer) -> None:
    """Gives parameters back the words that were cleared away with their states.

    With those that have also left the groups, the words stay, for another optimizer. A state that was moved here
    from another one has words of its own, in formats that this one has not chosen.
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
    _take_back(optimizer, split)


def _take_back(optimizer: Optimizer, split: Collection[int]) -> None:
    """Gives words that were left with a parameter to its state, if it has come to a group without a call of ours."""
    back = step_inventory.once(
        optimizer, "back", lambda: [p for p in params_of(optimizer) if hasattr(p, LEFT) and id(p) not in split]
    )
    for p in back:
        low, record = getattr(p, LEFT, (None, {}))
        if low is not None and low.is_of(p) and p not in bookkeeping(optimizer).marks.params:
            step_inventory.changed(optimizer)
            optimizer.state.setdefault(p, {}).update(low.words)
            note_as(optimizer, p, low, record)
            vars(p).pop(LEFT, None)


def _take_over(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> None:
    """What another optimizer noted of these, if their states have the very words that it noted, counts from now on."""
    noted = noted_words()
    for p in params:
        words = words_of(optimizer.state[p]).values()
        left, of_left = getattr(p, LEFT, (None, {}))
        found = [(x, low) for x, q, low in (noted[id(word)] for word in words if id(word) in noted) if q is p]
        if found and found[0][0] is not optimizer:
            note_as(optimizer, p, found[0][1], record_of(found[0][0], p))
        elif left is not None and any(word is w for word in words for w in left.words.values()):
            note_as(optimizer, p, left, of_left)


def note_as(optimizer: Optimizer, p: torch.Tensor, low: LowWords, record: Mapping[str, str]) -> None:
    """Notes low words of `p`, and the formats of what is in its state, as another optimizer or parameter had them."""
    bookkeeping(optimizer).marks.params[p] = low
    own = record_of(optimizer, p)
    own.clear()
    own.update(record)


LEFT = "_collage_left"
"""An attribute of parameters whose compiled optimizer is gone, or has them no more: its `LowWords`, and its record of
their format."""


def drop_idle(optimizer: Optimizer) -> None:
    """Takes away the states of parameters that have left the groups and that have nothing but low words there.

    Plain torch has no state of them, and its `state_dict` knows no name for one. The words stay with the parameter.
    """
    held = set(map(id, params_of(optimizer)))
    gone = {p: state for p, state in optimizer.state.items() if isinstance(p, torch.Tensor) and id(p) not in held}
    for p in [p for p, state in gone.items() if state and is_idle(state)]:
        del optimizer.state[p]
        step_inventory.changed(optimizer)


def leave(p: torch.Tensor, low: LowWords, record: Mapping[str, str]) -> None:
    """Leaves low words with their parameter, which may get another optimizer."""
    if low.words and low.mark is not None:
        own = {name: fmt for name, fmt in record.items() if name == "param"}
        setattr(p, LEFT, (low._replace(bits=None), own))
