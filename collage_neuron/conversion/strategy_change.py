"""Describes what is gained and lost when an optimizer with states changes its strategy."""

from __future__ import annotations

from collections.abc import Mapping

from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.rounding import digits


def describe(index: int, old: Mapping[str, Format], new: Mapping[str, Format]) -> str | None:
    """What a group gains and loses when its formats change from `old` to `new`; None if they are the same."""
    changed = {name: (digits(old[name]), digits(fmt)) for name, fmt in new.items() if name in old}
    gained = [_change(n, old, new) for n, (before, after) in changed.items() if after > before]
    lost = [_change(n, old, new) for n, (before, after) in changed.items() if after < before]
    if not gained and not lost:
        return None
    size = [sum(fmt.bytes for fmt in formats.values()) for formats in (old, new)]
    text = f"param_groups[{index}] goes from {size[0]} to {size[1]} bytes a parameter (gradient not counted). "
    text += f"Gained: {', '.join(gained) or 'nothing'}"
    text += "; what was rounded away before does not come back. " if gained else ". "
    return text + f"Lost: {', '.join(lost) or 'nothing, every value is carried over exactly'}."


def _change(name: str, old: Mapping[str, Format], new: Mapping[str, Format]) -> str:
    before, after = old[name], new[name]
    errors = f"rounded to 2**-{digits(after)} instead of 2**-{digits(before)}"
    return f"{name} in {after.name} instead of {before.name} ({errors})"
