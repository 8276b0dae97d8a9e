"""Classifies what is in a state: the optimizer's own keys, further words of a state or of the parameter, and values.

Which key is what depends on names only, and all parameters of a group have the same names, so it is computed once for
equal names. Which states are values that are stored in formats, and which are kept as the optimizer made them, depends
on the tensors too: every tensor that a captured step updates is a value, and a step as written (`eager`) may leave
anything in a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from collage_neuron.numerics.formats import is_component, shared_suffixes, suffixes
from collage_neuron.states.sharding import is_sharded_like


@dataclass(frozen=True)
class Names:
    """The keys of one parameter's state, by kind."""

    own: tuple[Any, ...]
    """Keys of the optimizer's own code, in its order; those that are not text hold no value (`eager/commit.py`)."""
    split: tuple[str, ...]
    """Keys that have a low word (a further word of each element); a key that is one itself is not excluded."""
    coded: frozenset[str]
    """Keys that have a word which blocks of elements share: their first word is a code, and not a number."""
    watched: tuple[str, ...]
    """Keys that are `split` or `coded`: what other code writes into them is looked for."""
    words: tuple[str, ...]
    """Keys of the parameter's further words."""


def name_of(key: Any, state: Iterable[Any]) -> Any:
    """The name of the state, or `param`, of which `key` is a word."""
    if not is_component(key, state):
        return key
    stems = (key[: -len(s)] for s in suffixes() if key.endswith(s))
    return next(stem for stem in stems if stem == "param" or stem in state)


def is_shared_word(key: Any, state: Iterable[Any]) -> bool:
    """Returns True if `key` is a word that blocks of elements share, and so does not have the parameter's shape."""
    return is_component(key, state) and key.endswith(tuple(shared_suffixes()))


def names_in(state: Mapping[str, Any]) -> Names:
    """The names of the states and words in `state`."""
    return _classified(tuple(state), suffixes(), shared_suffixes())


def words_of(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The further words of the parameter with this state, by key."""
    return {key: state[key] for key in names_in(state).words}


def split_params(states: Mapping[Any, Any]) -> set[torch.Tensor]:
    """The parameters with a further word in `optimizer.state`."""
    return set(split_words(states))


def split_words(states: Mapping[Any, Any]) -> dict[torch.Tensor, dict[str, torch.Tensor]]:
    """The parameters with a further word in `optimizer.state`, each with these words."""
    endings, shared = suffixes(), shared_suffixes()  # asked once for all
    params = ((p, state) for p, state in states.items() if isinstance(p, torch.Tensor))
    words = ((p, state, _classified(tuple(state), endings, shared).words) for p, state in params)
    return {p: {key: state[key] for key in keys} for p, state, keys in words if keys}


@lru_cache(4096)
def _classified(keys: tuple[Any, ...], endings: frozenset[str], shared: frozenset[str]) -> Names:
    texts = [key for key in keys if isinstance(key, str)]
    split = tuple(key for key in texts if any(key + suffix in keys for suffix in endings - shared))
    coded = frozenset(key for key in texts if any(key + suffix in keys for suffix in shared))
    return Names(
        tuple(key for key in keys if not is_component(key, keys)),
        split,
        coded,
        tuple(key for key in keys if key in {*split, *coded}),
        tuple(key for key in ("param" + suffix for suffix in endings) if key in keys),
    )


# --- values -----------------------------------------------------------------------------------------------------------


def is_host_scalar(value: object, p: torch.Tensor) -> bool:
    """Returns True if a state is a number, or a 0-d tensor that counts (`step`), and not a tensor shaped like `p`.

    For a 0-d parameter, all states are 0-d. Those of its shape are in bf16, and numbers never are (`settle`); a state
    that a format keeps in fp32 counts as a number until a step is recorded (`trace.recorded`).
    """
    if not isinstance(value, torch.Tensor):
        return True
    return value.dim() == 0 and (p.dim() != 0 or value.dtype != torch.bfloat16)


def is_value(x: object, p: torch.Tensor) -> bool:
    """Returns True for a state that a step as written stores in a format: fp32 or bf16, in the parameter's shape.

    A single number of fp32 is kept as it is, since it may count; one of bf16 is a word. float64, float16, another
    device (a state on the host) and other placements than those of a parameter in shards were chosen by the
    optimizer's author.
    """
    if not isinstance(x, torch.Tensor) or not _is_alike(x, p) or x.device != p.device or not is_sharded_like(x, p):
        return False
    return x.numel() != 1 or x.dtype == torch.bfloat16


def values_in(state: Mapping[str, Any], p: torch.Tensor, record: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the states of `p` that are values now; captured steps, whose formats are recorded, have more."""
    names = names_in(state)
    recorded = {
        k for k in names.own if k in record and _is_of_elements(state[k], p) and state[k].dim() >= min(p.dim(), 1)
    }
    texts = (k for k in names.own if isinstance(k, str))
    return tuple(k for k in texts if k in names.watched or k in recorded or is_value(state[k], p))


def may_be_read(state: Mapping[Any, Any], name: Any, p: torch.Tensor, record: Mapping[str, str]) -> bool:
    """Returns True for a state with a value in fp32: one that is stored in words, or is a word of its shape."""
    is_recorded = name in record and _is_of_elements(state[name], p)
    return isinstance(name, str) and (name in names_in(state).watched or is_recorded or _is_alike(state[name], p))


def _is_of_elements(x: object, p: torch.Tensor) -> bool:
    """Returns True for a word of each element of `p`, in any shape: captured steps keep states in other shapes too."""
    return isinstance(x, torch.Tensor) and x.numel() == p.numel() and _is_alike(x, x)


def _is_alike(x: object, p: torch.Tensor) -> bool:
    return (
        isinstance(x, torch.Tensor)
        and x.shape == p.shape
        and x.dtype in (torch.float32, torch.bfloat16)
        and x.layout is torch.strided
    )
