"""Block formats: every code at several scales, against exact numbers; chances; what is stored again stays."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from exact import fractions, update_of
from torch import Tensor

from collage_neuron.errors import VerificationError
from collage_neuron.numerics.block_formats import BLOCK, ROOTS
from collage_neuron.numerics.eft import block_max, round_to
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import verify

# --- codes, and their values from the definitions ---------------------------------------------------------------------

WIDE = ("u16q8", "u16q16")
"""Codes of 16 bits without a sign, stored as an int16's."""
NAMES = (*ROOTS,)
UNSIGNED = ("u16q8", "u16q16", "u8q16")
LEAST = {name: fmt.least for name, fmt in ROOTS.items()}
"""The smallest power of two of a block."""


def codes(name: str) -> Tensor:
    """Every code that is ever stored."""
    most, floor = int(ROOTS[name].most), int(ROOTS[name].floor)
    if ROOTS[name].signed:
        return torch.arange(-most, most + 1)
    return torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(floor, most + 1)])


def large(name: str) -> tuple[int, int]:
    """The smallest and the largest code of the largest element of a block."""
    return int(ROOTS[name].low), int(ROOTS[name].most)


def as_words(name: str, numbers: Tensor) -> Tensor:
    """Codes as the first words of the format."""
    return numbers.to(FORMATS[name].components[0].type.dtype)


def as_codes(name: str, word: Tensor) -> Tensor:
    """First words as codes: the inverse of `as_words`."""
    return word.long() & 0xFFFF if name in WIDE else word.long()


def blocks(name: str, power: float) -> list[Tensor]:
    """Every code, each in a block whose largest element has one of its codes."""
    every, (low, high) = codes(name), large(name)
    block = torch.zeros(len(every), 3, dtype=torch.int64)
    block[:, 0], block[:, 1] = every, low + torch.arange(len(every)) % (high - low + 1)
    return [as_words(name, block), torch.full(block.shape, power)]


def exact(name: str, code: int | Fraction) -> Fraction:
    """The value of a code, in units of its block's power of two, from the definition; of roots, between codes too."""
    curve = ROOTS[name].curve
    q, origin = 1 << curve.halvings, Fraction(curve.origin)
    root = abs(Fraction(code)) * Fraction(curve.step) + origin
    size: Fraction = (root**q - origin**q) / 2
    return -size if code < 0 else size


STOCHASTIC = [name for name in NAMES if FORMATS[name].draw is not None]

names = pytest.mark.parametrize("name", NAMES)
stochastic = pytest.mark.parametrize("name", STOCHASTIC)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.int32)


# --- values ---------------------------------------------------------------------------------------------------------


@names
def test_every_code_is_read_as_its_definition_says(name: str) -> None:
    """To a few last places of fp32: products of roots are rounded. All scales alike."""
    block, power = blocks(name, 1.0)
    value = FORMATS[name].decode([block, power])
    bound = Fraction(1, 2**19)
    step = 1 if len(codes(name)) < 1000 else 19
    for code, found in zip(codes(name)[::step].tolist(), fractions(value[::step, 0]), strict=True):
        wanted = exact(name, code)
        assert abs(found - wanted) <= bound * abs(wanted)
    for scale in (LEAST[name], 2.0**-20, 2.0**127):
        assert torch.equal(bits(FORMATS[name].decode([block, power * scale])), bits(value * scale))


@names
def test_what_was_decoded_is_encoded_to_the_same_words(name: str) -> None:
    """Every code, with every code of a block's largest element, at the smallest scale, the largest and others."""
    fmt = FORMATS[name]
    for power in (LEAST[name], 1.0, 2.0**-20, 2.0**127):
        block = blocks(name, power)
        value = fmt.decode(block)
        again = fmt.encode(value)
        assert torch.equal(as_codes(name, again[0]), as_codes(name, block[0]))
        assert torch.equal(again[1], block[1])
        assert torch.equal(value.signbit(), as_codes(name, block[0]) < 0)  # -0 too, where there is one
        assert (value.abs()[value != 0] >= 2.0**-126).all()


