"""States without a value for each element: of one number (NovoGrad's second moment), of rows or columns (Adafactor's).

They are fp32, in the shapes in which the optimizer makes them.

A 0-d tensor in a state is a number of the host otherwise (`step`), and looks the same. A step distinguishes them: a
state to which it writes tensors, or that it makes of them, is one of these. What was found is kept by name, for
parameters with dimensions (`Bookkeeping.small`). All states of a 0-d parameter are 0-d; which of those are counts is
found out later (`trace/recorded_step.py`).

Counts that would go wrong: those that are kept in bf16 or fp16, as checkpoints of older libraries have `step`, become
fp32, and shared ones are rejected. A count of bf16 stands still at 256 and one of fp16 at 2048, since adding 1 to those
rounds back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate, warn_user
from collage_neuron.passes.ir.update import Captured
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import Bookkeeping
from collage_neuron.states.sharding import ORDINARY

BYTES = 4
"""The size of each number."""


def may_be(x: object) -> bool:
    """Returns True for a 0-d tensor in fp32, or in bf16, as torch loads it for bf16 parameters."""
    return isinstance(x, Tensor) and not x.dim() and x.dtype in (torch.float32, torch.bfloat16)


def may_be_of_rows(x: object, p: Tensor) -> bool:
    """Returns True for a tensor that may be a state of rows or columns: its shape is a part of that of `p`."""
    if not isinstance(x, Tensor) or not 0 < x.dim() <= p.dim() or p.dim() < 2 or x.shape == p.shape:
        return False
    sizes = iter(p.shape)
    return all(n in sizes for n in x.shape if n != 1)  # in order: each is looked for after the one before


def may_be_of_view(x: object, p: Tensor) -> bool:
    """Returns True for a tensor that may be a state of another shape of `p`, or of its rows (`Captured.seen_as`)."""
    if not isinstance(x, Tensor) or not x.dim() or not p.dim() or x.shape == p.shape or not x.numel():
        return False
    return p.numel() % x.numel() == 0


def learn(book: Bookkeeping, captured: Captured) -> None:
    """Remembers the names of the states of an update that have other shapes than their parameter."""
    book.small.update(captured.small)
    book.seen_as.update(captured.shapes if captured.seen_as is None else {*captured.shapes, *captured.small})


def may_be_state(name: str, x: Tensor, p: Tensor, book: Bookkeeping) -> bool:
    """Returns True if a state of a name that is known may have the shape that `x` has, which is not that of `p`."""
    of_rows = name in book.small and may_be_of_rows(x, p)
    return of_rows or (name in book.seen_as and may_be_of_view(x, p))


def _start(x: object, name: str, p: Tensor, captured: Captured) -> Any:
    """What such a state begins with: what is there, in any floating-point dtype, or what the step makes."""
    if not isinstance(x, Tensor):
        return captured.fresh.get(name, 0.0)
    shape = captured.shape_of(name, p.shape)
    with suppress(RuntimeError):
        if x.is_floating_point():
            return x.expand(shape)
    raise UnsupportedUpdate(
        f"optimizer.state[p][{name!r}] is a tensor in {x.dtype} of shape {list(x.shape)}, and the step computes one of "
        f"shape {list(shape)}; nothing was updated: give it that shape, or delete it"
    )


def bytes_of(captured: Captured, params: Sequence[Tensor]) -> dict[str, int]:
    """Bytes of these states, by name."""
    return {name: BYTES * sum(math.prod(captured.shape_of(name, p.shape)) for p in params) for name in captured.small}


def ensure(optimizer: Optimizer, params: Sequence[Tensor], captured: Captured) -> None:
    """Creates the states of one number that `params` do not have yet, and moves others to fp32 on their device.

    Raises:
        UnsupportedUpdate: there is a state of another shape.
    """
    for p in params if captured.small else ():
        state = optimizer.state[p]
        for name in captured.small:
            old, shape = state.get(name), captured.shape_of(name, p.shape)
            if not _is_kept(old, p, shape):
                step_inventory.changed(optimizer)
                start = torch.as_tensor(_start(old, name, p, captured), dtype=torch.float32, device=p.device)
                state[name] = start.expand(shape).clone(memory_format=torch.contiguous_format)


def _is_kept(x: Any, p: Tensor, shape: tuple[int, ...]) -> bool:
    """Returns True for a state that the step can write as it is; not for one number that is shown as many."""
    if type(x) not in ORDINARY or x.dtype != torch.float32 or x.device != p.device or x.shape != shape:
        return False
    return 0 not in x.stride() or x.is_contiguous()


def states_of(states: Sequence[Mapping[str, Any]], captured: Captured) -> list[dict[str, Tensor]]:
    """The states of one number of each parameter, by name."""
    return [{name: state[name] for name in captured.small} for state in states] if captured.small else []


# --- counts -----------------------------------------------------------------------------------------------------------


ENDS = {torch.bfloat16: 2.0**8, torch.float16: 2.0**11}
"""By the type of a count, where it stands still."""

Place = tuple[MutableMapping[str, Any], str]
"""A state and a key in it."""


def widen_counts(optimizer: Optimizer) -> None:
    """Makes such counts fp32, and warns of the largest of those that have come to where their type ends."""
    places = narrow_counts(optimizer)
    ended = [(float(s[k]), k, s[k].dtype) for s, k in places if float(s[k]) >= ENDS[s[k].dtype]]
    if ended:
        value, key, dtype = max(ended, key=lambda of: of[0])
        warn_user(
            f"the state {key!r} of {len(ended)} parameters of this {type(optimizer).__name__} was kept in {dtype}, "
            f"which cannot count beyond {ENDS[dtype]:g}, and is {value:g}: it counts in float32 from here on. If more "
            f"steps than that were taken, set optimizer.state[p][{key!r}] of each parameter to their number"
        )
    for state, key in places:
        state[key] = state[key].float()


def narrow_counts(optimizer: Optimizer) -> list[Place]:
    """Where there are such counts."""
    found: Mapping[Any, Any] = optimizer.state
    states = [x for p, x in found.items() if isinstance(p, Tensor) and p.dim() and isinstance(x, MutableMapping)]
    return [(x, k) for x in states for k, v in x.items() if isinstance(v, Tensor) and not v.dim() and v.dtype in ENDS]
