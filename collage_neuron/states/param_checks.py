"""Checks that parameters are what they were when their optimizer was compiled: not converted, and of the same shape."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.numerics.formats import shared_suffixes
from collage_neuron.states import step_inventory, visible_states
from collage_neuron.states.bookkeeping import bookkeeping, params_of
from collage_neuron.states.sharding import check_placements
from collage_neuron.states.state_keys import is_shared_word, name_of, split_words


def remember(optimizer: Optimizer) -> None:
    """Remembers the parameters of `optimizer`, which has just been compiled."""
    book = bookkeeping(optimizer)
    book.compiled_with = [list(group["params"]) for group in optimizer.param_groups]
    book.narrow = _narrow(optimizer)


def _narrow(optimizer: Optimizer) -> set[torch.Tensor]:
    return {p for p in params_of(optimizer) if p.dtype == torch.bfloat16}


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
            if unlike and not visible_states.may_be_state(name_of(key, state), value, p, book):
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
