"""The storage formats of an update: they follow from its graph, its numbers, and the settings of its group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.numerics.strategies import (
    STRATEGIES,
    check_strategy,
    formats_for,
    tells_roles,
)
from collage_neuron.passes.analysis.state_roles import pattern, roles_of, structure
from collage_neuron.passes.ir.update import Recording
from collage_neuron.settings import Settings
from collage_neuron.states import step_inventory, strategy_checks
from collage_neuron.states.store import is_stored, kept_format, record_of


@dataclass(frozen=True)
class Rewritten:
    """Results that depend only on an update and the settings of its group, computed once and not in every step."""

    formats: Mapping[str, Format]
    idle: frozenset[str]
    """States that the step does not change."""
    watched: frozenset[str]
    """Values that a monitor measures: the parameter, and slow states that are rounded to nearest."""
    imprecise: frozenset[str]


_known: dict[Any, Rewritten] = {}
_MOST = 4096  # then all are forgotten: numbers may be others in every step


def named(settings: Settings) -> object:
    """What the name of a strategy means now: the strategy of a name may be gone, or another."""
    return STRATEGIES.get(settings.strategy) if isinstance(settings.strategy, str) else None


def signs_of(seen: step_inventory.Seen | None, recording: Recording, settings: Settings) -> object:
    """What the formats depend on of the numbers of a step, and of the one after; the same object for equal patterns."""
    later, tells = recording.following, partial(tells_roles, settings.strategy)
    if not (tells() if seen is None else seen.structure.once(("tells roles", named(settings)), tells)):
        return None
    return _one_object((pattern(recording.slots), later and (later.captured.text, pattern(later.slots))))


@lru_cache(maxsize=4096)
def _one_object(found: object) -> object:
    return found


def rewritten_for(
    optimizer: Optimizer, recording: Recording, settings: Settings, signs: object, dtype: torch.dtype
) -> Rewritten:
    """`_rewritten` for the numbers of this step, or of an earlier one of this optimizer with the same pattern."""
    seen, captured = step_inventory.of(optimizer), recording.captured
    if seen is None:
        return _rewritten(recording, settings, dtype)
    table = seen.structure.table("rewritten")
    key = captured.text, tuple(captured.fresh.items()), signs, settings, named(settings), dtype
    found: Rewritten | None = table.get(key)
    return found or seen.structure.keep(table, key, _rewritten(recording, settings, dtype))


def _rewritten(recording: Recording, settings: Settings, dtype: torch.dtype) -> Rewritten:
    """What follows from an update and the numbers of a step, whatever other optimizers there were before."""
    captured = recording.captured
    fresh, numbers, later = tuple(captured.fresh.items()), None, recording.following
    if tells_roles(settings.strategy):
        numbers = tuple(recording.slots), later and (later.captured.text, tuple(later.slots))
    key = captured.text, captured.states, fresh, numbers, settings, named(settings), dtype, tuple(FORMATS.values())
    found = _known.get(key)
    if found is None:
        if len(_known) >= _MOST:
            _known.clear()
        check_strategy(settings.strategy, settings.arithmetic)  # again
        _check_beginnings(recording, settings, dtype)
        slow, idle = structure(captured.graph).slow, structure(captured.graph).idle.difference(captured.small)
        roles = roles_of(captured, recording.slots, recording.following)
        formats = formats_for(settings.strategy, captured.states, roles, dtype)
        lacking = strategy_checks.imprecise_states(captured.graph, settings, dtype)
        lacking = lacking.difference(captured.small)  # which are fp32
        # A stochastic store leaves most small decreases out, and follows on average: that is not a stall.
        nearest = frozenset(name for name in slow if name in formats and formats[name].draw is None)
        found = _known[key] = Rewritten(formats, idle, nearest | {"param"}, lacking)
    return found


def _check_beginnings(recording: Recording, settings: Settings, dtype: torch.dtype) -> None:
    """Raises for a state that begins below 0, if a later step, which sees no beginning, keeps it in unsigned codes."""
    below = {name: fill for name, fill in recording.captured.fresh.items() if fill < 0}
    if not below:
        return
    captured = replace(recording.captured, fresh={})  # as later steps see it, in which the state is there
    later = formats_for(settings.strategy, captured.states, roles_of(captured, recording.slots), dtype)
    for name, fill in below.items():
        if name in later and not later[name].signed:
            raise UnsupportedUpdate(
                f"the state {name!r} begins at {fill:g}, and adds up what cannot be negative: strategy="
                f"{settings.strategy!r} keeps such states as {later[name].name}, which has no sign. Let it begin at 0, "
                "or use a strategy with signs (strategy='split433')"
            )


def formats_of(recording: Recording, settings: Settings, dtype: torch.dtype) -> Mapping[str, Format]:
    """The storage formats of a recorded update under the settings of its group."""
    # States that it does not change have some too: other steps or methods write them (SophiaG's `hessian`).
    return _rewritten(recording, settings, dtype).formats


def idle_formats(optimizer: Optimizer, p: torch.Tensor, recording: Recording) -> dict[str, Format]:
    """The current formats of states that this step does not change, so that their low words are not dropped."""
    return as_stored(optimizer, p, structure(recording.captured.graph).idle.difference(recording.captured.small))


def as_stored(optimizer: Optimizer, p: torch.Tensor, idle: frozenset[str]) -> dict[str, Format]:
    """The formats that these states of a parameter have now, if they are stored."""
    state = optimizer.state.get(p, {})
    record = record_of(optimizer, p)
    kept = {name: kept_format(p, state, name, record) for name in idle if name in state}
    plain = [fmt for fmt in FORMATS.values() if fmt.draw is None]  # a state that is not updated is not rounded
    return {
        name: next((f for f in plain if f.reads_as(fmt)), fmt)
        for name, fmt in kept.items()
        if is_stored(p, state, name, fmt, record)
    }