def boundary(name: str, low: Tensor, high: Tensor) -> Tensor:
    """The fp32 number next to the middle of two codes: of roots in the middle of the codes, of floats of the values."""
    middle: Tensor
    if name in ROOTS:
        c = ROOTS[name].curve
        sides = (((low + high).double().abs() / 2 * c.step + c.origin) ** 2**c.halvings - c.linear) / 2
        middle = sides * (low + high).sign()
    else:
        one = torch.ones(len(low), 1)
        a, b = (FORMATS[name].decode([as_words(name, code[:, None]), one])[:, 0].double() for code in (low, high))
        middle = (a + b) / 2
    return middle.float()


@names
def test_every_code_begins_where_it_is_the_nearest(name: str) -> None:
    """The numbers around the middle of each pair of neighbours, against exact rationals; other scales; other signs."""
    every = codes(name)
    # What is not 0 never becomes 0.
    every = every[every >= (ROOTS[name].floor if name in ROOTS else 0)]
    low, high = every[:-1], every[1:]
    middle = boundary(name, low, high)
    below, above = (torch.nextafter(middle, torch.full_like(middle, to)) for to in (-torch.inf, torch.inf))
    x = torch.stack([below, above, middle, torch.full_like(middle, 1.5)], -1)
    word, power = FORMATS[name].encode(x)
    assert (power == 1.0).all()
    code = as_codes(name, word)
    assert ((code[:, :3] == low[:, None]) | (code[:, :3] == high[:, None])).all()
    if name in ROOTS:
        for of, found, n in zip(fractions(x[:, :3]), code[:, :3].flatten().tolist(), range(3 * len(low)), strict=True):
            if n % (1 if len(low) < 1000 else 53) == 0:
                assert is_nearest_root(name, of, found)
    else:
        assert (code[:, 0] == low).all()
        assert (code[:, 1] == high).all()
        assert torch.equal(code[:, 2], torch.where(low % 2 == 0, low, high))
    for scale in (2.0**-40, 2.0**-20, 2.0**127):
        again = FORMATS[name].encode(x * scale)
        assert torch.equal(as_codes(name, again[0]), code)
        assert (again[1] == scale).all()
    if name not in UNSIGNED:
        opposite = FORMATS[name].encode(-x)
        assert torch.equal(FORMATS[name].decode(opposite), -FORMATS[name].decode([word, power]))


SLACK = Fraction(1, 64)
"""What the roundings of roots may move a code by: 3.75 units of 2**-24 of at most 65 536.

Those from an origin on are 4 units of roots up to 1.1, of which 67 650 codes are 1: 0.0177 where none cancels.
"""


def is_nearest_root(name: str, x: Fraction, code: int | Fraction, away: Fraction = Fraction(1, 2) + SLACK) -> bool:
    """Returns True if the root of x, in codes, is at most `away` from `code`."""
    return exact(name, max(code - away, Fraction(0))) <= x <= exact(name, code + away)


@names
def test_what_was_stored_is_stored_again_without_a_change(name: str) -> None:
    fmt, g = FORMATS[name], torch.Generator().manual_seed(0)
    x = torch.rand(500, 300, generator=g) ** 8 * torch.exp(15 * torch.randn(500, 1, generator=g))
    x = x if name in UNSIGNED else x * (1 - 2 * (torch.rand(x.shape, generator=g) < 0.5).float())
    x[:, ::7], x[:3] = 0, torch.tensor([1.0, 2.0, 2.0**-30])[:, None]
    random = torch.randint(0, 2**16, x.shape, generator=g, dtype=torch.int32)
    for stored in [fmt.encode(x)] + ([] if fmt.draw is None else [fmt.draw(x, random)]):
        value = fmt.decode(stored)
        assert torch.equal(fmt.decode(fmt.encode(value)), value)
        assert fmt.error is not None
        assert ((value - x).abs() <= 1.01 * fmt.error(x.abs())).all()
        if name in UNSIGNED:
            assert torch.equal(value != 0, x != 0)  # nothing that is not 0 becomes 0


@stochastic
def test_what_was_decoded_is_drawn_as_the_same_words(name: str) -> None:
    """By every code of what is drawn between values, whatever the random numbers."""
    draw = FORMATS[name].draw
    assert draw is not None
    for power in (LEAST[name], 1.0, 2.0**100):
        block = blocks(name, power)
        value = FORMATS[name].decode(block)
        for random in (0, 1, 2**15, 2**16 - 1):
            again = draw(value, torch.full(value.shape, random, dtype=torch.int32))
            assert torch.equal(as_codes(name, again[0]), as_codes(name, block[0]))
            assert torch.equal(again[1], block[1])


