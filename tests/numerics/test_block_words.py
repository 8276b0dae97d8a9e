"""Block formats: every code at several scales, against exact numbers; chances; what is stored again stays."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from exact import fractions, update_of
from torch import Tensor

from collage_neuron.errors import VerificationError
from collage_neuron.numerics.block_words import BLOCK, I8Q4, I16Q4, U16Q8, UE5M3
from collage_neuron.numerics.eft import block_max, round_to
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import verify

CODES = {
    "i16q4": torch.arange(-(2**15) + 1, 2**15),
    "i8q4": torch.arange(-127, 128),
    "u16q8": torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(int(U16Q8.FLOOR), int(U16Q8.most) + 1)]),
    "ue5m3": torch.arange(256),
}
LARGE = {
    "i16q4": (27554, 32767),
    "i8q4": (107, 127),
    "u16q8": (int(U16Q8.low), int(U16Q8.most)),
    "ue5m3": (248, 255),
}
"""The smallest and the largest code of the largest element of a block."""
LEAST = {"i16q4": I16Q4.LEAST, "i8q4": I8Q4.LEAST, "u16q8": U16Q8.LEAST, "ue5m3": UE5M3.LEAST}

names = pytest.mark.parametrize("name", CODES)


def words(name: str, power: float) -> list[Tensor]:
    """Every code, each in a block whose largest element has one of its codes."""
    codes, (low, high) = CODES[name], LARGE[name]
    block = torch.zeros(len(codes), 3, dtype=torch.int64)
    block[:, 0], block[:, 1] = codes, low + torch.arange(len(codes)) % (high - low + 1)
    dtype = FORMATS[name].components[0].type.dtype
    return [block.to(dtype), torch.full(block.shape, power)]


def exact(name: str, code: int) -> Fraction:
    """The value of a code, in units of its block's power of two, from the definition."""
    if name == "ue5m3":
        exponent, mantissa = divmod(code, 8)
        return Fraction(8 * (exponent > 0) + mantissa, 8) * Fraction(2) ** (max(exponent, 1) - 31)
    if name == "u16q8":
        return 2 * (Fraction(code) / Fraction(U16Q8.codes)) ** 8
    codes = I16Q4.codes if name == "i16q4" else I8Q4.codes
    return 2 * (Fraction(code) / Fraction(codes)) ** 4 * (-1 if code < 0 else 1)


