"""`Recording`: the result of recording a step: the update, its numbers, and the changes on the host."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collage_neuron.passes.ir.update import Captured


@dataclass(frozen=True)
class Recording:
    """One recorded step: the update, its numbers, and the host scalars after the step."""

    captured: Captured
    slots: list[float]
    scalars: dict[str, Any]
    """Host scalars of the parameter's state after the step (`step`, ...)."""
    group: dict[str, Any]
    """Entries of the parameter group that the step changed."""
    attributes: dict[str, Any]
    """Attributes of the optimizer that the step changed: numbers, and lists or dicts of them."""
    host: tuple[str, ...]
    """Other changes on the host, which a recording does not carry: objects, iterators, globals, generators."""
    asked: frozenset[str]
    """Attributes of the parameter that the step read, `shape` included: if they differ, recordings may differ."""
    following: Recording | None = None
    """The step after, if this one makes a state of the gradient and does not show what becomes of it."""
    compared: Recording | None = None
    """What is compared with other recordings of the same step, if this one was merged from several (`outcomes`)."""
    reads: bool = False
    """True if the step reads values from tensors (`.item()`), for numbers of the update."""
    recordings: int = 1
    """How often the step was recorded for it."""
