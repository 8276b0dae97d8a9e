"""The pipeline: a captured update becomes something callable on the device of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import torch

from collage_neuron.numerics.formats import Format
from collage_neuron.passes.backends.nki.launch import run_step
from collage_neuron.passes.backends.nki.lower import check_update
from collage_neuron.passes.backends.nki.target import is_trainium, machine_of
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.backends.xla.lower import XlaUpdate
from collage_neuron.passes.ir.update import Batch, Captured, Update
from collage_neuron.passes.ir.verify import verify
from collage_neuron.passes.rewrite.expand import expand
from collage_neuron.passes.rewrite.instrument import measure


class Lowered(Protocol):
    """An update ready to run."""

    def __call__(self, components: Sequence[torch.Tensor], scalars: torch.Tensor) -> Sequence[torch.Tensor]:
        """New components from the old ones and the scalar vector."""


LOWERINGS: dict[str, Callable[[Update], Lowered]] = {"reference": ReferenceUpdate, "xla": XlaUpdate}
"""How an update in explicit-rounding form becomes callable, by backend."""

STEPS: dict[str, Callable[[Sequence[Batch]], Iterator[Sequence[torch.Tensor]]]] = {"nki": run_step}
"""Backends that take a step as a whole."""


def check_backend(choice: str) -> None:
    """Raises ValueError for the name of no backend."""
    if choice not in ("auto", *LOWERINGS, *STEPS):
        raise ValueError(f"unknown backend {choice!r}; choose auto, {', '.join([*LOWERINGS, *STEPS])}")


def backend_for(choice: str, device: torch.device) -> str:
    """The backend that runs updates of parameters on `device`; ValueError if `choice` cannot."""
    check_backend(choice)
    if choice == "auto":
        choice = "nki" if is_trainium(device) else "xla" if device.type == "xla" else "reference"
    if choice == "nki":
        machine_of(device)
    if choice == "xla" and device.type != "xla":
        raise ValueError(f"backend='xla' needs parameters on an XLA device, they are on {device}; use backend='auto'")
    return choice


def check_runs(backend: str, update: Update) -> None:
    """Raises UnsupportedUpdate if an update is of a kind that the backend cannot run."""
    if backend in STEPS:
        check_update(update)


_updates: dict[Any, Update] = {}


def rewrite(
    captured: Captured, formats: Mapping[str, Format], arithmetic: str, measured: frozenset[str] = frozenset()
) -> Update:
    """Expand, then verify; once for equal updates. With names in `measured` the update also measures these values."""
    key = (captured.text, tuple((name, fmt.name) for name, fmt in formats.items()), arithmetic, measured)
    if key not in _updates:
        update = expand(captured, formats, arithmetic, measured)
        verify(update)
        if measured:
            update = measure(update)
            verify(update)
        _updates[key] = update
    return _updates[key]


def execute(backend: str, batches: Sequence[Batch]) -> Iterator[Sequence[torch.Tensor]]:
    """The new components of every parameter, in order, each in the order of its `update.outputs`.

    After them come the vectors of sums and counts of an update that measures itself. Whoever writes the components back
    as they come needs room for those of one parameter, but on backends of `STEPS`.
    """
    if backend in STEPS:
        yield from STEPS[backend](batches)
        return
    for batch in batches:
        call = lower(batch.update, backend)
        scalars = batch.vector.to(batch.components[0][0].device)
        for components in batch.components:
            yield call(components, scalars)


@cache
def lower(update: Update, backend: str) -> Lowered:
    """The callable form of `update` on `backend`; made once."""
    return LOWERINGS[backend](update)
