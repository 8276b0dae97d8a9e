"""Parameters that are replaced after `compile`: moves their states and low words along.

Moving a model to an XLA device makes new parameters, and the code that moves it (accelerate's `prepare`) puts them into
the optimizer's groups. torch's own optimizers have no state at that point, but ours have low words: before the first
step, a new parameter takes over the low words of the one that it replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.numerics.formats import is_component, shared_suffixes, suffixes
from collage_neuron.states import external_writes, low_words, state_writes
from collage_neuron.states.bookkeeping import bookkeeping, params_of
from collage_neuron.states.inner_optimizers import inner_of
from collage_neuron.states.living_optimizers import noted_words
from collage_neuron.states.sharding import local
from collage_neuron.states.state_keys import is_host_scalar, names_in, split_params, words_of
from collage_neuron.states.store import kept_format, record_of


def follow(optimizer: Optimizer) -> None:
    """Moves the state of each replaced parameter to the parameter that is in its place now."""
    book = bookkeeping(optimizer)
    # Not those that have only moved: a parameter may have been taken out of a group, put into another, or in between.
    there, before = set(map(id, params_of(optimizer))), set(map(id, chain.from_iterable(book.compiled_with)))
    for params, group in zip(book.compiled_with, optimizer.param_groups, strict=False):
        for i, (old, new) in enumerate(zip(params, group["params"], strict=False)):
            is_replaced = id(old) not in there and id(new) not in before
            if is_replaced and old in optimizer.state and new.shape == old.shape:
                params[i] = new
                state = optimizer.state.pop(old)
                optimizer.state[new] = {
                    k: v if is_host_scalar(v, old) and not is_component(k, state) else v.to(new.device)
                    for k, v in state.items()
                }
                low = book.marks.params.pop(old, None)
                if old in book.formats:
                    book.formats[new] = book.formats.pop(old)
                external_writes.remember_replaced(optimizer, old, low, new)
                for each in inner_of(optimizer):
                    if old in each.optimizer.state:  # the same object if `state` is
                        each.optimizer.state[new] = each.optimizer.state.pop(old)
                if old in book.narrow:
                    book.narrow.add(new)


def settle_moved(optimizer: Optimizer) -> None:
    """Drops low words that other code has moved to a new parameter, with the state of an earlier one.

    They count where they belong to the values of the new one.
    """
    for p in moved(optimizer):
        state = optimizer.state[p]
        dropped = [key for name in ("param", *names_in(state).split) for key in _of_another(p, name, state)]
        for key in dropped:
            del state[key]
        dropped = dropped or _drop_of_another(optimizer, p)
        if dropped:
            warn_user(
                f"a new parameter of shape {list(p.shape)} has the state of an earlier one, with low words that are "
                f"not its own ({', '.join(dropped)}), which were dropped: training continues from the values that the "
                f"parameter and its states have in {p.dtype}. To lose nothing, make new parameters in float32 of "
                "collage_neuron.exact_value, and compile the optimizer again"
            )
        external_writes.remember(optimizer, p, external_writes.STEPPED)


@torch.no_grad()
def _drop_of_another(optimizer: Optimizer, p: torch.Tensor) -> list[str]:
    """Resets low words that came with the state of another parameter, where `p` has other bits; the keys, if any."""
    words, noted = words_of(optimizer.state[p]), noted_words()
    for x, q, low in (noted[id(word)] for word in words.values() if id(word) in noted):
        if q.shape == p.shape and q.dtype == p.dtype == torch.bfloat16 and low.is_of(q):
            low_words.note_as(optimizer, p, low, record_of(x, q))
            differ = local(p.detach()).cpu().view(torch.int16) != local(q.detach()).cpu().view(torch.int16)
            if differ.any():
                state_writes.reset_where(
                    p,
                    optimizer.state[p],
                    "param",
                    kept_format(p, optimizer.state[p], "param", record_of(optimizer, p)),
                    differ,
                )
                return list(words)
            return []
    return []


def moved(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters with low words that nobody has noted: those of loads, copies and of `compile` are."""
    noted = bookkeeping(optimizer).marks.params
    return [p for p in split_params(optimizer.state) if p not in noted]


def _of_another(p: torch.Tensor, name: str, state: Mapping[str, Any]) -> list[str]:
    """The low words of a value that has another shape, or is in fp32 and has none."""
    first = p if name == "param" else state[name]
    words = [key for suffix in suffixes() - shared_suffixes() if (key := name + suffix) in state]
    is_other = (name == "param" and p.dtype == torch.float32) or any(state[k].shape != first.shape for k in words)
    return words if is_other else []
