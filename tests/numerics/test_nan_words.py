"""What docs/development/formats.md promises of a NaN: it is stored and read as one whatever its further words hold."""

from __future__ import annotations

import pytest
import torch

from collage_neuron.numerics.formats import FORMATS
from collage_neuron.states import word_encoding

NANS = torch.tensor(
    [s << 31 | 0x7F800000 | n for s in (0, 1) for n in (1, 0x8000, 0xFFFF, 0x10000, 0x400000, 0x7FFFFF)]
)
HIGH = torch.tensor([s << 15 | 0x7F80 | n for s in (0, 1) for n in range(1, 0x80)]).to(torch.int16)
"""Every NaN of bf16."""


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_is_stored_as_one(name: str) -> None:
    fmt = FORMATS[name]
    values = torch.ones(NANS.numel(), 128)
    values[:, 77] = NANS.to(torch.int32).view(torch.float32)
    stored = word_encoding.encode(fmt, "param", values)
    read = word_encoding.decode(fmt, stored)
    if fmt.is_coded:
        assert not stored[1].isfinite().any()
        assert read.isnan().all(), "the whole block is lost"
    else:
        assert stored[0][:, 77].isnan().all()
        assert read[:, 77].isnan().all()
        assert read.isnan().sum() == NANS.numel()


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if len(f.components) > 1 and not f.is_coded])
def test_words_beside_a_nan_say_nothing(name: str) -> None:
    """Integers are added to the bits, so that their ends are enough; of floats, all of bf16 and their neighbours."""
    low = FORMATS[name].components[1].type.dtype
    if low.is_floating_point:
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(low)
    else:
        ends = torch.iinfo(low)
        every = torch.tensor([ends.min, ends.min + 1, -1, 0, 1, ends.max - 1, ends.max]).to(low)
    high = HIGH.view(torch.bfloat16)[:, None].expand(-1, every.numel())
    assert word_encoding.decode(FORMATS[name], [high, every.expand(HIGH.numel(), -1)]).isnan().all()
