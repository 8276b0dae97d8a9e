"""Settings of a group that change between steps: what a new strategy loses, and learning rates that 24 bits lose.

`compile` says both of what it finds. Groups are changed later too (`group["lr"] = ...`, `group["collage_strategy"] =
...`, `add_param_group`), and the groups of a compiled class are not known before. A learning rate is looked at when it
is the same in two steps: code that warms up by hand sets another one in each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import StrategyChanged, warn_user
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.rounding import digits
from collage_neuron.states import strategy_checks
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.word_encoding import bytes_of

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job


def note_groups(optimizer: Optimizer) -> None:
    """Notes all groups as they are: `compile` has said what is to be said of them."""
    groups = optimizer.param_groups
    bookkeeping(optimizer).groups = {i: (_strategy(group), _rate(group), True) for i, group in enumerate(groups)}


def warn_of_changes(base: type[Optimizer], optimizer: Optimizer, jobs: Sequence[Job]) -> None:
    """Before a step: warns of what was changed since the last one, which was noted; a steady step compares only."""
    noted = bookkeeping(optimizer).groups
    for i, group in enumerate(optimizer.param_groups):
        strategy, rate, looked = noted.get(i, (None, None, False))
        if looked and rate == _rate(group) and strategy == group.get("collage_strategy"):
            continue
        own = [job for job in jobs if job.group is group]
        if own:
            settled = i in noted and rate == _rate(group)
            if settled and not looked:
                _warn_of_steps(base, optimizer, i, _narrow(own))
            if strategy is not None and strategy != _strategy(group):
                _warn_of_strategy(i, own[0], strategy)
            noted[i] = _strategy(group), _rate(group), settled


def _strategy(group: Mapping[str, Any]) -> Any:
    strategy = group.get("collage_strategy")
    return dict(strategy) if isinstance(strategy, Mapping) else strategy  # which may change in place


def _rate(group: Mapping[str, Any]) -> float | None:
    rate = group.get("lr")
    return rate if type(rate) is float else None  # a tensor may be on a device, and would be waited for


def _warn_of_steps(base: type[Optimizer], optimizer: Optimizer, index: int, jobs: Sequence[Job]) -> None:
    for job in (part for each in jobs for part in each.apart()):
        strategy_checks.warn_stuck(base, optimizer, job.recording, job.settings, job.update.formats)
        strategy_checks.warn_small(optimizer, index, job.settings, type(optimizer), job.params, job.recording)


def _narrow(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.params[0].dtype == torch.bfloat16]


def _warn_of_strategy(index: int, job: Job, before: Any) -> None:
    settings = replace(job.settings, strategy=before, arithmetic="fp32")  # which every strategy allows
    old, new = map(job.formats_under, (settings, job.settings))
    if _narrow([job]) and (told := describe_change(index, old, new)):
        warn_user(told, StrategyChanged)


# --- what a change of strategy gains and loses ------------------------------------------------------------------------


def describe_change(index: int, old: Mapping[str, Format], new: Mapping[str, Format]) -> str | None:
    """What a group gains and loses when its formats change from `old` to `new`; None if nothing does."""
    changed = {name: fmt for name, fmt in new.items() if name in old and not fmt.reads_as(old[name])}
    gained = [_change(n, old, new) for n, fmt in changed.items() if digits(fmt) > digits(old[n])]
    lost = [_change(n, old, new) for n, fmt in changed.items() if _loses(old[n], fmt)]
    if not changed:
        return None
    size = [bytes_of(formats) + torch.bfloat16.itemsize for formats in (old, new)]  # and the gradient
    text = f"param_groups[{index}] goes from {size[0]} to {size[1]} bytes per parameter. "
    text += f"Gained: {', '.join(gained) or 'nothing'}"
    text += "; what was rounded away before does not come back. " if gained else ". "
    return text + f"Lost: {', '.join(lost) or 'nothing'}."


def _loses(old: Format, new: Format) -> bool:
    # In codes, what is small beside the largest number of its block has fewer digits, and others have more than bf16.
    in_codes = new.is_coded or (old.is_coded and digits(new) <= digits(format_named("bf16")))
    return in_codes or digits(new) <= digits(old)


def _change(name: str, old: Mapping[str, Format], new: Mapping[str, Format]) -> str:
    before, after = old[name], new[name]
    errors = f"rounded to 2**-{digits(after)} instead of 2**-{digits(before)}"
    return f"{name} in {after.name} instead of {before.name} ({errors})"
