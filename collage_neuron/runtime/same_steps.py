"""Processes that have parts or replicas of parameters must take the same step, or each would wait for the others.

They cannot be trusted to: a parameter may have a gradient in one process only. So before anything is changed, they
compare what they are about to do: a step is launched by all of them, or runs as written in all, or all raise. Replicas
take part (HSDP): if one raised alone, the others would take the step, and have other weights from then on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

from collage_neuron.states.meshes import Between, ends_in, mesh_of

if TYPE_CHECKING:
    pass

_DIFFERENT = -1
"""What a process tells that knows of a difference already: no checksum is negative."""


DIFFERENT = (
    "the processes that have parts or replicas of a parameter are about to take different steps: they must have "
    "gradients of the same parameters, the same settings and the same backend, since their sums (norms, means) are "
    "added up; nothing was updated. Give parameters that a process did not use a gradient of zeros"
)


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
