"""Names of states in a strategy's mapping: one that no parameter has a state of is a spelling mistake.

Optimizers that run Muon and Adam in one step have states that only some parameters have: one mapping names them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import bookkeeping

Names = frozenset[str]
Group = dict[str, Any]


def check_left(optimizer: Optimizer, shown: Mapping[torch.Tensor, Collection[str]]) -> None:
    """Checks a step as written before its results are stored; `shown` are the states of each parameter after it.

    Warns instead if there are parameters that have had no gradient so far, and may have such a state later.

    Raises:
        ValueError: a mapping names a state that no parameter of the groups with that mapping has.
    """
    for names, groups in unchecked(optimizer, [Settings.of(group).strategy for group in optimizer.param_groups]):
        params = [p for group in groups for p in group["params"]]
        states = dict.fromkeys(name for p in params for name in shown[p])
        if not names <= states.keys():
            if not any(p.requires_grad and p.grad is None and not shown[p] for p in params):
                raise ValueError(sentence(names, states))
            if all(p.grad is None for p in params):
                continue
            text = sentence(names, states)
            warnings.warn(f"{text}. Some parameters had no gradient so far: if none of them has it, it is misspelt",
                          stacklevel=2)  # fmt: skip
        bookkeeping(optimizer).named.add(names)


def check(
    optimizer: Optimizer,
    strategies: Sequence[StrategyLike],
    shown: Iterable[tuple[Group, Collection[str]]],
    in_step: bool = True,
) -> None:
    """Checks the strategies of the groups, each mapping once, against the states of updates, with their groups.

    In a step parameters without a gradient may have other states, and nothing is said yet.

    Raises:
        ValueError: a mapping names a state that no parameter of the groups with that mapping has.
    """
    there = list(shown)
    for names, groups in unchecked(optimizer, strategies):
        ids = set(map(id, groups))
        states = dict.fromkeys(name for group, own in there if id(group) in ids for name in own)
        if not names <= states.keys():
            params = [p for group in groups for p in group["params"]]
            if in_step and any(p.requires_grad and p.grad is None for p in params):
                continue
            raise ValueError(sentence(names, states))
        bookkeeping(optimizer).named.add(names)


def unchecked(optimizer: Optimizer, strategies: Sequence[StrategyLike]) -> Iterator[tuple[Names, list[Group]]]:
    """The names of states in mappings that were not checked before, with the groups that have these mappings."""
    found: dict[Names, list[Group]] = {}
    for group, strategy in zip(optimizer.param_groups, strategies, strict=True):
        if isinstance(strategy, Mapping) and group["params"]:
            found.setdefault(frozenset(strategy.keys() - {"param", "*"}), []).append(group)
    known = bookkeeping(optimizer).named
    return ((names, groups) for names, groups in found.items() if names and names not in known)


def sentence(names: Names, states: Collection[str]) -> str:
    """What is wrong with a mapping of these names."""
    known = ", ".join(["param", *states])
    return f"the strategy names {min(names.difference(states))!r}; this update has {known} (and `*`: the rest)"
