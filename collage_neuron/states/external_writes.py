"""Weights that other code wrote: what becomes of their low words, at any time (docs/checkpoints.md).

Other code may write a parameter between `compile` and the first step, between steps, or as it loads a model:

* An element whose bf16 bits are what they were when its low word was stored keeps that.
* What a load after some steps brings begins anew, with low words of zero, if a bit of it differs anywhere: most weights
  of a checkpoint of some steps before have the bits of now (`_brought_others`).
* An element whose bits changed is what was written, with a low word of zero, where the old bits are known. They are
  from `compile` to the first step, and from a `load_state_dict` of the model to the next step (`LowWords.bits`), unless
  a sample shows that the weights were not those of the last step when they were loaded; and a master tells them at any
  time, since it rounds to them.
* Elsewhere (`p.clamp_()` after a step; averages that `p.data.copy_` brought and a load takes away) an old low word
  stays as far as it fits: it is half an ulp of bf16 of what was written at most. This holds for writes through `p.data`
  or shared memory too, which nobody notices, since a format reads no more out of a low word (`Format.decode_param`). Of
  a format of a user's that does not say so, words that do not fit are reset.

Low words from a checkpoint are kept in the same way, in whatever order weights and state were loaded. `set_exact_value`
writes a parameter with its low word.

Processes of DDP begin with the weights of one of them, of which the others do not have the low words: what is written
in replicas before the first step costs all of its low words, in all processes alike.

Writes are noticed by cheap signs: a parameter's version counter and address, a state's version counter and identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import MASTER, Format
from collage_neuron.states import coarse_writes, low_words, state_writes, step_inventory, word_encoding
from collage_neuron.states.bookkeeping import FRESH as FRESH
from collage_neuron.states.bookkeeping import LOADED as LOADED
from collage_neuron.states.bookkeeping import STEPPED as STEPPED
from collage_neuron.states.bookkeeping import (
    Bookkeeping,
    LowWords,
    Split,
    bookkeeping,
    mark_of,
    numbered,
    params_of,
)
from collage_neuron.states.live_objects import groups_of
from collage_neuron.states.living_optimizers import compiled_optimizers
from collage_neuron.states.sharding import is_distributed, is_sharded, like, local, some_bits, version
from collage_neuron.states.state_keys import names_in, words_of
from collage_neuron.states.state_writes import kept_format_of
from collage_neuron.states.store import is_idle, is_stored, read_fp32, record_of, store


def remember(optimizer: Optimizer, p: torch.Tensor, what: str = "") -> None:
    """Notes that the low words of `p` belong to what `p` holds now (FRESH, STEPPED), or will hold (LOADED).

    By default FRESH before the first step of `p`, and STEPPED after it.
    """
    state = optimizer.state.get(p, {})
    low = LowWords.of(what or (FRESH if is_idle(state) else STEPPED), mark_of(p), words_of(state))
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


def continue_from_others(optimizer: Optimizer) -> None:
    """Gives parameters of `optimizer` the words that other compiled optimizers have of them: training goes on there."""
    if bookkeeping(optimizer).presented is not None:
        return  # within a method or a step its words are not in the states: what comes after that looks for others
    for p in low_words.restore(optimizer, are_to_stay=True):
        if low_words.low_words_of(optimizer, p).is_of(p):
            remember(optimizer, p)


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
        bookkeeping(optimizer).marks.params[new] = low._replace(mark=None).with_words(words_of(optimizer.state[new]))
    else:
        remember(optimizer, new, FRESH)


def before_load(params: Iterable[torch.Tensor]) -> None:
    """Called before `load_state_dict` of a model writes each of `params` once, if it does not raise."""
    written = {id(p): p for p in params if p.dtype == torch.bfloat16}
    for optimizer in compiled_optimizers() if written else ():
        book = bookkeeping(optimizer)
        known, own = book.marks.params, {id(p) for group in groups_of(optimizer) for p in group["params"]}
        met = [p for key, p in written.items() if key in own and p in known]
        new = [p for p in met if known[p].event == STEPPED and known[p].bits is None and known[p].is_of(p)]
        if new and book.sample is not None:
            book.sample = book.sample.before_load(known)
        known.update((p, _with_bits(known[p], p)) for p in new)
        for p in met:
            if (bits := known[p].bits) is not None:
                known[p] = known[p]._replace(bits=(bits[0], bits[1] + 1))


class Sample(NamedTuple):
    """Some bits of weights and codes after the last step: writes through `p.data`, which nobody counts, show there."""

    bits: list[tuple[torch.Tensor, bytes]]
    codes: list[state_writes.Coded]
    is_away: bool = False
    """True if parameters were others when a load was about to write them: an average, in most cases."""

    @classmethod
    def of(cls, params: Sequence[torch.Tensor], codes: list[state_writes.Coded]) -> Sample:
        """Those of up to four of the parameters; none on devices."""
        return cls([(p, found) for p in params[:: 1 + len(params) // 3] if (found := some_bits(p))], codes)

    def before_load(self, known: Mapping[torch.Tensor, LowWords]) -> Sample:
        """The sample of those that nobody is known to have written since."""
        own = [(p, bits) for p, bits in self.bits if p in known and known[p].is_of(p)]
        return Sample(own, self.codes, self.is_away or any(some_bits(p) != bits for p, bits in own))

    def now(self) -> list[bytes]:
        """The same bits now."""
        return [some_bits(p) for p, _ in self.bits]

    def is_there(self) -> bool:
        """Returns True if they are what they were, but for what masks and clamps write."""
        both = zip(self.now(), (bits for _, bits in self.bits), strict=True)
        return bool(self.bits) and all(now == bits or _is_masked(now, bits) for now, bits in both)


def _is_masked(now: bytes, before: bytes) -> bool:
    """Returns True if bits of bf16 numbers differ only where zeros are now, or the largest or smallest number."""
    if len(now) != len(before):  # memory that was given back has none
        return False
    x, y = (torch.frombuffer(bytearray(bits), dtype=torch.bfloat16)[None] for bits in (before, now))
    return not coarse_writes.changed(x, y).any()


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
    # Of a parameter that has left the groups they may be old: another optimizer steps it.
    gone = step_inventory.once(optimizer, "gone", partial(_gone, optimizer, split))
    before = {p: book.marks.params[p] for p in gone if p in book.marks.params}
    if in_step is None or not book.marks.mark_again(split, in_step.ids):
        book.marks.mark_all(split, states, [] if in_step is None else in_step.with_others().ids)
    if before:
        book.marks.params.update(before)
    book.sample = Sample.of(split.params, state_writes.some_codes(split, states) if split.coded else [])
    if ended:
        coarse_writes.sample_after_step(book, split.params)


def _gone(optimizer: Optimizer, split: Split) -> list[torch.Tensor]:
    """The parameters that have left the groups, and not the states; of those that have left both no record stays."""
    held, formats = set(map(id, params_of(optimizer))), bookkeeping(optimizer).formats
    for p in [p for p in formats if id(p) not in held and p not in optimizer.state]:
        del formats[p]
    return [p for p in split.params if id(p) not in held]


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
    coded = [(i, name) for i, name in highs if name in names[i][1].coded]
    return Split(owners, [owners[i] for i, of_state in names if of_state.words], highs, words, coded)


def drop_stale(optimizer: Optimizer) -> None:
    """Before a step: takes care of the low words of what was written since they were remembered.

    Raises:
        ValueError: codes were written; nothing was changed.
    """
    book, in_step = bookkeeping(optimizer), step_inventory.of(optimizer)
    if book.sample is not None and book.sample.codes:
        state_writes.warn_of_uncounted(optimizer, book.sample.codes)
        book.sample = book.sample._replace(codes=[])  # the step counts what refers to a state that it replaces
    if in_step is not None and book.marks.are_those_of(_split(in_step), in_step.ids):
        return  # states are not cleared either: the low words are where the last step left them
    low_words.restore(optimizer, are_to_stay=True)
    state_writes.drop_stale(optimizer)
    written = {p: low for p, low in book.marks.params.items() if not low.is_of(p)}
    if not written:
        return
    stepped = {p: low for p, low in written.items() if low.event == STEPPED and low.bits is None}
    marks = {p: low.mark for p, low in stepped.items() if low.mark is not None}
    coarse_writes.check_writes(optimizer, {p: version(p) - mark[0] for p, mark in marks.items()})
    for p, fmt in _split_among(optimizer, written).items():
        _drop(optimizer, p, fmt, optimizer.state[p])


def _drop(optimizer: Optimizer, p: torch.Tensor, fmt: Format, state: Mapping[str, Any]) -> None:
    """Makes low words in `state` zero where those of `p`, which was written, do not count."""
    what = _what_counts(bookkeeping(optimizer), p, fmt)
    if what != ALL and (where := _stale(optimizer, p, what)).any():
        state_writes.reset_where(p, state, "param", fmt, where)


@torch.no_grad()
def words_to_save(optimizer: Optimizer, p: torch.Tensor) -> dict[str, torch.Tensor]:
    """The further words of `p` as the next step leaves them, if it was written since they were stored; as copies.

    The optimizer's own stay: other weights may be there for a moment only (an average, for an evaluation).
    """
    words, low = words_of(optimizer.state.get(p, {})), low_words.low_words_of(optimizer, p)
    if not words or low.event == LOADED or low.is_of(p):
        return {}
    formats, words = _split_among(optimizer, [p]), {key: word.clone() for key, word in words.items()}
    if p in formats:
        _drop(optimizer, p, formats[p], words)
    return words


@contextmanager
def kept(optimizer: Optimizer) -> Iterator[None]:
    """A context in which values are read, and after which low words are as before, also of what was written."""
    book = bookkeeping(optimizer)
    written = {p: low for p, low in book.marks.params.items() if not low.is_of(p)}
    words = {p: {k: x.clone() for k, x in words_of(optimizer.state.get(p, {})).items()} for p in written}
    sample = book.sample
    yield
    for p, of_p in words.items():
        for key, word in of_p.items():
            local(optimizer.state[p][key]).copy_(local(word))
    book.marks.params.update(written)
    book.sample = sample


def save_words(optimizer: Optimizer, packed: Mapping[str, Any]) -> None:
    """Puts these into what `Optimizer.state_dict` returned."""
    for i, p in numbered(optimizer, packed).items():
        if words := words_to_save(optimizer, p):
            packed["state"][i] = {**packed["state"][i], **words}  # a new one: torch's is the live state itself


NONE, UNCHANGED, FITTING, ALL = "none", "unchanged", "fitting", "all"
"""Which low words of a parameter that was written count: those of elements whose bits are what they were, those that
belong to what is there, or all, as a format reads no more out of each than fits."""


def _what_counts(book: Bookkeeping, p: torch.Tensor, fmt: Format) -> str:
    """Says this of `p`, which was written: the one policy, as at the top of this file."""
    low = book.marks.params[p]
    if low.event == FRESH and _is_replica(p):
        return NONE
    if _is_known(low, p):
        if low.event != STEPPED or not _differ(book):
            return UNCHANGED
        if book.sample is None or not book.sample.is_there():
            return NONE  # most weights of a checkpoint of some steps before have the same bits, and other low words
        if not book.sample.is_away:  # some were masked since, or are others
            return UNCHANGED
    return FITTING if fmt.decode_param is None else ALL


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
    if what == NONE:
        return torch.ones(local(p).shape, dtype=torch.bool, device="cpu")
    return ~state_writes.belongs(optimizer, p)


def _bits(low: LowWords, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The bits of `p`, and those that were noted; on the CPU."""
    assert low.bits is not None
    return state_writes.on_host(p).view(torch.int16), low.bits[0].view(torch.int16)


