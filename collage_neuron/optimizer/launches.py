"""What backends are given of a step, the tensors and the numbers of its jobs, and the numbers that it writes after."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, compress
from operator import itemgetter, not_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.ir.update import Recording, Update
from collage_neuron.runtime.process_agreement import across
from collage_neuron.settings import DRAWN
from collage_neuron.states import step_inventory, visible_states
from collage_neuron.states.bookkeeping import bookkeeping, params_of
from collage_neuron.states.sharding import first_element, gradients, is_sharded, locals_of, writable_gradient
from collage_neuron.states.store import ensure_stored, record_of

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job


def launches_of(optimizer: Optimizer, job: Job, finite: torch.Tensor | None) -> list[Launch]:
    """The launches of a job: one, or one per parameter if each draws random bits, or has numbers that need that.

    With a mask `finite` they change nothing where it is false, if the group skips such steps.
    """
    finite = finite if job.settings.nonfinite == "skip" else None
    if not job.update.draws and (job.backend.takes_rows or not job.recording.rows):
        return [launch(optimizer, job, finite)]
    alone = [job.of([i]) for i in range(len(job.params))]
    if not job.update.draws:
        return [launch(optimizer, one, finite) for one in alone]
    numbers = {id(p): i for i, p in enumerate(params_of(optimizer))}
    key = job.settings.seed, job.group.get(DRAWN, 0)
    drawing = ([*key, numbers[id(p)], first_element(p)] for p in job.params)
    return [launch(optimizer, one, finite, drawn) for one, drawn in zip(alone, drawing, strict=True)]


def launch(optimizer: Optimizer, job: Job, finite: torch.Tensor | None = None, drawing: Sequence[float] = ()) -> Launch:
    """The launch of a job, for a backend. Missing states are created.

    `drawing` are the numbers on which random bits depend (`passes/rewrite/round_and_store.py`).
    """
    update, captured = job.update, job.recording.captured
    vector = _vector(update, job.recording, drawing)
    if job.kept is None or step_inventory.of(optimizer) is None:  # else the states are there, as in that step
        _ensure_all_stored(optimizer, job)
        visible_states.ensure(optimizer, job.params, captured)
    seen, states = step_inventory.of(optimizer), step_inventory.states_of(optimizer, job.params)
    grads = list(map(writable_gradient, job.params)) if "grad" in update.outputs else gradients(job.params)
    columns: dict[str, Sequence[torch.Tensor]] = {"param": job.params, "grad": grads}
    for key in update.of_states:
        columns[key] = list(map(itemgetter(key), states))  # no frame of Python's for each
    if locals_of(job.params) is not job.params:
        columns = {key: locals_of(tensors) for key, tensors in columns.items()}
    if update.seen_as is not None and not job.backend.reshapes:
        columns = {key: [_seen(t, key, update) for t in tensors] for key, tensors in columns.items()}
    reads, writes = _rows(columns, update.inputs, len(states)), _rows(columns, update.outputs, len(states))
    # If they draw, there are too many launches to look for one.
    kept = None if seen is None or drawing else _kept(seen.structure, job, grads)
    small = visible_states.states_of(states, captured) if captured.small else ()
    between = across if update.between and any(map(is_sharded, job.params)) else None
    return Launch(update, vector, reads, writes, finite, kept, seen is not None, small, between)


def _vector(update: Update, recording: Recording, drawing: Sequence[float]) -> torch.Tensor:
    """The scalar vector, or a row for each parameter; read from memory in half the time of `torch.tensor`."""
    numbers = [update.scalars.run(slots, drawing) for slots in recording.rows or [recording.slots]]
    if not numbers[0]:
        return torch.empty(0, dtype=torch.float32, device="cpu")
    vector = torch.frombuffer(array("f", chain.from_iterable(numbers)), dtype=torch.float32)
    return vector.view(len(numbers), -1) if recording.rows else vector


def _seen(t: torch.Tensor, key: str, update: Update) -> torch.Tensor:
    """`t` in the shape in which an update sees it: the same memory, unless it is only read."""
    assert update.seen_as is not None
    if t.is_contiguous():
        return t.detach().view(update.seen_as)
    if key not in update.outputs:
        return t.detach().reshape(update.seen_as)
    what = {"param": "a parameter", "grad": "a gradient, to which the step writes"}.get(
        key, f"optimizer.state[p][{key!r}]"
    )
    raise ValueError(
        f"{what}, of shape {list(t.shape)}, is not contiguous, and the step sees it in the shape "
        f"{list(update.seen_as)}; nothing was updated: assign what .contiguous() gives"
    )


def _rows(
    columns: Mapping[str, Sequence[torch.Tensor]], keys: Sequence[str], count: int
) -> list[tuple[torch.Tensor, ...]]:
    """For each of `count` parameters its tensors, by these keys."""
    return list(zip(*map(columns.__getitem__, keys), strict=True)) if keys else [()] * count


class _Like(NamedTuple):
    """A launch of an earlier step: whether another one is like it, and the place for what backends keep about it."""

    update: Update
    params: list[torch.nn.Parameter]
    """The list itself: a steady step has that of the last one (`visible_states.buckets`)."""
    guard: Callable[..., bool]
    """The guard of its gradients: parameters and states are part of the structure."""
    kept: dict[Any, Any]


def _kept(structure: step_inventory.Structure, job: Job, grads: Sequence[torch.Tensor]) -> dict[Any, Any]:
    """`Launch.kept` of a job."""
    if job.kept is not None:
        return job.kept
    known, key = structure.table("launches"), (id(job.update), id(job.params))  # it has both, so ids stay theirs
    found: _Like | None = known.get(key)
    if found is None or not found.guard(*grads):
        found = structure.keep(known, key, _Like(job.update, job.params, torch_privates.guard(grads), {}))
    return found.kept


# --- states in their formats ------------------------------------------------------------------------------------------


def _ensure_all_stored(optimizer: Optimizer, job: Job) -> None:
    """Creates the states of a job that are not there yet, as its update does; moves others into its formats."""
    formats, captured, in_step = job.update.formats, job.recording.captured, step_inventory.of(optimizer)
    stored: set[int] = set()
    if in_step is not None:
        stored = in_step.structure.once(("stored", *formats.items()), set)
    if stored.issuperset(map(id, job.params)):
        return
    for p in job.params:
        state, record = optimizer.state[p], record_of(optimizer, p)
        for name, fmt in formats.items():
            if ensure_stored(p, state, name, fmt, record, captured.fresh.get(name, 0.0), captured.shapes.get(name)):
                step_inventory.changed(optimizer)
                bookkeeping(optimizer).marks.states.pop(p, None)  # what is stored now is ours
    if step_inventory.of(optimizer) is not None:
        stored.update(map(id, job.params))


# --- numbers after the tensors ----------------------------------------------------------------------------------------


def finish(optimizer: Optimizer, job: Job) -> None:
    """Writes the numbers that a job changes in the states."""
    states = step_inventory.states_of(optimizer, job.params)
    if step_inventory.of(optimizer) is None or not _write_alike(states, job.recording.scalars):
        step_inventory.changed(optimizer)
        for p in job.params:
            _write_scalars(optimizer.state[p], job.recording.scalars)
    if job.recording.captured.clears_gradient:
        for p in job.params:
            p.grad = None
    for p in () if job.update.of_states else compress(job.params, map(not_, states)):
        if not optimizer.state[p]:
            del optimizer.state[p]  # as torch's SGD, which has none


def _write_alike(states: list[dict[str, Any]], scalars: Mapping[str, Any]) -> bool:
    """Writes the host scalars of parameters that share a recording, all of a name at once.

    Returns False, and writes nothing, if that would change keys or types. It looks at one state only: parameters share
    a recording in a steady step only if the names and types of their numbers agree (`visible_states`).
    """
    first = states[0]
    if not all(name in first and type(first[name]) is type(value) for name, value in scalars.items()):
        return False
    for name, value in scalars.items():
        if isinstance(value, torch.Tensor):
            torch_privates.copy_all([state[name] for state in states], [value] * len(states))
        else:
            for state in states:
                state[name] = value
    return True


def _write_scalars(state: dict[str, Any], scalars: Mapping[str, Any]) -> None:
    """Writes the host scalars after a step; existing 0-d tensors in place, since a checkpoint may refer to them."""
    if not scalars.keys() <= state.keys():  # new ones come first, as `step` does in torch's states
        tensors = dict(state)
        state.clear()
        state.update(dict.fromkeys(scalars) | tensors)
    for name, value in scalars.items():
        if isinstance(value, torch.Tensor) and isinstance(state.get(name), torch.Tensor):
            state[name].copy_(value)
        else:
            state[name] = value.clone() if isinstance(value, torch.Tensor) else value
