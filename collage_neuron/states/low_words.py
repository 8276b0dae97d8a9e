"""Stale low words: a write to a high word between steps makes its low word wrong; this file notices and corrects it.

Writes are noticed by cheap signs: a parameter's version counter and address, a state's version counter and identity.
A low word of a state is kept where hi + lo still rounds to hi. For a parameter, it depends on the write:

* before the first step, weights were loaded: the parameter is what was written, and its low word is zero;
* between steps it may have been a clamp, a mask, or averaged weights that were swapped in and out, which leave most
  elements unchanged: a low word is kept where hi + lo still rounds to hi, so that training continues from a value
  within half an ulp of bf16 of what was written;
* low words from a checkpoint are checked before the next step, in whatever order weights and state were loaded.

The codes of states whose words blocks share are no numbers: a step raises if other code wrote them (`codes`).

A low word that is an integer counts parts of the last place of whatever high word is there: their sum always rounds to
that, so that it stays wherever this is asked, and the value is off by half an ulp at most.

Writes through `p.data` or through shared memory are not noticed, since they change neither sign. They leave an error of
up to half an ulp of the old value. `set_exact_value` writes a parameter with its low word.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import MASTER, Format
from collage_neuron.passes.backends.protocol import Backend
from collage_neuron.passes.backends.registry import choose
from collage_neuron.settings import Settings
from collage_neuron.states import cleared, codes, fitting_words, kept_formats, rewritten, steady
from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping
from collage_neuron.states.fitting_words import LARGEST, SHORTER
from collage_neuron.states.marks import STEPPED as STEPPED
from collage_neuron.states.marks import Split, mark_of
from collage_neuron.states.names import Names, names_in
from collage_neuron.states.sharding import is_sharded, local, version
from collage_neuron.states.store import is_stored, kept_format, read_exact

FRESH, LOADED = "compiled", "loaded"
"""The last event of a parameter with low words, if it is not STEPPED."""

Named = tuple[torch.Tensor, dict[str, Any], Names]


def remember(optimizer: Optimizer, p: torch.Tensor, what: str) -> None:
    """Notes that the low words of `p` belong to what `p` holds now (FRESH, STEPPED), or will hold (LOADED)."""
    bookkeeping(optimizer).marks.params[p] = (what, mark_of(p))
    cleared.note(optimizer, p)


def remember_step(optimizer: Optimizer) -> None:
    """After a step: all low words belong to their parameters."""
    ours, found = bookkeeping(optimizer), steady.of(optimizer)
    if found is None:
        named = list(_named(optimizer))
        words = {p: {key: state[key] for key in names.words} for p, state, names in named if names.words}
        ours.marks.params.clear()  # in place: an optimizer made by copy.copy shares them
        ours.mark(words, STEPPED)
        _note_states(named, ours)
        ours.words.clear()  # in place, as above
        ours.words.update(words)
    else:
        ours.marks.mark_all(*_split_and_highs(found))
        cleared.note_all(ours, found)
    rewritten.stepped(ours)


def _split_and_highs(found: steady.Seen) -> tuple[Split, list[torch.Tensor]]:
    """Where there are low words, and the states there."""
    split, places = found.structure.once("low words", lambda: _found_split(found))
    return split, [found.states[i][name] for i, name in places]


def _found_split(found: steady.Seen) -> tuple[Split, list[tuple[int, str]]]:
    """Where there are low words; of the states, the place of the owner and the name."""
    names = list(map(names_in, found.states))
    numbered = [(i, name) for i, of_state in enumerate(names) for name in of_state.watched]
    places = [(i, name) for i, name in numbered if isinstance(found.states[i][name], torch.Tensor)]
    params = [p for p, of_state in zip(found.owners, names, strict=True) if of_state.words]
    return Split(params, [(found.owners[i], name) for i, name in places]), places


def _named(optimizer: Optimizer) -> Iterable[Named]:
    """The parameters in `optimizer.state`, each with its state and the names in it."""
    states: Mapping[Any, Any] = optimizer.state
    return ((p, state, names_in(state)) for p, state in states.items() if isinstance(p, torch.Tensor))


def remember_states(optimizer: Optimizer) -> None:
    """Notes that the low words of all states belong to what the states hold now."""
    _note_states(_named(optimizer), bookkeeping(optimizer))


def _note_states(named: Iterable[Named], ours: Bookkeeping) -> None:
    marks = ours.marks.states
    marks.clear()  # in place, as above
    for p, highs, _ in _watched_states(named):
        marks[p] = {name: (high, version(high)) for name, high in highs}


def _watched_states(named: Iterable[Named]) -> Iterator[tuple[torch.Tensor, list[tuple[str, torch.Tensor]], Names]]:
    """The parameters that have states with further words, the names and first words of these, and all names."""
    for p, state, names in named:
        highs = [(name, state[name]) for name in names.watched if isinstance(state[name], torch.Tensor)]
        if highs:
            yield p, highs, names


def is_written(optimizer: Optimizer, p: torch.Tensor) -> bool:
    """Returns True if `p` was written since its low words were remembered."""
    what, mark = bookkeeping(optimizer).marks.params.get(p, (LOADED, None))
    return what != LOADED and mark != mark_of(p) and not (is_sharded(p) and bool(belongs(optimizer, p).all()))


def replace(optimizer: Optimizer, old: torch.Tensor, new: torch.Tensor) -> None:
    """Notes that `new` is in the place of `old`, and holds the same."""
    bookkeeping(optimizer).marks.params.pop(old, None)
    bookkeeping(optimizer).words.pop(old, None)
    kept_formats.replace(optimizer, old, new)
    remember(optimizer, new, FRESH)


def drop_stale(optimizer: Optimizer) -> None:
    """Before a step: takes care of the low words of what was written since they were remembered.

    Raises:
        ValueError: codes were written; nothing was changed.
    """
    mismatched = 0.0
    ours, found = bookkeeping(optimizer), steady.of(optimizer)
    if found is not None and ours.marks.are_those_of(*_split_and_highs(found)):
        return  # states are not cleared either: the low words are where the last step left them
    _drop_stale_of_states(optimizer, ours)
    cleared.restore(optimizer)
    written = _written(ours)
    if not written:
        return
    rewritten.look(optimizer, [p for p, what in written.items() if what == STEPPED])
    split = _split_among(optimizer, written)
    _tell_of_moved(optimizer, split)
    for p, what in _reset_at_once(optimizer, split, written).items():
        # A shard is moved by FSDP2's first forward, where it pads it: then only its values tell what was written.
        look = what != FRESH or is_sharded(p)
        stale = ~belongs(optimizer, p) if look else torch.ones(p.shape, dtype=torch.bool, device="cpu")
        if stale.any():
            _reset(optimizer, p, split[p], stale)
            mismatched = max(mismatched, stale.double().mean().item() if what == LOADED else 0.0)
    if mismatched:
        warnings.warn(
            f"the low words that were loaded do not belong to the weights (in {100 * mismatched:.2g} % of the elements "
            "of a parameter) and were dropped there: load the model's state from the same checkpoint as the "
            "optimizer's",
            stacklevel=4,
        )


def _tell_of_moved(optimizer: Optimizer, split: Mapping[torch.Tensor, Format]) -> None:
    """Warns of low words that are dropped before the first step though nothing may have been loaded.

    What is loaded is written in place, or is another parameter: a new address alone is memory of another layout.
    """
    for p, fmt in split.items():
        what, mark = bookkeeping(optimizer).marks.params[p]
        moved = what == FRESH and mark is not None and mark[1] and mark[0] == version(p) and not is_sharded(p)
        if moved and any(bool(optimizer.state[p][key].any()) for key in fmt.keys("param")[1:]):
            warnings.warn(
                f"the memory of a parameter (shape {list(p.shape)}) was exchanged between collage_neuron.compile and "
                "the first step (model.to(memory_format=...), share_memory(), p.data = ...): training starts from the "
                "bf16 values that are there now, and not from what compile kept in low words; compile after that",
                stacklevel=5,
            )
            return


@torch.no_grad()
def _drop_stale_of_states(optimizer: Optimizer, ours: Bookkeeping) -> None:
    """The low words of states that were written in place or exchanged, or are new here (loaded, copied, compiled)."""
    written = _check_codes(optimizer, ours)
    for p, name, coded in written:
        if coded or optimizer.state[p][name].numel() != p.numel():
            continue  # the step raises
        _shape_alike(optimizer.state[p], name, _format(optimizer, p, name))
        stale = ~belongs(optimizer, p, name)
        if stale.any():
            _reset(optimizer, p, _format(optimizer, p, name), stale, name)
    if written:
        _note_states(_named(optimizer), ours)


def _shape_alike(state: dict[str, Any], name: str, fmt: Format) -> None:
    """Gives the further words of a state the shape of its first one, which may have been exchanged for another."""
    for key in fmt.keys(name)[1:]:
        if state[key].shape != state[name].shape and state[key].numel() == state[name].numel():
            state[key] = state[key].reshape(state[name].shape)


def check_codes(optimizer: Optimizer) -> None:
    """Raises ValueError if other code wrote the codes of a state since the last step."""
    _check_codes(optimizer, bookkeeping(optimizer))


def _check_codes(optimizer: Optimizer, ours: Bookkeeping) -> list[tuple[torch.Tensor, str, bool]]:
    """The same; returns the states that were written or are new, and True for those that hold codes."""
    marks = ours.marks.states
    written = [
        (p, name, name in names.coded)
        for p, highs, names in _watched_states(_named(optimizer))
        for name, high in highs
        if not _is_noted(marks.get(p, {}).get(name), high)
    ]
    for p, name in [(p, name) for p, name, coded in written if coded]:
        noted, record = marks.get(p, {}).get(name), kept_formats.of(optimizer, p)
        codes.check_unwritten(p, name, optimizer.state[p][name], noted, record)
    return written


def _is_noted(noted: tuple[torch.Tensor, int] | None, high: torch.Tensor) -> bool:
    return noted is not None and noted[0] is high and noted[1] == version(high)


def _written(ours: Bookkeeping) -> dict[torch.Tensor, str]:
    """Parameters whose low words may not be theirs, and what happened last to them."""
    return ours.moved() | {p: what for p, (what, _) in ours.marks.params.items() if what == LOADED}


def _format(optimizer: Optimizer, p: torch.Tensor, name: str = "param") -> Format:
    """The format that `p`, or its state `name`, is kept in; a user may have cast the words of a state."""
    return kept_format(p, optimizer.state.get(p, {}), name, kept_formats.of(optimizer, p))


def _split_among(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> dict[torch.Tensor, Format]:
    """The formats of those of `params` that are kept in several words, all as their formats have them."""
    found = steady.of(optimizer)
    known = (
        _split_formats(optimizer, params)
        if found is None
        else found.structure.once("split formats", lambda: _split_formats(optimizer, found.owners))
    )
    return {p: known[id(p)] for p in params if id(p) in known}


def _split_formats(optimizer: Optimizer, params: Iterable[torch.Tensor]) -> dict[int, Format]:
    """The same by the ids of parameters."""
    split = {}
    for p in params:
        fmt, state = _format(optimizer, p), optimizer.state.get(p, {})
        if len(fmt.components) > 1 and is_stored(p, state, "param", fmt, kept_formats.of(optimizer, p)):
            split[id(p)] = fmt
    return split


def _reset_at_once(
    optimizer: Optimizer, split: Mapping[torch.Tensor, Format], written: Mapping[torch.Tensor, str]
) -> dict[torch.Tensor, str]:
    """Resets what a backend can for all parameters at once; of those that are split, returns the others."""
    left, rest = {id(p) for p in split if written[p] == STEPPED}, {p: written[p] for p in split}
    parts: dict[tuple[Backend, Format], dict[torch.Tensor, dict[str, Any]]] = {}
    for group in optimizer.param_groups:
        choice = Settings.of(group).backend
        for p in (p for p in group["params"] if id(p) in left and p.is_cpu):
            backend, fmt = _backend(choice, p.device), split[p]
            if backend is not None and fitting_words.may_take(backend, p, fmt):
                parts.setdefault((backend, fmt), {})[p] = optimizer.state[p]
                rest.pop(p, None)
    for (backend, fmt), states in parts.items():
        fitting_words.reset(backend, fmt, states)
    return rest


def _backend(choice: str, device: torch.device) -> Backend | None:
    """The backend that runs updates there; None if it cannot, which is an error in a step only (a model that moved)."""
    try:
        return choose(choice, device)
    except ValueError:
        return None


def belongs(optimizer: Optimizer, p: torch.Tensor, name: str = "param") -> torch.Tensor:
    """Where the value kept for `p` (or its state `name`) is within half a bf16 ulp of its first word; on the CPU."""
    # On the CPU, where every rounding is a real cast. The same as an update is in `fitting_words`.
    words = {k: v for k, v in optimizer.state[p].items() if str(k).startswith(name) and isinstance(v, torch.Tensor)}
    state = {k: local(v).cpu() for k, v in words.items()}
    hi = local(p.detach()).cpu() if name == "param" else state[name]
    if name + MASTER in state:
        # Not `read_exact`, which gives the high word wherever the master is another's.
        return (state[name + MASTER].bfloat16() == hi) | ~hi.isfinite()
    gap = read_exact(hi, state, name, kept_formats.of(optimizer, p)) - hi.float()
    rounded = (hi.float() + gap * SHORTER).bfloat16()
    # The high word of a state stops at the largest number (`split_capped`), and the sum may go on from there.
    return (rounded.clamp(-LARGEST, LARGEST) == hi) | ~hi.isfinite()


@torch.no_grad()
def without_stale(optimizer: Optimizer, p: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`value`, the sum of the words of `p`, but of its high word alone where the next step would drop the low one.

    Nothing is dropped yet: other weights may be there for a moment only (an average, for an evaluation).
    """
    if is_written(optimizer, p):
        what, _ = bookkeeping(optimizer).marks.params[p]
        high, own = local(p.detach()).float(), local(value)
        kept = belongs(optimizer, p).to(own.device) if what != FRESH or is_sharded(p) else torch.zeros_like(own).bool()
        own.copy_(torch.where(kept, own, high))
    return value


def _reset(optimizer: Optimizer, p: torch.Tensor, fmt: Format, where: torch.Tensor, name: str = "param") -> None:
    """Makes the elements in the mask of `p`, or of its state `name`, exactly what the high word says."""
    high = local(p.detach() if name == "param" else optimizer.state[p][name])
    words = zip(fmt.keys(name)[1:], fmt.encoder(name)(high.cpu().float().bfloat16().float())[1:], strict=True)
    for key, word in words:
        low = local(optimizer.state[p][key])
        low.copy_(torch.where(where, word, low.cpu()))