def _differ(book: Bookkeeping) -> bool:
    """Returns True if weights that were loaded since the last step are not those which were there before.

    Where no bit differs in any parameter, weights were swapped in and out, for an evaluation. So they were where the
    sample was away when a load began, and is that of the last step again.
    """
    loaded = {p: low for p, low in book.marks.params.items() if low.event == STEPPED and _is_known(low, p)}
    now = [version(p) for p in loaded], [] if book.sample is None else book.sample.now()  # `p.data` has no versions
    if book.load_compared is None or book.load_compared[0] != now:
        book.load_compared = now, any(not torch.equal(*_bits(low, p)) for p, low in loaded.items())
    return book.load_compared[1]


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
        fmt, state = kept_format_of(optimizer, p), optimizer.state.get(p, {})
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
    fmt = None if low is None or low.is_of(p) else _split_among(optimizer, [p]).get(p)
    if fmt is None:
        return value
    if (what := _what_counts(book, p, fmt)) == ALL:
        if word_encoding.limits(p.device):
            return value
        return read_fp32(p, optimizer.state[p], "param", record_of(optimizer, p)).to(p.device)
    own = local(value)
    stale, high = _stale(optimizer, p, what).to(own.device), local(p.detach()).float().to(own.device)
    return like(torch.where(stale, high, own), p)
