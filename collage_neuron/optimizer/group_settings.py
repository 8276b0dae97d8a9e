"""Settings of a group that change between steps: what a new strategy loses, and learning rates that 24 bits lose.

`compile` says both of what it finds. Groups are changed later too (`group["lr"] = ...`, `group["collage_strategy"] =
...`, `add_param_group`), and the groups of a compiled class are not known before. A learning rate is looked at when it
is the same in two steps: code that warms up by hand sets another one in each.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import StrategyChanged, warn_user
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import formats_of_shape
from collage_neuron.numerics.underflow import digits
from collage_neuron.states import strategy_checks
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import local
from collage_neuron.states.state_keys import is_host_scalar
from collage_neuron.states.store import read_fp32, record_of
from collage_neuron.states.word_encoding import bytes_of, decode, settled

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
            elif i in noted and isinstance(new := _rate(group), float) and (narrow := _narrow(own)):
                params = [p for job in narrow for p in job.params]
                its = strategy_checks.Group(optimizer, i, narrow[0].settings, type(optimizer))
                its.follow_schedule(new, params, narrow[0].recording)
            if strategy is not None and strategy != _strategy(group):
                _warn_of_strategy(optimizer, i, own[0], strategy)
            noted[i] = _strategy(group), _rate(group), settled


def warn_of_bytes(optimizer: Optimizer, jobs: Sequence[Job]) -> None:
    """Warns once of a step that needs more bytes than its strategy was chosen by (`compile(bytes=N)`).

    A number of the group has changed, so that a state needs more words, or the step has made another state.
    """
    ours = bookkeeping(optimizer)
    if ours.budget is None or BYTES in ours.told:
        return
    for job in _narrow(jobs):
        size = bytes_of(job.update.formats) + torch.bfloat16.itemsize  # its gradient's
        if job.settings.strategy == ours.budgeted and size > ours.budget:
            ours.told.add(BYTES)
            warn_user(
                f"the strategy {ours.budgeted!r} was chosen by bytes={ours.budget}, and this step of "
                f"{type(optimizer).__name__} needs {size} bytes per parameter: a number of its group has changed, or "
                "it has more states than when it was compiled; compile(optimizer, bytes=...) chooses again"
            )
            return


BYTES = "bytes"
"""In `Bookkeeping.told` once it was warned of."""


def _strategy(group: Mapping[str, Any]) -> Any:
    strategy = group.get("collage_strategy")
    return dict(strategy) if isinstance(strategy, Mapping) else strategy  # which may change in place


def _rate(group: Mapping[str, Any]) -> float | None:
    rate = group.get("lr")
    return rate if type(rate) is float else None  # a tensor may be on a device, and would be waited for


def _warn_of_steps(base: type[Optimizer], optimizer: Optimizer, index: int, jobs: Sequence[Job]) -> None:
    for job in (part for each in jobs for part in each.apart()):
        strategy_checks.warn_stuck(base, optimizer, job.recording, job.settings, job.update.formats)
        its = strategy_checks.Group(optimizer, index, job.settings, type(optimizer))
        its.check(job.params, job.recording)


def _narrow(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.params[0].dtype == torch.bfloat16]


def _warn_of_strategy(optimizer: Optimizer, index: int, job: Job, before: Any) -> None:
    settings = replace(job.settings, strategy=before, arithmetic="fp32")  # which every strategy allows
    old, new = map(job.formats_under, (settings, job.settings))
    params = [p for p in job.group["params"] if p.dtype == torch.bfloat16]
    if params and (told := describe_change(optimizer, index, params, old, new)):
        warn_user(told, StrategyChanged)


# --- what a change of strategy gains and loses ------------------------------------------------------------------------


def describe_change(
    optimizer: Optimizer,
    index: int,
    params: Iterable[torch.Tensor],
    old: Mapping[str, Format],
    new: Mapping[str, Format],
) -> str | None:
    """What a group gains and loses when the formats of `params` change from `old` to `new`; None if nothing does."""
    moved = _rounding_of(optimizer, params, old, new)
    changed = {name: (digits(old[name]), digits(fmt)) for name, fmt in new.items() if name in old}
    gained = [_change(n, old, new) for n, (before, after) in changed.items() if after > before]
    measured = {n: f", which changes its values now by {x:.2g} of their norm" for n, x in moved.items() if x}
    lost = [
        _change(n, old, new) + measured.get(n, "")
        for n, (before, after) in changed.items()
        if after < before or n in measured
    ]
    if not gained and not lost:
        return None
    size = [bytes_of(formats) + torch.bfloat16.itemsize for formats in (old, new)]  # and the gradient
    text = f"param_groups[{index}] goes from {size[0]} to {size[1]} bytes per parameter. "
    text += f"Gained: {', '.join(gained) or 'nothing'}"
    text += "; what was rounded away before does not come back. " if gained else ". "
    return text + f"Lost: {', '.join(lost) or 'nothing, every value is carried over exactly'}."


def _rounding_of(
    optimizer: Optimizer, params: Iterable[torch.Tensor], old: Mapping[str, Format], new: Mapping[str, Format]
) -> dict[str, float]:
    """By how much storing the values of `params` and their states in other formats changes them.

    The norm of the changes over the norm of the values, by name. What both formats store alike is not read.
    """
    names = [name for name, fmt in new.items() if name in old and not fmt.reads_as(old[name])]
    found = dict.fromkeys(names, (0.0, 0.0))
    for p in (p for p in params if names and p.dtype == torch.bfloat16):  # others stay fp32
        state, record = optimizer.state.get(p, {}), record_of(optimizer, p)
        for name in names:
            if name == "param" or (name in state and not is_host_scalar(state[name], p)):
                value = local(read_fp32(p, state, name, record)).cpu()
                fmt = formats_of_shape(new, p.dim())[name]
                found[name] = _added(found[name], value, decode(fmt, settled(fmt, name, value), name))
    return {name: math.sqrt(error / total) if total else 0.0 for name, (error, total) in found.items()}


def _added(sums: tuple[float, float], value: torch.Tensor, rounded: torch.Tensor) -> tuple[float, float]:
    both = value.isfinite() & rounded.isfinite()
    error, size = (torch.where(both, x, 0.0).double().square().sum() for x in (rounded - value, value))
    return sums[0] + float(error), sums[1] + float(size)


def _change(name: str, old: Mapping[str, Format], new: Mapping[str, Format]) -> str:
    before, after = old[name], new[name]
    errors = f"rounded to 2**-{digits(after)} instead of 2**-{digits(before)}"
    return f"{name} in {after.name} instead of {before.name} ({errors})"
