"""States that other code wrote between steps: what becomes of their low words and codes.

The low words of states that were written or exchanged are kept where hi + lo rounds to hi. The codes of states whose
words blocks share are integers, on which arithmetic means nothing: `state["exp_avg"].fill_(1e-4)` makes integer codes
0, and `mul_(2)` of a fourth root is a factor of 16; torch raises for few such writes. Nobody can tell what was meant,
so the next step raises, and so do checkpoints and copies. A tensor of values that is assigned has another type, and is
encoded (`store.kept_format`). Codes that were moved or copied are as they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.numerics.eft import round_to, widen
from collage_neuron.numerics.formats import MASTER, Format, format_named
from collage_neuron.states import word_encoding
from collage_neuron.states.bookkeeping import Split, bookkeeping
from collage_neuron.states.sharding import local, some_bits, version
from collage_neuron.states.state_keys import names_in
from collage_neuron.states.store import Record, kept_format, record_of

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


def kept_format_of(optimizer: Optimizer, p: torch.Tensor, name: str = "param") -> Format:
    """The format that `p`, or its state `name`, is kept in; a user may have cast the words of a state."""
    return kept_format(p, optimizer.state.get(p, {}), name, record_of(optimizer, p))


@torch.no_grad()
def drop_stale(optimizer: Optimizer) -> None:
    """Resets the low words of states that were written, where they do not fit."""
    written = check_codes(optimizer)
    for p, name, *_ in written:
        fmt, state = kept_format_of(optimizer, p, name), optimizer.state[p]
        keys = fmt.keys(name)
        if name in names_in(state).coded or any(state[key].numel() != p.numel() for key in keys):
            continue  # the step raises
        for key in keys[1:]:  # the first word may have been exchanged for one of another shape
            if state[key].shape != state[name].shape:
                state[key] = state[key].reshape(state[name].shape)
        stale = ~belongs(optimizer, p, name)
        if stale.any():
            reset_where(p, state, name, fmt, stale)
    if written:
        remember_states(optimizer)


def check_codes(optimizer: Optimizer) -> list[Written]:
    """Raises ValueError if other code wrote codes since the last step; returns the states that were written."""
    written, marks = list(_written_states(optimizer)), bookkeeping(optimizer).marks.states
    gone = [q for q in marks if q not in optimizer.state] if written else []  # whose states may be a new parameter's
    for p, name, high, noted in written:
        if name in names_in(optimizer.state[p]).coded and not _is_of_another(optimizer, p, name, high):
            if noted is not None:
                _check_unwritten(p, name, high, noted, record_of(optimizer, p))
            for q in [p] if noted is not None else [q for q in gone if name in marks[q]]:
                if name in record_of(optimizer, q):
                    _check_values(p, name, optimizer.state[p], marks[q][name][0], record_of(optimizer, q))
    return written


def _is_of_another(optimizer: Optimizer, p: torch.Tensor, name: str, high: torch.Tensor) -> bool:
    """Returns True for codes as they are in the state of another parameter, which has the same format."""
    of_all, record = bookkeeping(optimizer).marks.states.items(), record_of(optimizer, p)
    found = [q for q, names in of_all if name in names and names[name][0] is high and names[name][1] == version(high)]
    return any(q is not p and record_of(optimizer, q).get(name) == record.get(name) for q in found)


def _check_unwritten(p: torch.Tensor, name: str, now: torch.Tensor, noted: Noted, record: Mapping[str, str]) -> None:
    """Raises for codes that are not those that were noted with their version; values have another type."""
    before, its_version = noted
    if now.dtype == before.dtype and (version(before) != its_version or not torch.equal(on_host(now), on_host(before))):
        raise ValueError(
            f"the state {name!r} of a parameter of shape {list(p.shape)} was written between steps, and it holds codes "
            f"({record.get(name, 'of blocks')}, {now.dtype}), not values. Nothing was updated: {_INSTEAD.format(name)}"
        )


_INSTEAD = (
    "assign a floating-point tensor of values, optimizer.state[p][{!r}] = torch.zeros_like(p, dtype=torch.float32), "
    "which the next step encodes, or use optimizer.state_dict() and load_state_dict(), which hold values"
)


class Coded(NamedTuple):
    """A state in codes after a step, with some of its bits."""

    param: torch.Tensor
    name: str
    codes: torch.Tensor
    version: int
    bits: bytes


def some_codes(split: Split, states: Sequence[Mapping[str, Any]]) -> list[Coded]:
    """Up to four of the states in codes; none on devices."""
    some = [(split.owners[i], name, states[i][name]) for i, name in split.coded[:: 1 + len(split.coded) // 4]]
    return [Coded(*each, version(each[2]), some_bits(each[2])) for each in some]


UNCOUNTED = "codes were written"
"""In `Bookkeeping.told` once it was said."""


def warn_of_uncounted(optimizer: Optimizer, sample: Sequence[Coded]) -> None:
    """Warns, once, if codes were written, and torch has not counted that: `x.data.zero_()`, `x.data = y`.

    What a collective of torch.distributed brings is right, if it brings all words, and not counted either.
    """
    told = bookkeeping(optimizer).told
    for p, name, codes, then, bits in sample if UNCOUNTED not in told else ():
        is_there = dict.get(optimizer.state, p, {}).get(name) is codes and version(codes) == then
        if is_there and (now := some_bits(codes)) != bits and len(now) == len(bits):
            told.add(UNCOUNTED)
            warn_user(
                f"the state {name!r} of a parameter of shape {list(p.shape)} was written between steps, in a way that "
                f"torch does not count, and it holds codes ({codes.dtype}), which are read as such. If another process "
                f"has sent them, with the other words of the state, all is well; if values were written, it is not: "
                f"{_INSTEAD.format(name)}"
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
    pairs = torch.stack([on_host(values)[:rows].double(), on_host(codes)[:rows].double()]).flatten(1)
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


def on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU, or `x` itself; of a DTensor, the part of this process."""
    return local(x.detach()).cpu()


