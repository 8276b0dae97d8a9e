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
from collage_neuron.passes.rewrite.dead_code import EliminateDeadCode
from collage_neuron.passes.rewrite.expand import Expand
from collage_neuron.passes.rewrite.instrument import Instrument
from collage_neuron.passes.rewrite.store import Store


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


class Pass(Protocol):
    """Rewrites an update, and says so in the first line of its docstring. Its options are its fields."""

    @property
    def name(self) -> str:
        """What it is called where its result is printed."""

    def __call__(self, update: Any, /) -> Update:
        """The update that comes next: the first pass is given the captured one, each other one what came before it."""


def passes(formats: Mapping[str, Format], arithmetic: str, measured: frozenset[str] = frozenset()) -> tuple[Pass, ...]:
    """The pipeline, in order. With names in `measured` the update also measures these values."""
    return (
        Expand(formats, arithmetic, measured),
        Store(),  # after all that is added to a value: it is rounded once
        *((Instrument(),) if measured else ()),  # compares what is stored with what was wanted
        EliminateDeadCode(),  # last: rules write more than is read, and so does what instruments
    )


def run_passes(captured: Captured, pipeline: Sequence[Pass]) -> Iterator[tuple[Pass, Update]]:
    """Each pass with the update that it made, which is verified."""
    update: Any = captured
    for each in pipeline:
        update = each(update)
        verify(update)
        yield each, update


_updates: dict[Any, Update] = {}


def rewrite(
    captured: Captured, formats: Mapping[str, Format], arithmetic: str, measured: frozenset[str] = frozenset()
) -> Update:
    """What the last of `passes` makes of a captured update; found once for equal updates."""
    pipeline = passes(formats, arithmetic, measured)
    key = captured.text, pipeline
    if key not in _updates:
        *_, (_, _updates[key]) = run_passes(captured, pipeline)
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