# --- chances --------------------------------------------------------------------------------------------------------


@stochastic
def test_chances_of_all_random_numbers(name: str) -> None:
    """All 65 536 random numbers for each value: so many go up, by one code, and they are the first or the last ones."""
    fmt = FORMATS[name]
    assert fmt.draw is not None
    for value in (1.3, 1.00001, 1.874, 0.7312, 3e-4, 1e-9, 2.0**-32 * 1.7):
        x = torch.full((2**16, 2), value)
        x[:, 1] = 1.5
        word, power = fmt.draw(x, torch.arange(2**16, dtype=torch.int32)[:, None].expand(-1, 2))
        assert (power == 1.0).all()
        found = as_codes(name, word[:, 0])
        assert ((found - found.min()) <= 1).all()
        assert int((found[1:] != found[:-1]).sum()) <= 1
        ups = torch.tensor([int((found > found.min()).sum())])
        assert_chance(name, x[:1, 0], found.min()[None], ups)


@stochastic
def test_the_chance_of_every_code(name: str) -> None:
    """A number between each code and the next one; how many random numbers go up is found by bisection."""
    every = codes(name)[1:]  # what is not 0 never becomes 0
    repeats = 1 if len(every) > 1000 else 200
    low, high = every[:-1].repeat(repeats), every[1:].repeat(repeats)
    at = torch.rand(len(low), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values = [FORMATS[name].decode([as_words(name, c[:, None]), torch.ones(len(c), 1)])[:, 0] for c in (low, high)]
    x = (values[0] + (values[1].double() - values[0]) * (0.02 + 0.96 * at)).float()
    ups = counted(lambda r: drawn(name, x, r) == high)
    assert torch.equal(drawn(name, x, torch.zeros_like(low)).clamp(max=low), low)
    assert_chance(name, x, low, ups)


def drawn(name: str, x: Tensor, random: Tensor) -> Tensor:
    """The codes of numbers, each in a block whose power of two is 1."""
    draw = FORMATS[name].draw
    assert draw is not None
    word, power = draw(torch.stack([x, torch.full_like(x, 1.5)], -1), random.to(torch.int32)[:, None].expand(-1, 2))
    assert (power == 1.0).all()
    return as_codes(name, word[:, 0])


def counted(up: Callable[[Tensor], Tensor]) -> Tensor:
    """How many of the random numbers 0 to 65 535 go up, if those that do are the first or the last ones."""
    low = torch.zeros_like(up(torch.tensor([0])), dtype=torch.int64)
    first = up(low)
    high = low + 2**16  # the first number with the other result lies above low, and is at most this
    for _ in range(16):
        middle = (low + high) // 2
        same = up(middle) == first
        low, high = torch.where(same, middle, low), torch.where(same, high, middle)
    return torch.where(first, high, 2**16 - high)


def assert_chance(name: str, x: Tensor, low: Tensor, ups: Tensor) -> None:
    """The chance is the place between the neighbours' values as they are read, so that the mean is exact."""
    x, low, ups = (each[:: 11 if len(x) > 20_000 else 1] for each in (x, low, ups))
    one = torch.ones(len(low), 1)
    values = (fractions(FORMATS[name].decode([as_words(name, c[:, None]), one])[:, 0]) for c in (low, low + 1))
    for of, up, below, above in zip(fractions(x), ups.tolist(), *values, strict=True):
        assert abs((of - below) / (above - below) - Fraction(up, 2**16)) <= Fraction(1, 2**16)


# --- decay ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("b", [0.9, 0.97])
@pytest.mark.parametrize("name", ["i8q4", "i8q8"])
def test_an_average_of_8_bits_decays_to_zero_at_its_rate(name: str, b: float) -> None:
    """To nearest i8q4 would stall, at 5e-4 of the maximum for .9 and .05 for .97, while second moments decay."""
    g = torch.Generator().manual_seed(0)
    first = torch.rand(30, BLOCK, generator=g) * 0.5
    first[:, 0] = 1.0
    steps, x = round(1 / (1 - b)), first
    for step in range(30 * steps):
        x = torch.cat([first[:, :1], x[:, 1:] * b], 1)
        x = ROOTS[name].decode(ROOTS[name].draw(x, torch.randint(0, 2**16, x.shape, generator=g, dtype=torch.int32)))
        if step + 1 in (steps, 5 * steps):
            assert x[:, 1:].sum() == pytest.approx(b ** (step + 1) * first[:, 1:].sum().item(), rel=0.05)
    assert (x[:, 1:] == 0).all()


QUOTIENTS = (
    ("i16q4", "u16q8", 0.9, 2e-6), ("i16q4", "u16q8", 0.95, 4e-5), ("i16q4", "u16q8", 0.98, 2e-3),
    ("i16q4", "u16q8", 0.99, 3e-2),
    ("i16q8", "u16q16", 0.9, 2e-9), ("i16q8", "u16q16", 0.99, 5e-8), ("i16q8", "u16q16", 0.999, 1.0),
)  # fmt: skip


@pytest.mark.parametrize(("name", "second", "b", "bound"), QUOTIENTS)
def test_where_an_average_stalls_its_quotient_is_small(name: str, second: str, b: float, bound: float) -> None:
    """Every code: the largest that stays when its value is times b, over the root of the smallest second moment."""
    code = torch.arange(6000, dtype=torch.int16)
    block, power = torch.stack([code, torch.full_like(code, large(name)[1])], -1), torch.ones(6000, 2)
    value = FORMATS[name].decode([block, power])
    value[:, 0] *= b
    stalled = code[FORMATS[name].encode(value)[0][:, 0] == code].max()
    assert int(stalled) < 5000
    least = ROOTS[second].decode([torch.full((1,), int(ROOTS[second].floor)), torch.ones(1)])
    assert (exact(name, int(stalled)) / 2) / (float(least) / 2) ** 0.5 < bound


# --- ends -----------------------------------------------------------------------------------------------------------


@names
def test_a_block_with_what_is_not_finite_or_has_no_code_is_told(name: str) -> None:
    for bad in (torch.inf, torch.nan, -1.0) if name in UNSIGNED else (torch.inf, -torch.inf, torch.nan):
        x = torch.ones(1, 2 * BLOCK)
        x[0, 3] = bad
        fmt = FORMATS[name]
        value = fmt.decode(fmt.encode(x))
        assert value[0, :BLOCK].isnan().all()
        assert torch.equal(value[0, BLOCK:], fmt.decode(fmt.encode(torch.ones(BLOCK))))


@names
def test_what_is_finite_is_stored_as_finite(name: str) -> None:
    """Blocks whose largest elements are fp32's last ones, with small ones beside them."""
    ends = torch.tensor([1.0, 1.5, 1.75, 1.8749999, 1.875, 1.8750001, 1.9375, 2 - 2**-11, 2 - 2**-23]) * 2.0**127
    x = torch.stack([ends, torch.full_like(ends, 2.0**100), torch.full_like(ends, 2.0**-149)], -1)
    x = x if name in UNSIGNED else torch.cat([x, -x])  # a signed integer has one negative number more
    fmt = FORMATS[name]
    stored = [fmt.encode(x)]
    if fmt.draw is not None:
        stored += [fmt.draw(x, torch.full(x.shape, n, dtype=torch.int32)) for n in (0, 2**16 - 1)]
    for value in map(fmt.decode, stored):
        assert value.isfinite().all()
        assert fmt.error is not None
        assert ((value - x).abs().double() <= 1.01 * fmt.error(x.abs()).double()).all()
        assert name not in UNSIGNED or (value > 0).all()  # nothing that is not 0 becomes 0


@names
def test_a_block_of_zeros_and_of_subnormal_numbers(name: str) -> None:
    fmt = FORMATS[name]
    word, power = fmt.encode(torch.tensor([0.0, 0.0]))
    assert (power == LEAST[name]).all()
    assert fmt.decode([word, power]).tolist() == [0.0, 0.0]
    tiny = fmt.decode(fmt.encode(torch.tensor([2.0**-149, 2.0**-127])))
    assert ((tiny == 0) | (tiny >= 2.0**-126)).all()
    assert name not in UNSIGNED or (tiny > 0).all()


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