# --- words that belong together, as far as they tell: their sum rounds to the first one -------------------------------


SHORTER = 1 - 2**-8
"""A pair may end in a tie, which rounds to even and not to its high word. The gap between sum and high word is at most
8 bits long: by this factor, it is shortened by less than its last bit."""

LARGEST = torch.finfo(torch.bfloat16).max


def belongs(optimizer: Optimizer, p: torch.Tensor, name: str = "param") -> torch.Tensor:
    """Where the value kept for `p` (or its state `name`) is within half a bf16 ulp of its first word; on the CPU."""
    fmt, states = kept_format_of(optimizer, p, name), optimizer.state[p]
    # On the CPU, where every rounding is a real cast.
    hi, *low = (local(p.detach() if key == "param" else states[key]).cpu() for key in fmt.keys(name))
    fits: torch.Tensor = _fits(fmt, word_encoding.of_each(fmt, [hi, *low]), hi.float())
    return fits


def reset_where(p: torch.Tensor, state: Mapping[str, Any], name: str, fmt: Format, where: torch.Tensor) -> None:
    """Makes the elements in the mask of `p`, or of its state `name`, exactly what the high word says."""
    high = local(p.detach() if name == "param" else state[name])
    alone = fmt.encoder(name)(high.cpu().float().bfloat16().float())[1:]
    for key, word in zip(fmt.keys(name)[1:], alone, strict=True):
        low = local(state[key])
        low.copy_(torch.where(where, word, low.cpu()))


def _fits(fmt: Format, words: Sequence[Any], high: Any) -> Any:
    """Where the value of the words is within half a bf16 ulp of the high word, or this is not finite."""
    if MASTER in [component.suffix for component in fmt.components]:
        # Not decoded, which gives the high word wherever the master is another's.
        near = round_to(widen(words[1]), "bf16")
    else:
        # Not as a parameter is decoded, which gives what fits whatever the words are.
        near = round_to(high + (fmt.decode(words) - high) * SHORTER, "bf16")
        # The high word of a state stops at the largest number (`split_capped`), and the sum may go on from there.
        near = torch.where(near > LARGEST, LARGEST, torch.where(near < -LARGEST, -LARGEST, near))
    return torch.logical_or(near == high, torch.logical_not(torch.abs(high) <= LARGEST))
