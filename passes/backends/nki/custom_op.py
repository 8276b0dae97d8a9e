"""The operator `collage_neuron::update_tensors`, which runs a kernel in a graph, without side effects.

torch-xla rejects operators that change their arguments, so this one returns what the kernel wrote. In torch-xla's graph
the kernel becomes a custom call; `copy_` of the results into the old tensors lets the call reuse their buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.passes.backends.nki.source_cache import load
from collage_neuron.passes.backends.nki.target import DIALECTS


class Program(NamedTuple):
    """A kernel that is registered with the operator under a key."""

    name: str
    source: str
    written: Sequence[int]
    """The indices of the tensors that it changes and returns."""


KEPT = 64
"""Programs that are kept: a step with other parameters that have gradients is another program."""

_programs: dict[str, Program] = {}


def register(key: str, program: Program) -> None:
    """Registers a kernel with the operator, which forgets the one that was registered longest ago beyond `KEPT`."""
    _programs.pop(key, None)
    _programs[key] = program
    if len(_programs) > KEPT:
        del _programs[next(iter(_programs))]


@lru_cache(KEPT)
def function(key: str) -> Callable[..., Any]:
    """The kernel function, imported when it first runs."""
    program = _programs[key]
    loaded: Callable[..., Any] = getattr(load(program.name, program.source), program.name)
    return loaded


def _results(returned: Any) -> list[Tensor]:
    return list(returned) if isinstance(returned, (tuple, list)) else [returned]


@torch.library.custom_op("collage_neuron::update_tensors", mutates_args=())
def update_tensors(tensors: Sequence[Tensor], scalars: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """Runs a registered kernel on `tensors` and the `[128, K]` scalar inputs; returns what it writes, in order."""
    raise NotImplementedError(f"no NKI kernel runs on {tensors[0].device}")


@update_tensors.register_kernel("cpu")
def _(tensors: Sequence[Tensor], scalars: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """Simulated, by `nki.simulate`, on copies."""
    nki = DIALECTS["nki"]()
    simulated = function(kernel) if nki is None else nki.simulate(function(kernel))
    return [r.clone() for r in _results(simulated(*(t.clone() for t in tensors), *scalars))]


@update_tensors.register_fake
def _(tensors: Sequence[Tensor], scalars: Sequence[Tensor], kernel: str) -> list[Tensor]:
    return [torch.empty_like(tensors[i]) for i in _programs[kernel].written]


@update_tensors.register_kernel(("xla", "privateuseone"))
def _(tensors: Sequence[Tensor], scalars: Sequence[Tensor], kernel: str) -> list[Tensor]:
    """Runs the kernel through the device plug-in; not verified for TorchNeuron's `neuron` device."""
    return _results(function(kernel)(*tensors, *scalars))
