"""What backends are given of a step: the tensors and the numbers of its jobs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.ir.update import Update
from collage_neuron.settings import DRAWN
from collage_neuron.states import small, steady
from collage_neuron.states.layout import ensure_all_stored
from collage_neuron.states.sharding import first_element, gradients, local_parts, writable_gradient

if TYPE_CHECKING:
    from collage_neuron.runtime.plan import Job


def launches_of(optimizer: Optimizer, job: Job, finite: torch.Tensor | None) -> list[Launch]:
    """The launches of a job: one, or one per parameter if the update draws random bits."""
    if not job.update.draws:
        return [launch(optimizer, job, finite)]
    numbers = {id(p): i for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])}
    key = job.settings.seed, job.group.get(DRAWN, 0)
    drawing = {p: [*key, numbers[id(p)], first_element(p)] for p in job.params}
    return [launch(optimizer, replace(job, params=[p]), finite, drawing[p]) for p in job.params]


def launch(optimizer: Optimizer, job: Job, finite: torch.Tensor | None = None, drawing: Sequence[float] = ()) -> Launch:
    """The launch of a job, for a backend. Missing states are created.

    `drawing` are the numbers on which random bits depend (`passes/rewrite/random_bits.py`).
    """
    update = job.update
    vector = torch.tensor(update.scalars.run(job.recording.slots, drawing), dtype=torch.float32, device="cpu")
    ensure_all_stored(optimizer, job.params, update.formats, job.recording.captured)
    small.ensure(optimizer, job.params, job.recording.captured)
    seen, writes_gradient = steady.of(optimizer), "grad" in update.outputs
    has_views = update.seen_as is not None and not job.backend.reshapes
    states = steady.states_of(optimizer, job.params, seen)
    if seen is None:
        parts = [local_parts(p, state, writes_gradient) for p, state in zip(job.params, states, strict=True)]
        if has_views:
            parts = [{key: _seen(of_param[key], key, update) for key in _keys(update)} for of_param in parts]
        rows = [[[of_param[key] for key in keys] for of_param in parts] for keys in (update.inputs, update.outputs)]
        numbers = small.of(states, job.recording.captured)
        return Launch(update, vector, rows[0], rows[1], finite, small=numbers)
    grads = list(map(writable_gradient, job.params)) if writes_gradient else gradients(job.params)
    columns: dict[str, Sequence[torch.Tensor]] = {"param": job.params, "grad": grads}
    for key in _keys(update) - columns.keys():
        columns[key] = [state[key] for state in states]
    if has_views:
        columns = {key: [_seen(t, key, update) for t in columns[key]] for key in _keys(update)}
    reads, writes = (_rows([columns[key] for key in keys], len(states)) for keys in (update.inputs, update.outputs))
    kept = None if drawing else _kept(seen.structure, job, grads)  # too many launches to look for one, if they draw
    return Launch(update, vector, reads, writes, finite, kept, True, small.of(states, job.recording.captured))


def _keys(update: Update) -> set[str]:
    return {*update.inputs, *update.outputs}


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


def _rows(columns: Sequence[Sequence[torch.Tensor]], count: int) -> list[tuple[torch.Tensor, ...]]:
    """For each of `count` parameters its tensors."""
    return list(zip(*columns, strict=True)) if columns else [()] * count


class _Like(NamedTuple):
    """A launch of an earlier step: whether another one is like it, and the place for what backends keep about it."""

    update: Update
    params: list[torch.nn.Parameter]
    """The list itself: a steady step has that of the last one (`visible.alike`)."""
    guard: Callable[..., bool]
    """Of its gradients: parameters and states are part of the structure."""
    kept: dict[Any, Any]


def _kept(structure: steady.Structure, job: Job, grads: Sequence[torch.Tensor]) -> dict[Any, Any]:
    """`Launch.kept` of a job."""
    known, key = structure.table("launches"), (id(job.update), id(job.params))  # it has both, so ids stay theirs
    found: _Like | None = known.get(key)
    if found is None or not found.guard(*grads):
        found = structure.keep(known, key, _Like(job.update, job.params, torch_privates.guard(grads), {}))
    return found.kept
