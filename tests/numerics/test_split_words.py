"""bf16 and an integer word: every word of both formats, and the operations beneath, on both backends, exactly."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exact import all_high_words, fractions, is_normal, on_reference, on_xla, ordinal, patterns, rne, rounded, update_of
from integer_words import decode
from torch import Tensor

from collage_neuron.errors import VerificationError
from collage_neuron.numerics.eft import inverse_power_of_two, narrow, power_of_two, round_to, storage_named, widen
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.numerics.integer_words import INT8, INT16, IntegerWord
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import verify

BACKENDS = {"reference": on_reference, "xla": on_xla}
WORDS = {"bf16+int16": INT16, "bf16+int8": INT8}
TYPES = {"int8": torch.int8, "int16": torch.int16}

names = pytest.mark.parametrize("name", WORDS)
backends = pytest.mark.parametrize("backend", BACKENDS)


def bits(x: Tensor) -> Tensor:
    """fp32 numbers as their bits, all NaNs alike."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


def at_ordinal(n: Tensor) -> Tensor:
    """The fp32 number at a place on the line of all; +0 for 0."""
    return torch.where(n < 0, -0x80000000 - n, n).to(torch.int32).view(torch.float32)


def exact_value(high: Tensor, low: Tensor, words: IntegerWord) -> Tensor:
    """What two words mean, by counting fp32 numbers; a hi of 0 is 0."""
    away = torch.where(high < 0, -1, 1) * (low.long() * int(words.unit))
    return torch.where((high == 0) | (away == 0), high.float(), at_ordinal(ordinal(high.float()) + away))


