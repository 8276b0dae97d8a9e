"""Describes what is gained and lost when an optimizer with states changes its strategy."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.rounding import digits
from collage_neuron.numerics.strategies import formats_of_shape
from collage_neuron.states import words
from collage_neuron.states.format_record import record_of
from collage_neuron.states.sharding import local
from collage_neuron.states.store import is_host_scalar, read_fp32


def describe(
    index: int, old: Mapping[str, Format], new: Mapping[str, Format], moved: Mapping[str, float]
) -> str | None:
    """What a group gains and loses when its formats change from `old` to `new`; None if nothing does.

    `moved` says by how much the values change (`rounding_of`).
    """
    changed = {name: (digits(old[name]), digits(fmt)) for name, fmt in new.items() if name in old}
    gained = [_change(n, old, new) for n, (before, after) in changed.items() if after > before]
    lost = [
        _change(n, old, new) + _measured(moved.get(n, 0.0))
        for n, (before, after) in changed.items()
        if after < before or moved.get(n)
    ]
    if not gained and not lost:
        return None
    size = [words.bytes_of(formats) + torch.bfloat16.itemsize for formats in (old, new)]  # and the gradient
    text = f"param_groups[{index}] goes from {size[0]} to {size[1]} bytes per parameter. "
    text += f"Gained: {', '.join(gained) or 'nothing'}"
    text += "; what was rounded away before does not come back. " if gained else ". "
    return text + f"Lost: {', '.join(lost) or 'nothing, every value is carried over exactly'}."


def rounding_of(
    optimizer: Optimizer, params: Iterable[torch.Tensor], old: Mapping[str, Format], new: Mapping[str, Format]
) -> dict[str, float]:
    """By how much storing the values of `params` and their states in other formats changes them.

    The norm of the changes over the norm of the values, by name. What both formats store alike is not read.
    """
    names = [name for name, fmt in new.items() if name in old and not fmt.reads_as(old[name])]
    found = dict.fromkeys(names, (0.0, 0.0))
    for p in (p for p in params if names and p.dtype == torch.bfloat16):  # others stay fp32
        state, record = optimizer.state.get(p, {}), record_of(optimizer, p)
        for name in names:
            if name == "param" or (name in state and not is_host_scalar(state[name], p)):
                value = local(read_fp32(p, state, name, record)).cpu()
                found[name] = _added(found[name], value, _rounded(formats_of_shape(new, p.dim())[name], name, value))
    return {name: math.sqrt(error / total) if total else 0.0 for name, (error, total) in found.items()}


def _rounded(fmt: Format, name: str, value: torch.Tensor) -> torch.Tensor:
    return words.decode(fmt, words.settled(fmt, name, value), name)


def _added(sums: tuple[float, float], value: torch.Tensor, rounded: torch.Tensor) -> tuple[float, float]:
    both = value.isfinite() & rounded.isfinite()
    error, size = (torch.where(both, x, 0.0).double().square().sum() for x in (rounded - value, value))
    return sums[0] + float(error), sums[1] + float(size)


def _change(name: str, old: Mapping[str, Format], new: Mapping[str, Format]) -> str:
    before, after = old[name], new[name]
    errors = f"rounded to 2**-{digits(after)} instead of 2**-{digits(before)}"
    return f"{name} in {after.name} instead of {before.name} ({errors})"


def _measured(moved: float) -> str:
    return f", which changes its values now by {moved:.2g} of their norm" if moved else ""
