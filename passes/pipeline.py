"""The pipeline: the passes that turn a captured update into explicit-rounding form, which a backend can run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from collage_neuron.numerics.formats import Format
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.ir.verify import verify
from collage_neuron.passes.rewrite.dead_code import EliminateDeadCode
from collage_neuron.passes.rewrite.expand import Expand
from collage_neuron.passes.rewrite.instrument import Instrument
from collage_neuron.passes.rewrite.round_and_store import Store
from collage_neuron.passes.rewrite.split_stages import Cut


class Pass(Protocol):
    """A rewrite of an update. The first line of its docstring says what it does; its fields are its options."""

    @property
    def name(self) -> str:
        """The name under which its result is printed."""

    def __call__(self, update: Any, /) -> Update:
        """Returns the rewritten update. The first pass receives the captured update, each later one an `Update`."""


def passes_of(
    formats: Mapping[str, Format],
    arithmetic: str,
    measured: frozenset[str] = frozenset(),
    far: frozenset[Scalar] = frozenset(),
) -> tuple[Pass, ...]:
    """The pipeline, in order. With names in `measured` the update also measures these values.

    `far` are the factors that are nearer to 0 than to 1 (`Update.far_in`).
    """
    return (
        Expand(formats, arithmetic, measured, far),
        Store(),  # after everything that is added to a value, so that it is rounded once
        *((Instrument(),) if measured else ()),  # after `store`, since it compares stored values with wanted ones
        EliminateDeadCode(),  # since rules and `instrument` write more than is read
        Cut(),  # last, since all others write to one stage
    )


def run_passes(captured: Captured, pipeline: Sequence[Pass]) -> Iterator[tuple[Pass, Update]]:
    """Yields each pass with its result, after verifying that."""
    update: Any = captured
    for each in pipeline:
        update = each(update)
        verify(update)
        yield each, update


_updates: dict[Any, Update] = {}


def rewrite(
    captured: Captured,
    formats: Mapping[str, Format],
    arithmetic: str,
    measured: frozenset[str] = frozenset(),
    far: frozenset[Scalar] = frozenset(),
) -> Update:
    """The result of all passes for a captured update; computed once for equal updates."""
    # Every step asks: hashing names and formats, which are hashed as objects, takes a third of the time of passes.
    key = captured.text, tuple(formats.items()), arithmetic, measured, far
    found = _updates.get(key)
    if found is None:
        *_, (_, found) = run_passes(captured, passes_of(formats, arithmetic, measured, far))
        _updates[key] = found
    return found
