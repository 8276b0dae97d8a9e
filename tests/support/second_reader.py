"""Runs the text of a kernel as a second reader of the documentation takes it (`beta1_reading`, `nki_reading`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import beta1_reading
import nki_reading
import numpy as np
import torch
from beta1_reading import WORDS, Reading, Tensor

from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.lower import Kernel
from collage_neuron.passes.backends.nki.tiling import Cut


def tensor(x: torch.Tensor) -> Tensor:
    """A copy of a torch tensor, in HBM."""
    dtype = str(x.dtype).removeprefix("torch.")
    words = x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]).numpy().copy()
    return nki_reading.InHbm(words.view(WORDS[dtype]), dtype)


def back(x: Tensor, shape: Sequence[int]) -> torch.Tensor:
    signed = x.raw.view(f"i{x.raw.itemsize}").copy()
    return torch.from_numpy(signed).view(getattr(torch, x.dtype)).view(tuple(shape))


def _read(k: Kernel, source: str, drawn: Sequence[np.ndarray], core: int, cores: int) -> Reading:
    if k.dialect == "nki":
        return nki_reading.read(source, k.target, drawn, core, cores)
    return beta1_reading.read(source, drawn)


def results(
    k: Kernel, components: Mapping[str, torch.Tensor], vector: torch.Tensor, cut: Cut | None = None,
    drawn: Sequence[np.ndarray] = (), source: str = "", order: Sequence[int] = (0,),
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What the text of a kernel makes of copies of the components, by key, as the second reader takes it.

    `order` are the cores that run it, one after the other; what they draw is in the same order.
    """
    like = next(components[a.key] for a in k.arguments if not a.block and a.key in components)
    cut = cut or k.cut(like.shape)
    room = {a.key: torch.zeros(like.shape, dtype=getattr(torch, a.dtype)) for a in k.arguments}
    room |= {MEASURES: torch.zeros(k.totals(like.shape, cut))} if MEASURES in room else {}
    given = room | {key: components[key] for key in components if key in room}
    arguments = [tensor(given[a.key]) for a in k.arguments]
    numbers = [tensor(k.scalar_input(vector))] if k.plan.columns else []
    numbers += [tensor(torch.ones(1, len(order), dtype=torch.int32))] if k.plan.draws else []
    for core in order:
        reading = _read(k, source or k.source, drawn, core, len(order))
        with np.errstate(all="ignore"):
            returned = reading.module[k.name](*arguments, *numbers, *k.cut_arguments(like.numel(), cut))
        drawn = reading.drawn
    returned = returned if isinstance(returned, tuple) else (returned,)
    assert not drawn
    return {key: back(x, given[key].shape) for key, x in zip(k.outputs, returned, strict=True)}
