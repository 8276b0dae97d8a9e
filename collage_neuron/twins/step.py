"""A step as written: decodes everything, runs the user's own `step()` on the fp32 copies, and encodes the results.

Nothing of the optimizer changes before the results have been checked. A step that raises leaves it as it was, or, if
large tensors that are not stored in words were written by then, needs a checkpoint (StepInterrupted).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import StepInterrupted, UnsupportedUpdate
from collage_neuron.passes.capture.closures import evaluated, loss_of, own_step
from collage_neuron.passes.capture.host_state import HostState
from collage_neuron.runtime.measured import Measured
from collage_neuron.runtime.preconditions import check_settings, check_stepped
from collage_neuron.settings import Settings
from collage_neuron.states import exchanged, low_words, steady
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.twins import limits
from collage_neuron.twins.copies import Copies
from collage_neuron.twins.measures import changes_of
from collage_neuron.twins.memory import pool
from collage_neuron.twins.results import Left, left_by
from collage_neuron.twins.returned import without_copies
from collage_neuron.twins.sharing import check_before
from collage_neuron.twins.shells import shells
from collage_neuron.twins.stored import Storing
from collage_neuron.twins.told import tell
from collage_neuron.twins.watch import Watch, memory_of, reached, watching


class Taken(NamedTuple):
    """A step that was taken."""

    measured: list[Measured]
    returned: Any
    """What `step()` returns."""


def take(
    base: type[Optimizer],
    optimizer: Optimizer,
    refusal: UnsupportedUpdate,
    finite: Callable[[], torch.Tensor | None],
    due: bool = False,
) -> Taken:
    """Takes a step on copies; none, if `finite` returns a mask that is false. `refusal` says why it is not captured.

    It is measured if that is `due`.

    Raises:
        UnsupportedUpdate: the step does what copies cannot do; nothing was updated.
        StepInterrupted: it raised when it had changed something already.
    """
    steady.changed(optimizer)
    limits.check(base, optimizer, refusal, [Settings.of(group) for group in optimizer.param_groups])
    for i, group in enumerate(optimizer.param_groups):
        check_settings(group, i)
        given = [(j, p) for j, p in enumerate(group["params"]) if p.grad is not None]
        params = [p for _, p in given]
        places = [f"param_groups[{i}]['params'][{j}]" for j, _ in given]
        check_stepped(params, places)
        exchanged.check_converted(params, places, bookkeeping(optimizer).narrow)
    low_words.drop_stale(optimizer)
    mask = finite()
    try:
        taken = _run(base, optimizer, due) if mask is None or bool(mask) else Taken([], loss_of(optimizer))
    finally:
        shells(optimizer).end()
        pool(optimizer).end()
    tell(base, optimizer, refusal)
    exchanged.forget(optimizer)
    low_words.remember_step(optimizer)
    return taken


def _run(base: type[Optimizer], optimizer: Optimizer, due: bool) -> Taken:
    copies = Copies(base, optimizer)
    host, kept = copies.host(), copies.kept()
    before, storing = _versions(copies), None
    try:
        check_before(copies)
        left, returned = _stepped(base, copies, host)
        if _versions(copies) != before:
            raise reached("a parameter, a gradient or its memory", "it was written")
        storing = Storing(copies, left)
        versions = storing.versions()
        changes = changes_of(storing) if due else []
        storing.write()
    except BaseException as error:
        half = _versions(copies) != before or (storing is not None and storing.versions() != versions)
        if half or kept.has_lost() or host.has_lost(copies.ids()):
            bookkeeping(optimizer).interrupted = _interrupted(error)
            if isinstance(error, Exception):
                raise StepInterrupted(bookkeeping(optimizer).interrupted) from error
            raise
        host.restore()
        kept.restore()
        if isinstance(error, UnsupportedUpdate):
            raise UnsupportedUpdate(
                f"{base.__name__} cannot run as written on fp32 copies: {error}; nothing was updated"
            ) from error
        raise
    return Taken([change.measured() for change in changes], returned)


def _stepped(base: type[Optimizer], copies: Copies, host: HostState) -> tuple[Mapping[torch.Tensor, Left], Any]:
    """Takes the user's step of the copies; returns what it left, and what it returned."""
    steps = bookkeeping(copies.original).steps
    watched = evaluated(copies.optimizer) is not None or steps & (steps + 1) == 0
    watch = Watch(copies.originals, copies.memories()) if watched else Watch({}, ())
    with copies.in_place(host):
        with own_step(base, copies.optimizer, watch.touched) as step, torch.no_grad():
            if watched:
                with watching(watch, {p.device.type for p in copies.params}):
                    returned = step()
            else:
                returned = step()
        if watch.error is not None:  # the step may have caught it
            raise watch.error
        return left_by(copies), without_copies(copies, returned, step.loss)


def _versions(copies: Copies) -> list[Any]:
    """Signs of a write to what was copied."""
    tensors = [t for p in copies.params for t in (p, p.grad) if t is not None]
    return [(torch_privates.version(t), memory_of(t)) for t in tensors]


def _interrupted(error: BaseException) -> str:
    return (
        f"a step on fp32 copies was interrupted by an error ({type(error).__name__}: {error}) after it had changed "
        "tensors that are not stored in words: load a checkpoint, and continue from there"
    )
