"""Step counts that would go wrong: those that are kept in bf16 or fp16 become fp32, and shared ones are rejected.

Checkpoints of older libraries have `step` in bf16. A count of bf16 stands still at 256 and one of fp16 at 2048, since
adding 1 to those rounds back. Counts are 0-d states; which of those of a 0-d parameter are counts is found out later
(`trace/recorded_step.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from itertools import chain, compress
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.states import step_inventory

ENDS = {torch.bfloat16: 2.0**8, torch.float16: 2.0**11}
"""By the type of a count, where it stands still."""

Place = tuple[dict[str, Any], str]
"""A state and a key in it."""


def widen(optimizer: Optimizer) -> bool:
    """Makes such counts fp32, and warns of those that may stand still; returns True if there were any."""
    if not step_inventory.once(optimizer, "narrow counts", lambda: bool(_places(optimizer))):
        return False
    places = _places(optimizer)
    _warn(optimizer, places)
    for state, key in places:
        state[key] = state[key].float()
    return True


def _places(optimizer: Optimizer) -> list[Place]:
    return [(state, key) for p, state in optimizer.state.items() for key in _narrow(p, state)]


def _narrow(p: Any, state: Any) -> Iterable[str]:
    if not isinstance(p, torch.Tensor) or not p.dim() or not isinstance(state, Mapping):
        return ()
    return [k for k, v in state.items() if isinstance(v, torch.Tensor) and not v.dim() and v.dtype in ENDS]


def _warn(optimizer: Optimizer, places: Iterable[Place]) -> None:
    """Warns of the largest count that has come to where its type ends."""
    ended = [(float(s[k]), k, s[k].dtype) for s, k in places if float(s[k]) >= ENDS[s[k].dtype]]
    if ended:
        value, key, dtype = max(ended, key=lambda of: of[0])
        warnings.warn(
            f"the state {key!r} of {len(ended)} parameters of this {type(optimizer).__name__} was kept in {dtype}, "
            f"which cannot count beyond {ENDS[dtype]:g}, and is {value:g}: it counts in float32 from here on. If more "
            f"steps than that were taken, set optimizer.state[p][{key!r}] of each parameter to their number",
            stacklevel=3,
        )


def check_unshared(optimizer: Optimizer) -> None:
    """Raises ValueError if two states of an optimizer of torch hold one 0-d tensor: each step would count twice."""
    if (in_step := step_inventory.of(optimizer)) is None:
        return
    values = list(chain.from_iterable(map(dict.values, in_step.states)))
    places = in_step.structure.once(
        "counts", lambda: tuple(isinstance(x, torch.Tensor) and not x.dim() for x in values)
    )
    counts = list(map(id, compress(values, places)))
    if len(counts) == len(set(counts)):
        return
    name = next(k for state in in_step.states for k, x in state.items() if id(x) in counts and counts.count(id(x)) > 1)
    raise ValueError(
        f"two states hold one tensor as {name!r}, and {type(optimizer).__name__} would advance it once for each of "
        f"them in every step; nothing was updated: give each state its own (state[{name!r}] = state[{name!r}].clone())"
    )
