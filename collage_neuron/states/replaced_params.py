"""Parameters that are replaced or converted after `compile`: moves their low words along, or makes the step raise.

Moving a model to an XLA device makes new parameters, and the code that moves it (accelerate's `prepare`) puts them into
the optimizer's groups. torch's own optimizers have no state at that point, but ours have low words: before the first
step, a new parameter takes over the low words of the one that it replaces.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.states import external_writes, low_words, reduced_states, state_writes, step_inventory
from collage_neuron.states.bookkeeping import bookkeeping, noted_words, params_of
from collage_neuron.states.format_record import record_of
from collage_neuron.states.inner_optimizers import inner_of
from collage_neuron.states.sharding import check_placements, local
from collage_neuron.states.state_keys import (
    is_component,
    is_shared_word,
    name_of,
    names_in,
    shared_suffixes,
    split_params,
    split_words,
    suffixes,
    words_of,
)
from collage_neuron.states.store import is_host_scalar, kept_format


def remember(optimizer: Optimizer) -> None:
    """Remembers the parameters of `optimizer`, which has just been compiled."""
    book = bookkeeping(optimizer)
    book.compiled_with = [list(group["params"]) for group in optimizer.param_groups]
    book.narrow = _narrow(optimizer)


def _narrow(optimizer: Optimizer) -> set[torch.Tensor]:
    return {p for p in params_of(optimizer) if p.dtype == torch.bfloat16}


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


def forget(optimizer: Optimizer) -> None:
    """Called after the first step, from which on parameters may not be replaced."""
    bookkeeping(optimizer).compiled_with = []
    bookkeeping(optimizer).narrow = step_inventory.once(optimizer, "narrow", lambda: _narrow(optimizer))


def check_same(optimizer: Optimizer, params: Sequence[torch.Tensor], places: Iterable[object]) -> None:
    """Raises for a parameter that was converted to fp32, or got another shape, since it was compiled or stepped.

    Warns of one that compile left in fp32 and that was converted to bf16.

    `places` say in words where the parameters are.
    """
    book, in_step = bookkeeping(optimizer), step_inventory.of(optimizer)
    known = {} if in_step is None else in_step.structure.known
    # If it is the set that an earlier step made of parameters of these types, none can have been converted since.
    same: set[int] = known.setdefault("same", set()) if known.get("narrow") is book.narrow else set()
    if same.issuperset(map(id, params)):
        return
    for p, where in zip(params, places, strict=True):
        check_converted([p], [where], book.narrow)
        if p.dtype == torch.bfloat16 and p in book.fp32:
            warn_user(
                f"{where} was left in float32 by compile, and is bfloat16 now, as others may be: "
                "model.to(torch.bfloat16) or model.bfloat16() has rounded it, and its low word starts at zero. Leave "
                "that call out after compile"
            )
            book.fp32 = {q for q in book.fp32 if q.dtype == torch.float32}  # one warning for all
        state = optimizer.state.get(p, {})
        for key, value in state.items():
            unlike = isinstance(value, torch.Tensor) and value.shape != p.shape and value.dim() > 0
            unlike = unlike and not is_shared_word(key, state)
            check_placements(p, value, f"{key!r} of {where}")
            if unlike and not reduced_states.may_be_state(name_of(key, state), value, p, book):
                raise _of_another_shape(where, key, value, _has_its_shape(state, p))
    same.update(map(id, params))


def check_words(optimizer: Optimizer) -> None:
    """Raises for a parameter that got another shape than its low words: all that is asked of a step as written."""
    step_inventory.once(optimizer, "cut", partial(_check_words, optimizer))


def _check_words(optimizer: Optimizer) -> None:
    shared = tuple(shared_suffixes())
    for p, words in split_words(optimizer.state).items():
        for key, word in words.items():
            if word.shape != p.shape and not key.endswith(shared):
                raise _of_another_shape(f"a parameter of shape {list(p.shape)}", key, word, False)


def _has_its_shape(state: Mapping[str, Any], p: torch.Tensor) -> bool:
    """Returns True if a state has the shape of the parameter, which is then what it was."""
    return any(isinstance(x, torch.Tensor) and x.dim() > 0 and x.shape == p.shape for x in state.values())


def _of_another_shape(where: object, key: str, value: torch.Tensor, is_set: bool) -> ValueError:
    if is_set:
        return ValueError(
            f"{where} has a state {key!r} of another shape, {list(value.shape)}, which step() does not make so: other "
            "code has set it. Nothing was updated: keep it in a list or dictionary, in the state or elsewhere, or give "
            "it the parameter's shape"
        )
    return ValueError(
        f"{where} has another shape than its state {key!r}, {list(value.shape)}: it was exchanged, or cut by a wrapper "
        "(FullyShardedDataParallel). Nothing was updated: wrap the model first, and compile after that; to change the "
        "shape, give the optimizer a new parameter"
    )


def check_converted(params: Sequence[torch.Tensor], places: Iterable[object], narrow: Container[torch.Tensor]) -> None:
    """Raises for a parameter in fp32 that is among the `narrow` ones: it was bf16 before."""
    if torch.float32 not in map(attrgetter("dtype"), params):
        return
    for p, where in zip(params, places, strict=True):
        if p.dtype == torch.float32 and p in narrow:
            raise TypeError(
                f"{where} is float32 now and was bfloat16 before: model.float() or a wrapper that keeps "
                "float32 copies of its own has converted it. Nothing was updated: convert the model back "
                "(model.to(torch.bfloat16)), or compile the optimizer again, which splits the float32 values"
            )
