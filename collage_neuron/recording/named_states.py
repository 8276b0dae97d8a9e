"""Checks the names in a strategy's mapping against the states that recordings of all parameters show."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.recording.bucketing import naming, recordings
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.named_states import Group, sentence, unchecked


def check(
    base: type[Optimizer],
    optimizer: Optimizer,
    strategies: Sequence[StrategyLike],
    shown: Iterable[tuple[Group, Recording]] = (),
) -> None:
    """Checks the strategies of the groups, each mapping once, against what updates are recorded for all parameters.

    `shown` are recordings that there are already. Nothing is said where an update cannot be recorded: such steps run
    as written, and the first one shows its states (`states/named_states.py`).

    Raises:
        ValueError: a mapping names a state that no parameter of the groups with that mapping has.
    """
    there = list(shown)
    for names, groups in unchecked(optimizer, strategies):
        ids = set(map(id, groups))
        states = _states_of(recording for group, recording in there if id(group) in ids)
        try:
            for group in groups if not names <= states.keys() else ():
                with naming(base):
                    states |= _states_of(r for _, r in recordings(base, optimizer, group, group["params"]))
        except UnsupportedUpdate:
            continue
        if not names <= states.keys():
            raise ValueError(sentence(names, states))
        bookkeeping(optimizer).named.add(names)


def _states_of(found: Iterable[Recording]) -> dict[str, None]:
    return dict.fromkeys(name for recording in found for name in recording.captured.states)