@names
def test_every_code_is_read_as_its_definition_says(name: str) -> None:
    """To a few last places of fp32: products of roots are rounded; the small floats are exact."""
    block, power = words(name, 2.0**-10)
    value = FORMATS[name].decode([block, power])[:, 0]
    step = max(len(CODES[name]) // 500, 1)
    for code, found in zip(CODES[name][::step].tolist(), fractions(value[::step]), strict=True):
        wanted = exact(name, code) / 2**10
        assert abs(found - wanted) <= (0 if name == "ue5m3" else Fraction(1, 2**20)) * abs(wanted)


@names
def test_what_was_decoded_is_encoded_to_the_same_words(name: str) -> None:
    """Every code, with every code of a block's largest element, at the smallest scale, the largest and others."""
    fmt = FORMATS[name]
    for power in (LEAST[name], 1.0, 2.0**-20, 2.0**100):
        block = words(name, power)
        again = fmt.encode(fmt.decode(block))
        assert all(torch.equal(a, b) for a, b in zip(again, block, strict=True))


@names
def test_what_was_stored_is_stored_again_without_a_change(name: str) -> None:
    fmt, g = FORMATS[name], torch.Generator().manual_seed(0)
    x = torch.rand(500, 300, generator=g) ** 8 * torch.exp(15 * torch.randn(500, 1, generator=g))
    x = x if name in ("u16q8", "ue5m3") else x * (1 - 2 * (torch.rand(x.shape, generator=g) < 0.5).float())
    x[:, ::7], x[:3] = 0, torch.tensor([1.0, 2.0, 2.0**-30])[:, None]
    random = torch.randint(0, 2**16, x.shape, generator=g, dtype=torch.int32)
    for stored in [fmt.encode(x)] + ([] if fmt.draw is None else [fmt.draw(x, random)]):
        value = fmt.decode(stored)
        assert torch.equal(fmt.decode(fmt.encode(value)), value)
        assert fmt.error is not None
        assert ((value - x).abs() <= 1.01 * fmt.error(x.abs())).all()
        if fmt.draw is not None:
            assert torch.equal(value != 0, x != 0)  # nothing that is not 0 becomes 0


@pytest.mark.parametrize("name", ["u16q8", "ue5m3"])
def test_chances_are_the_fraction_of_the_code(name: str) -> None:
    """All 65 536 random numbers for each value: so many go up, and by one code."""
    fmt = FORMATS[name]
    assert fmt.draw is not None
    for value in (1.3, 1.00001, 1.874, 0.7312, 3e-4, 1e-9, 2.0**-32 * 1.7):
        x = torch.full((2**16, 2), value)
        x[:, 1] = 1.5
        code, power = fmt.draw(x, torch.arange(2**16, dtype=torch.int32)[:, None].expand(-1, 2))
        assert (power == 1.0).all()
        found = code[:, 0].long() & 0xFFFF
        below, share = found.min(), (found > found.min()).double().mean().item()
        low, high = (exact(name, int(below) + up) for up in (0, 1))
        if name == "ue5m3":
            wanted = float((Fraction(float(x[0, 0])) - low) / (high - low))
        else:  # of the code
            wanted = (float(Fraction(float(x[0, 0])) / 2) ** 0.125 * U16Q8.codes) - int(below)
        assert share == pytest.approx(wanted, abs=2.0**-15 if name == "ue5m3" else 2.0**-6)
        assert found.max() <= below + 1


@names
def test_a_block_with_what_is_not_finite_or_has_no_code_is_told(name: str) -> None:
    for bad in (torch.inf, torch.nan) if name in ("i16q4", "i8q4") else (torch.inf, torch.nan, -1.0):
        x = torch.ones(1, 2 * BLOCK)
        x[0, 3] = bad
        fmt = FORMATS[name]
        value = fmt.decode(fmt.encode(x))
        assert not value[0, :BLOCK].isfinite().any()
        assert torch.equal(value[0, BLOCK:], fmt.decode(fmt.encode(torch.ones(BLOCK))))


@names
def test_what_is_finite_is_stored_as_finite(name: str) -> None:
    """Blocks whose largest elements are fp32's last ones, with small ones beside them."""
    ends = torch.tensor([1.0, 1.5, 1.75, 1.8749999, 1.875, 1.8750001, 1.9375, 2 - 2**-11, 2 - 2**-23]) * 2.0**127
    x = torch.stack([ends, torch.full_like(ends, 2.0**100), torch.full_like(ends, 2.0**-149)], -1)
    fmt = FORMATS[name]
    stored = [fmt.encode(x)]
    if fmt.draw is not None:
        stored += [fmt.draw(x, torch.full(x.shape, n, dtype=torch.int32)) for n in (0, 2**16 - 1)]
    for value in map(fmt.decode, stored):
        assert value.isfinite().all()
        assert fmt.error is not None
        assert ((value - x).abs().double() <= 1.01 * fmt.error(x).double()).all()


def test_the_maximum_of_a_block_does_not_cross_rows() -> None:
    x = torch.tensor([[1.0, -3.0, 2.0, 0.5, -0.25], [7.0, 0.0, torch.nan, 1.0, 4.0]])
    assert block_max(x, 2)[0].tolist() == [3, 3, 2, 2, 0.25]
    assert block_max(x, 2)[1].isnan().tolist() == [False, False, True, True, False]
    assert block_max(x[:, :0], 2).shape == (2, 0)


# --- verify ---------------------------------------------------------------------------------------------------------


def _storing(fmt_name: str, changed: bool) -> Update:
    fmt = FORMATS[fmt_name]
    update = update_of(["x"], lambda x: [*_words(fmt_name, x, changed)], ["int16", "fp32"])
    keys = tuple(fmt.keys("exp_avg"))
    return update.with_body(update.only_stage.body, outputs=keys, formats={"exp_avg": fmt})


def _words(name: str, x: Tensor, changed: bool) -> list[Tensor]:
    return [round_to(x, "int16"), block_max(x, BLOCK // 2 if changed else BLOCK)]


def test_a_word_that_differs_within_its_block_is_rejected() -> None:
    verify(_storing("i16q4", changed=False))
    with pytest.raises(VerificationError, match="stored as exp_avg_scale, one word for 128 elements, and may differ"):
        verify(_storing("i16q4", changed=True))
