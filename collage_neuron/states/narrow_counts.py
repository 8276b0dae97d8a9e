"""Counts that other code keeps in bf16 or fp16 (`step` in checkpoints of older libraries) become fp32.

A count of bf16 stands still at 256 and one of fp16 at 2048, since adding 1 to those rounds back. Counts are 0-d states;
which of those of a 0-d parameter are counts is found out later (`zero_dim`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.states import steady

ENDS = {torch.bfloat16: 2.0**8, torch.float16: 2.0**11}
"""By the type of a count, where it stands still."""

Place = tuple[dict[str, Any], str]
"""A state and a key in it."""


def widen(optimizer: Optimizer, seen: steady.Seen | None = None) -> bool:
    """Makes such counts fp32, and warns of those that may stand still; returns True if there were any.

    `seen` is what the step in progress has found, if it did.
    """
    if seen is None:
        places = [(state, key) for p, state in optimizer.state.items() for key in _narrow(p, state)]
    else:
        known = seen.structure.once("narrow counts", lambda: _places(seen))
        places = [(seen.states[i], key) for i, key in known]
    if places:
        _tell(optimizer, places)
        for state, key in places:
            state[key] = state[key].float()
    return bool(places)


def _places(seen: steady.Seen) -> list[tuple[int, str]]:
    """Where such counts are: the place of the state and the key."""
    pairs = enumerate(zip(seen.owners, seen.states, strict=True))
    return [(i, key) for i, (p, state) in pairs for key in _narrow(p, state)]


def _narrow(p: Any, state: Any) -> Iterable[str]:
    if not isinstance(p, torch.Tensor) or not p.dim() or not isinstance(state, Mapping):
        return ()
    return [k for k, v in state.items() if isinstance(v, torch.Tensor) and not v.dim() and v.dtype in ENDS]


def _tell(optimizer: Optimizer, places: Iterable[Place]) -> None:
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
