"""States whose words are shared by blocks, in checkpoints: their fp32 values, shaped and sharded like the parameter.

Blocks are those of the shard that a process has. Values can be sharded in another way, or read by plain torch, and
loading encodes them in the blocks that are there then: the same bits where blocks stay whole, and otherwise within one
rounding of the format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.states import kept_formats
from collage_neuron.states.names import is_shared_word, names_in
from collage_neuron.states.store import State, read_fp32

PLACEHOLDER = 0
"""What stands for a shared word in a checkpoint.

torch.distributed.checkpoint reads a flattened state by the keys of the live one (`_unflatten_optim_state_dict`), so
each of them must be there.
"""


def show(optimizer: Optimizer, packed: dict[str, Any]) -> None:
    """Replaces the words of coded states in what `Optimizer.state_dict` returned by their values."""
    ids = (i for group in packed["param_groups"] for i in group["params"])
    params = (p for group in optimizer.param_groups for p in group["params"])
    for i, p in zip(ids, params, strict=True):
        state = packed["state"].get(i)
        if isinstance(state, Mapping) and names_in(state).coded:
            packed["state"][i] = _shown(optimizer, p, state)  # a new one: torch's is the live state itself


@torch.no_grad()
def _shown(optimizer: Optimizer, p: torch.Tensor, state: Mapping[str, Any]) -> State:
    record, coded = kept_formats.of(optimizer, p), names_in(state).coded
    shown: State = {key: PLACEHOLDER if is_shared_word(key, state) else value for key, value in state.items()}
    for name in coded:
        shown[name] = read_fp32(p, state, name, record).to(p.device)
    return shown


def drop_placeholders(states: Iterable[State]) -> None:
    """Removes what stands for shared words in states that were loaded."""
    for state in states:
        for key in [k for k, v in state.items() if not isinstance(v, torch.Tensor) and is_shared_word(k, state)]:
            del state[key]
