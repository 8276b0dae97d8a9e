"""The pipeline: a captured update becomes one in explicit-rounding form, which a backend can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from collage_neuron.numerics.formats import Format
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.ir.verify import verify
from collage_neuron.passes.rewrite.dead_code import EliminateDeadCode
from collage_neuron.passes.rewrite.expand import Expand
from collage_neuron.passes.rewrite.instrument import Instrument
from collage_neuron.passes.rewrite.store import Store


class Pass(Protocol):
    """Rewrites an update, and says so in the first line of its docstring. Its options are its fields."""

    @property
    def name(self) -> str:
        """What it is called where its result is printed."""

    def __call__(self, update: Any, /) -> Update:
        """The update that comes next: the first pass is given the captured one, each other one what came before it."""


def passes_of(
    formats: Mapping[str, Format], arithmetic: str, measured: frozenset[str] = frozenset()
) -> tuple[Pass, ...]:
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
    """What the last of `passes_of` makes of a captured update; found once for equal updates."""
    pipeline = passes_of(formats, arithmetic, measured)
    key = captured.text, pipeline
    if key not in _updates:
        *_, (_, _updates[key]) = run_passes(captured, pipeline)
    return _updates[key]