def exact_words(x: Tensor, words: IntegerWord) -> tuple[Tensor, Tensor]:
    """The words of fp32 numbers: float64 rounds to hi and holds both neighbours, and counting fp32 numbers gives lo."""
    high = rounded(x.double())
    other = 2 * x.double() - high  # as far on the other side: a bf16 number if x is halfway
    halfway = (other != high) & (other == rounded(other)) & (high == rounded(high.float().double()))
    high = torch.where(halfway & (other.abs() > high.abs()), other, high)
    high = torch.where(high.abs() >= 2.0**128, high.sign() * torch.inf, high)
    high = torch.where(x.isfinite(), high, x.double())
    count = (ordinal(x) - ordinal(high.float())) * torch.where(x < 0, -1, 1) / words.unit
    return high, torch.where(x.isnan(), 0.0, count.round().clamp(-(words.most // words.unit), words.most // words.unit))


def grid(words: IntegerWord) -> Tensor:
    """fp32 numbers around every bf16: places next to it, next to halfway, halves of units; and the ends."""
    at = torch.tensor([0, 1, 2, 100, 127, 128, 129, 255, 256, 384, 12345, 32511, 32512, 32513, 32639, 32640, 32641])
    at = torch.cat(
        [at, 2**15 - torch.arange(4), torch.randint(0, 2**15, (3,), generator=torch.Generator().manual_seed(0))]
    )
    upper = torch.arange(-(2**15), 2**15)[:, None] << 16
    around = (upper | (torch.cat([at, -at]) & 0xFFFF)).to(torch.int32).view(torch.float32).reshape(-1)
    ends = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, -3.4e38, 0.0, -0.0])
    return torch.cat([torch.where(around.isnan(), 1.0, around), ends])


def encoder(name: str) -> Update:
    return update_of(["x"], WORDS[name].encode, ["bf16", WORDS[name].storage])


def decoder(name: str) -> Update:
    return update_of(["hi", "lo"], lambda hi, lo: [WORDS[name].decode([hi, lo])])


def low_words(words: IntegerWord) -> list[int]:
    """All int8; of the int16 a grid with both ends, and powers of two and their neighbours."""
    if words.storage == "int8":
        return list(range(-128, 128))
    near = {n for k in range(16) for n in (2**k - 1, 2**k, 2**k + 1)} | set(range(0, 2**15, 1111))
    return [-(2**15), *sorted(n for m in near for n in (-m, m) if abs(n) < 2**15)]


@names
def test_the_oracles_say_what_rationals_say(name: str) -> None:
    words, g = WORDS[name], torch.Generator().manual_seed(0)
    x = torch.cat([torch.randn(300, generator=g), torch.randn(300, generator=g).exp2() * 2.0**-103])
    high, low = exact_words(x, words)
    assert fractions(high) == [rne(q) for q in fractions(x)]
    for q, hi, lo, value in zip(*map(fractions, (x, high, low, exact_value(high, low, words))), strict=True):
        last = abs(rne(q, 24) - rne(q * (1 + type(q)(1, 2**23)), 24))  # fp32's place here, or half of it
        assert rne(value, 24) == value
        assert abs(value - q) <= words.unit * last
        assert abs(lo) * words.unit <= words.most
        assert (lo == 0) <= (abs(value - hi) == 0)


@backends
@names
def test_every_pair_of_words_is_read_exactly(name: str, backend: str) -> None:
    """All 65 536 high words with all 256 low ones, or with a grid of the 65 536."""
    update, words, low = decoder(name), WORDS[name], low_words(WORDS[name])
    high = all_high_words()
    for several in (low[i : i + 16] for i in range(0, len(low), 16)):
        hi, lo = high.repeat(len(several)), torch.tensor(several).repeat_interleave(2**16)
        (found,) = BACKENDS[backend](update, [hi, lo.to(TYPES[words.storage])])
        expected = exact_value(hi, lo, words)
        sure = is_normal(hi.float()) & is_normal(expected) & (hi.isfinite() | (lo == 0))
        assert torch.equal(bits(found)[sure], bits(expected)[sure])
        assert found[hi.isnan()].isnan().all()


@backends
@names
def test_every_number_of_the_grid_becomes_the_words_of_the_definition(name: str, backend: str) -> None:
    x = grid(WORDS[name])
    found, (high, low) = BACKENDS[backend](encoder(name), [x]), exact_words(x, WORDS[name])
    sure = is_normal(x) & is_normal(high)
    assert torch.equal(bits(found[0].float())[sure], bits(high.float())[sure])
    assert torch.equal(found[1][sure].double(), low[sure])


@names
def test_what_was_decoded_is_encoded_to_the_same_words(name: str) -> None:
    """At once: a checkpoint, a conversion and a step that changes nothing keep every bit, of subnormals too."""
    fmt, x = FORMATS[name], grid(WORDS[name])
    words = fmt.encode(x)
    value = fmt.decode(words)
    again = fmt.encode(value)
    assert torch.equal(bits(words[0].float()), bits(again[0].float()))
    assert torch.equal(bits(words[0].float()), bits(value.bfloat16().float()))  # hi is the value rounded to bf16
    assert torch.equal(words[1][words[0] != 0], again[1][words[0] != 0])
    assert torch.equal(bits(fmt.decode(again)), bits(value))


@names
def test_the_error_is_that_of_the_docstring(name: str) -> None:
    fmt, words = FORMATS[name], WORDS[name]
    x = grid(words)
    x = x[x.isfinite() & (x.abs() > 2.0**-134)]
    hi, lo = fmt.encode(x)
    off = (ordinal(fmt.decode([hi, lo])) - ordinal(x)).abs()
    halfway = (ordinal(x) & 0xFFFF) == 0x8000
    if name == "bf16+int16":
        assert torch.equal(off, halfway.long())
    else:
        assert (off <= 256).all()
        assert (off <= 128)[lo.abs() < 127].all()


@names
def test_specials(name: str) -> None:
    """-0, infinities and NaN are what they were; a weight that was set to 0 is 0, whatever its further word says."""
    fmt, words = FORMATS[name], WORDS[name]
    x = torch.tensor([-0.0, 0.0, torch.inf, -torch.inf, torch.nan])
    hi, lo = fmt.encode(x)
    assert not lo.any()
    assert torch.equal(bits(fmt.decode([hi, lo])), bits(x))
    for n in torch.tensor([-int(words.most // words.unit) - 1, -1, 1, int(words.most // words.unit)]):
        assert torch.equal(bits(fmt.decode([hi, (lo + n).to(lo.dtype)]))[[0, 1, 4]], bits(x)[[0, 1, 4]])


# --- the operations -------------------------------------------------------------------------------------------------


@backends
def test_the_power_of_two_and_its_inverse(backend: str) -> None:
    """Against frexp, which knows nothing of bits."""
    x = patterns()
    update = update_of(["x"], lambda x: [power_of_two(x), inverse_power_of_two(x)])
    power, inverse = BACKENDS[backend](update, [x])
    one, exponent = torch.ones_like(x, dtype=torch.float64), torch.frexp(x.double())[1] - 1
    finite, tiny = x.isfinite(), x.abs() < 2.0**-126
    expected = torch.where(finite, torch.where(tiny, 0.0, torch.ldexp(one, exponent)), torch.inf)
    twice = torch.where(finite, torch.where(tiny, torch.inf, torch.ldexp(one, 1 - exponent)), 0.0)
    assert torch.equal(power.double(), expected)
    assert torch.equal(inverse.double(), twice)


@backends
@pytest.mark.parametrize("name", ["int8", "int16"])
def test_rounding_to_an_integer_and_reading_it_again(backend: str, name: str) -> None:
    low, high = storage_named(name).limits
    x = torch.cat([torch.arange(2 * low - 6, 2 * high + 6) / 2.0, torch.tensor([torch.inf, -torch.inf, -0.0, 3e38])])
    rounded = update_of(["x"], lambda x: [round_to(x, name), narrow(round_to(x, name), name)], ["fp32", name])
    value, stored = BACKENDS[backend](rounded, [x])
    assert stored.dtype == storage_named(name).dtype
    assert torch.equal(value, x.double().round().clamp(low, high).float())
    assert torch.equal(BACKENDS[backend](update_of(["n"], lambda n: [n]), [stored])[0], value)


def test_what_is_stored_as_an_integer_is_rounded_to_it() -> None:
    verify(update_of(["x"], lambda x: [round_to(x, "int8")], ["int8"]))
    verify(update_of(["x"], lambda x: [torch.where(x > 0.0, round_to(x, "int8"), 0.0)], ["int8"]))


@pytest.mark.parametrize(
    "of",
    [
        lambda x: x * 2.0,
        lambda x: round_to(x, "int16"),
        lambda x: round_to(x, "bf16"),
        lambda x: -round_to(x, "int8"),
        lambda x: torch.abs(round_to(x, "int8")),
        widen,
    ],
    ids=["unrounded", "int16", "bf16", "negative", "magnitude", "as read"],
)
def test_a_lost_rounding_to_an_integer_is_rejected(of: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(VerificationError, match="as int8 without a round_to: a rounding was lost"):
        verify(update_of(["x"], lambda x: [of(x)], ["int8"]))


def test_the_format_is_in_explicit_rounding_form() -> None:
    verify(update_of(["x"], lambda x: [decode([round_to(x, "bf16"), round_to(x, "int8")])]))
