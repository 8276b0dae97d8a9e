"""Parameters that are replaced or converted after `compile`: moves their low words along, or makes the step raise.

Moving a model to an XLA device makes new parameters, and the code that moves it (accelerate's `prepare`) puts them into
the optimizer's groups. torch's own optimizers have no state at that point, but ours have low words: before the first
step, a new parameter takes over the low words of the one that it replaces.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from operator import attrgetter

import torch
from torch.optim import Optimizer

from collage_neuron.errors import warn_user
from collage_neuron.states import external_writes, reduced_states, step_inventory
from collage_neuron.states.bookkeeping import bookkeeping, params_of
from collage_neuron.states.inner_optimizers import inner_of
from collage_neuron.states.state_keys import is_component, is_shared_word, name_of
from collage_neuron.states.store import is_host_scalar


def remember(optimizer: Optimizer) -> None:
    """Remembers the parameters of `optimizer`, which has just been compiled."""
    book = bookkeeping(optimizer)
    book.compiled_with = [list(group["params"]) for group in optimizer.param_groups]
    book.narrow = _narrow(optimizer)


def _narrow(optimizer: Optimizer) -> set[torch.Tensor]:
    return {p for p in params_of(optimizer) if p.dtype == torch.bfloat16}


def follow(optimizer: Optimizer) -> None:
    """Moves the state of each replaced parameter to the parameter that is in its place now."""
    for params, group in zip(bookkeeping(optimizer).compiled_with, optimizer.param_groups, strict=False):
        for i, (old, new) in enumerate(zip(params, group["params"], strict=False)):
            if old is not new and old in optimizer.state and new.shape == old.shape:
                params[i] = new
                state = optimizer.state.pop(old)
                optimizer.state[new] = {
                    k: v if is_host_scalar(v, old) and not is_component(k, state) else v.to(new.device)
                    for k, v in state.items()
                }
                external_writes.replace(optimizer, old, new)
                for each in inner_of(optimizer):
                    if old in each.optimizer.state:  # the same object if `state` is
                        each.optimizer.state[new] = each.optimizer.state.pop(old)
                if old in bookkeeping(optimizer).narrow:
                    bookkeeping(optimizer).narrow.add(new)


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
            if unlike and not reduced_states.may_be_state(name_of(key, state), value, p, book):
                raise ValueError(
                    f"{where} has another shape than its state {key!r}, {list(value.shape)}: it was "
                    "exchanged, or cut by a wrapper (FullyShardedDataParallel). Nothing was updated: wrap the model "
                    "first, and compile after that"
                )
    same.update(map(id, params))


def check_converted(params: Sequence[torch.Tensor], places: Iterable[object], narrow: Container[torch.Tensor]) -> None:
    """Raises for a parameter in fp32 that is among the `narrow` ones: it was bf16 before."""
    if torch.float32 not in map(_dtype, params):
        return
    for p, where in zip(params, places, strict=True):
        if p.dtype == torch.float32 and p in narrow:
            raise TypeError(
                f"{where} is float32 now and was bfloat16 before: model.float() or a wrapper that keeps "
                "float32 copies of its own has converted it. Nothing was updated: convert the model back "
                "(model.to(torch.bfloat16)), or compile the optimizer again, which splits the float32 values"
            )


_dtype = attrgetter("dtype")
