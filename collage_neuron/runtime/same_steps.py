"""Processes that add up sums over parameters in shards must take the same step, or each would wait for the others.

They cannot be trusted to: a parameter may have a gradient in one process only. So before anything is changed, they
compare what they are about to do, each time that one of them may have sums to add; and all raise if it differs.
Replicas take part (HSDP): if one raised alone, the others would take the step, and have other weights from then on.

Steps of classes that are traced are launched by all of them, or run as written in all (`agreed`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

from torch.optim import Optimizer

from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.shard_sums import Between, ends_in, is_same_in, mesh_of
from collage_neuron.states.sharding import is_sharded

if TYPE_CHECKING:
    from collage_neuron.passes.capture.recording import Recording
    from collage_neuron.runtime.plan import Job

_DIFFERENT = -1
"""What a process tells that knows of a difference already: no checksum is negative."""


DIFFERENT = (
    "the processes that have parts or replicas of a parameter are about to take different steps: they must have "
    "gradients of the same parameters, the same settings and the same backend, since their sums (norms, means) are "
    "added up; nothing was updated. Give parameters that a process did not use a gradient of zeros"
)


def note(optimizer: Optimizer, recordings: Iterable[Recording | None]) -> None:
    """Notes, of a group each, the recordings from which processes know at compile that they will add up sums."""
    pairs = zip(optimizer.param_groups, recordings, strict=True)
    adding = (group for group, recording in pairs if recording is not None and recording.captured.reduces)
    bookkeeping(optimizer).adds_shards = any(is_sharded(p) for group in adding for p in group["params"])


def check(optimizer: Optimizer, jobs: Sequence[Job]) -> None:
    """Compares the jobs of a step between processes, if it adds up sums of shards, or an earlier one did.

    That is one collective for each dimension of each mesh of parameters, of 16 bytes from each process.

    A process without gradients takes part too; but if the first parameters of groups have no sums (`note`), not in the
    first such step, which it cannot know of.

    Raises:
        ValueError: they differ; nothing has been changed.
    """
    ours = bookkeeping(optimizer)
    adding = [job for job in jobs if job.update.is_staged and any(map(is_sharded, job.params))]
    ours.adds_shards = ours.adds_shards or bool(adding)
    if not ours.adds_shards:
        return
    params = [p for group in optimizer.param_groups for p in group["params"]]
    places = {id(p): i for i, p in enumerate(params)}
    told: dict[tuple[Between, ...], list[Any]] = {g: [] for g in map(mesh_of, params) if g}
    for groups, what in _told(adding, places):
        if groups:
            told[groups].append(what)
    same = True
    # A mesh may be a part of a later one, whose other processes have to learn of a difference in it.
    for groups, what in sorted(told.items(), key=lambda item: math.prod(map(len, item[0]))):
        same = is_same_in(groups, crc32(repr(what).encode()) if same else _DIFFERENT) and same
    if not same:
        raise ValueError(DIFFERENT)


LAUNCHES, AS_WRITTEN, RAISES = range(3)
"""What a process is about to do with a traced step."""


def agreed(params: Sequence[Any], given: Sequence[bool], planned: int) -> int:
    """What all processes do with a step of a class that is traced: as written, if one of them cannot launch it.

    `given` says which parameters have a gradient. Each process asks once a step, when it knows what is `planned`:
    before the first operation that needs the others, or at the end. So none waits for one that does not come; and what
    is stored of a state is the same in all.

    Raises:
        ValueError: a process raises, or they have gradients of other parameters and are to run as written.
    """
    told: dict[tuple[Between, ...], list[bool]] = {g: [] for g in map(mesh_of, params) if g}
    for p, has_gradient in zip(params, given, strict=True):
        if groups := mesh_of(p):
            told[groups].append(has_gradient)
    same = True
    for groups, has_gradients in sorted(told.items(), key=lambda item: math.prod(map(len, item[0]))):
        low, high = ends_in(groups, [planned, crc32(repr(has_gradients).encode()) if same else _DIFFERENT])
        planned, same = int(high[0]), same and bool(low[1] == high[1])
    if planned == RAISES:
        raise ValueError("another process that has parts or replicas of a parameter rejects this step, or raises in it")
    if planned == AS_WRITTEN and not same:
        raise ValueError(DIFFERENT)
    return planned


def _told(jobs: Sequence[Job], places: dict[int, int]) -> Iterator[tuple[tuple[Between, ...], Any]]:
    """For each parameter of jobs the groups of its mesh, and what their processes have to do alike."""
    for job in jobs:
        kinds = [stage.kind for stage in job.update.stages]
        for p in job.params:
            yield mesh_of(p), (job.backend.name, job.settings.nonfinite, kinds, places[id(p)])
