"""Error-free transforms, rounding, grow and scale on every backend against exact numbers: exhaustively where it can be.

The domain. Scaling both operands by a power of 2 scales every step, so one of them may lie in [2**7, 2**8) and what
counts is the gap between their exponents; negating both negates every step, so one sign is enough. From a gap of 10
on, b is below a quarter of the last place of a and its bf16 sum is a; from 26 on b is below a quarter of the last
place that a has in fp32, and the fp32 sum is a as well (a quarter, because below a power of 2 the places are half as
wide). Gaps 0 to 26 both ways therefore are all there is: further ones repeat the last. With every number an integer
below 2**35, float64 sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.fx as fx
from exact import fractions, from_bits, on_reference, on_xla, rne, rounded, to_bits, ulp, update_of

from collage_neuron.numerics.eft import (
    Expansion,
    Value,
    fast_two_sum,
    grow,
    narrow,
    round_to,
    scale,
    split,
    two_prod,
    two_sum,
    widen,
)
from collage_neuron.passes.ir.update import Update

Tensors = Sequence[torch.Tensor]

Run = Callable[[Update, Tensors], list[torch.Tensor]]
"""Runs an update without scalars on CPU tensors; results on the CPU."""

GAPS = torch.arange(-26, 27).view(-1, 1, 1, 1)

SIGNIFICANDS = torch.arange(128, 256, dtype=torch.float64)


def all_pairs() -> tuple[torch.Tensor, torch.Tensor]:
    """Every a and b (float64 integers) of the domain, shaped [gap, sign of b, significand of a, of b]."""
    signs = torch.tensor([1.0, -1.0], dtype=torch.float64).view(1, 2, 1, 1)
    a = torch.ldexp(SIGNIFICANDS.view(1, 1, -1, 1), GAPS.clamp(min=0))
    b = torch.ldexp(signs * SIGNIFICANDS.view(1, 1, 1, -1), (-GAPS).clamp(min=0))
    a, b = torch.broadcast_tensors(a, b)
    return a.contiguous(), b.contiguous()


A, B = all_pairs()


def sum_update(algorithm: Callable[[Value, Value], Expansion]) -> Update:
    return update_of(("a", "b"), algorithm)


@pytest.fixture(params=["reference", "xla"])
def run(request: pytest.FixtureRequest) -> Run:
    if request.param == "reference":
        return on_reference
    request.getfixturevalue("xla")
    return on_xla


NEAREST_SUM = rounded(A + B)

FIRST_IS_LARGER = (GAPS >= 0).expand_as(A)  # by exponent: enough for fast_two_sum, as Dekker proved


def wrong_sums(run: Run, update: Update) -> torch.Tensor:
    """Where hi is not a + b correctly rounded, or hi + lo is not a + b."""
    hi, lo = (word.double() for word in run(update, [A.bfloat16(), B.bfloat16()]))
    return (hi != NEAREST_SUM) | (hi + lo != A + B)


def test_the_oracle_rounds_as_the_rationals_do() -> None:
    sample = torch.randperm(A.numel(), generator=torch.Generator().manual_seed(0))[:1024]
    for exact, fast in ((A + B, NEAREST_SUM), (A * SIGNIFICANDS, rounded(A * SIGNIFICANDS))):
        values = fractions(exact.flatten()[sample])
        assert list(map(rne, values)) == fractions(fast.flatten()[sample])
        assert [rne(v, 24) for v in values] == fractions(rounded(exact.flatten()[sample], 24))


@pytest.mark.parametrize("q", [Fraction(257, 1), Fraction(1, 3), Fraction(-511, 1), Fraction(0), Fraction(513, 2)])
def test_the_rationals_round_to_the_nearest_and_a_tie_to_even(q: Fraction) -> None:
    known = {257: 256, Fraction(1, 3): Fraction(171, 512), -511: -512, 0: 0, Fraction(513, 2): 256}
    assert rne(q) == known[q]


def test_no_gap_beyond_the_domain_is_different() -> None:
    """At the last gaps, both ways, the larger operand is the sum, in bf16 and in fp32."""
    for gap, larger in ((0, B[0]), (-1, A[-1])):
        assert torch.equal(NEAREST_SUM[gap], larger)
        assert torch.equal(rounded((A + B)[gap], 24), larger)


def test_two_sum_is_exact_for_all_significands_and_gaps(run: Run) -> None:
    assert not wrong_sums(run, sum_update(two_sum)).any()


def test_fast_two_sum_is_exact_where_the_first_exponent_is_not_smaller(run: Run) -> None:
    assert not wrong_sums(run, sum_update(fast_two_sum))[FIRST_IS_LARGER].any()


@pytest.mark.parametrize("algorithm", [two_sum, fast_two_sum])
def test_sums_with_zero_are_exact(run: Run, algorithm: Callable[[Value, Value], Expansion]) -> None:
    zero, x = torch.zeros(256), torch.cat([SIGNIFICANDS, -SIGNIFICANDS]).float()
    for a, b in ((zero, x), (x, zero), (x, -x), (zero, zero)):
        hi, lo = run(sum_update(algorithm), [a.bfloat16(), b.bfloat16()])
        assert torch.equal(hi, a + b)
        assert torch.equal(lo, zero)


# Products ----------------------------------------------------------------------------------------------------------

PRODUCT = update_of(("a", "b"), two_prod)

FACTORS = torch.cartesian_prod(torch.cat([SIGNIFICANDS, -SIGNIFICANDS]), SIGNIFICANDS).unbind(1)


LOWEST = {"reference": -133, "xla": -126}
"""Smallest unit of a product that a backend keeps: bf16's smallest number, and XLA's smallest normal one."""


def wrong_products(run: Run, update: Update, exponent: int) -> torch.Tensor:
    """Where two_prod errs, for all significands; the unit of the product, one in both last places, is 2**exponent."""
    half = exponent // 2
    a, b = (torch.ldexp(x, torch.tensor(e)).bfloat16() for x, e in zip(FACTORS, (half, exponent - half), strict=True))
    hi, lo = (torch.ldexp(word.double(), torch.tensor(-exponent)) for word in run(update, [a, b]))
    exact = FACTORS[0] * FACTORS[1]
    return (hi != rounded(exact)) | (hi + lo != exact)


@pytest.fixture
def lowest(request: pytest.FixtureRequest) -> int:
    return LOWEST[request.node.callspec.params["run"]]


@pytest.mark.parametrize("exponent", [0, 1, 112])  # 255 * 255 * 2**112 is the largest product below 2**128
def test_two_prod_is_exact_for_all_significands(run: Run, exponent: int) -> None:
    """Exponents shift a product and change nothing else: there is no gap to vary, only the ends of the range."""
    assert not wrong_products(run, PRODUCT, exponent).any()


def test_two_prod_is_exact_down_to_underflow_and_not_below(run: Run, lowest: int) -> None:
    assert not wrong_products(run, PRODUCT, lowest).any()
    assert wrong_products(run, PRODUCT, lowest - 1).any()


# Split -------------------------------------------------------------------------------------------------------------

SPLIT = update_of(("x",), split)

# All 2**16 low halves, under high halves whose last bit is even and odd and which lie at both ends of a binade.
HIGH_HALVES = torch.tensor([0, 1, 2, 63, 64, 85, 126, 127]).view(-1, 1)

FP32 = from_bits(127 << 23 | HIGH_HALVES << 16 | torch.arange(1 << 16))


FP32 = torch.cat([FP32, -FP32])

UNITS = torch.ldexp(FP32.double(), torch.tensor(23))
"""The same numbers in units of their last place: integers of 24 bits."""


def in_units(words: Tensors) -> list[torch.Tensor]:
    return [torch.ldexp(word.double(), torch.tensor(23)) for word in words]


def wrong_splits(run: Run, update: Update) -> torch.Tensor:
    """Where hi is not x rounded, or lo is not x - hi rounded."""
    hi, lo = in_units(run(update, [FP32]))
    return (hi != rounded(UNITS)) | (lo != rounded(UNITS - rounded(UNITS)))


def test_split_gives_both_words_correctly_rounded(run: Run) -> None:
    assert not wrong_splits(run, SPLIT).any()


def test_split_loses_at_most_half_an_ulp_of_lo(run: Run) -> None:
    """|x - hi| is at most 2**15 units, half an ulp of hi; the ulp of such a lo is at most 2**7 below 2**15."""
    hi, lo = in_units(run(SPLIT, [FP32]))
    lost = (UNITS - hi - lo).abs()
    assert (lost <= ulp(lo) / 2).all()
    assert lost.max() == 2**6
    assert (lost < 2**-17 * UNITS.abs()).all()


# Rounding ----------------------------------------------------------------------------------------------------------

ROUNDING = update_of(("x",), lambda x: [round_to(x, "bf16")])

# The 16 bits that a rounding drops decide by being below, at, or above one half: its neighbours and both ends.
LOW_HALVES = torch.tensor([0x0000, 0x0001, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF])

ALL_BITS = (torch.arange(1 << 16).view(-1, 1) << 16 | LOW_HALVES).flatten()


def nearest_even_bits(bits: torch.Tensor) -> torch.Tensor:
    """Rounding as integers do it: the carry runs into the exponent, past the largest number to infinity."""
    down, low = bits & ~0xFFFF, bits & 0xFFFF
    odd = (bits >> 16 & 1).bool()
    return down + torch.where((low > 0x8000) | ((low == 0x8000) & odd), 0x10000, 0)


def wrong_roundings(run: Run, update: Update) -> torch.Tensor:
    x = from_bits(ALL_BITS)
    (result,) = run(update, [x])
    return torch.where(x.isnan(), ~result.isnan(), to_bits(result) != nearest_even_bits(ALL_BITS))


def test_round_to_is_right_for_every_sign_exponent_and_significand(run: Run) -> None:
    """Infinities, NaN, overflow to infinity, signed zeros and subnormals included: also XLA rounds those as bits."""
    assert not wrong_roundings(run, ROUNDING).any()


def test_the_integer_rounding_is_that_of_the_rationals() -> None:
    finite = ALL_BITS[(ALL_BITS >> 23 & 0xFF > 8) & (ALL_BITS >> 23 & 0xFF < 254)]
    sample = finite[torch.randperm(len(finite), generator=torch.Generator().manual_seed(0))[:1024]]
    assert [rne(q) for q in fractions(from_bits(sample))] == fractions(from_bits(nearest_even_bits(sample)))


def test_widen_and_narrow_change_no_bf16_number(run: Run) -> None:
    bits = torch.arange(1 << 16)
    stored = from_bits(bits << 16).bfloat16()
    wide, again = run(update_of(("x",), lambda x: [x, widen(narrow(x, "bf16"))]), [stored])
    numbers = ~wide.isnan()
    assert torch.equal(to_bits(wide)[numbers], (bits << 16)[numbers])
    assert torch.equal(to_bits(again)[numbers], (bits << 16)[numbers])
    assert torch.equal(numbers, ~stored.isnan())


# Grow and scale ----------------------------------------------------------------------------------------------------

N = 1 << 16


def random_expansions(seed: int) -> Expansion:
    """hi in +-[2**30, 2**31), lo at most half an ulp of hi, all of lo's exponents down to 16 below; float64."""
    g = torch.Generator().manual_seed(seed)
    signs = (torch.randint(0, 2, (2, N), generator=g) * 2 - 1).double()
    hi, lo = (torch.randint(128, 256, (2, N), generator=g).double() * signs).unbind()
    hi = torch.ldexp(hi, torch.tensor(23))
    lo = torch.ldexp(lo, torch.randint(-2, 15, (N,), generator=g))
    lo = torch.where(rounded(hi + lo) == hi, lo, 0.0)
    return Expansion(hi, lo)


class InFloat64(fx.Interpreter):
    """Runs an update on float64, where sums and products of a few bf16 numbers are exact, and rounds by `rounded`."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (round_to, widen, narrow):
            return rounded(args[0]) if target is round_to else args[0]
        return super().call_function(target, args, kwargs)


def as_rounded_in_float64(update: Update, inputs: Tensors) -> list[torch.Tensor]:
    """The twin that knows neither fp32 nor casts."""
    return list(InFloat64(update.graph).run(*inputs))


GROW = update_of(("hi", "lo", "a"), lambda hi, lo, a: grow(Expansion(hi, lo), a))

SCALE = update_of(("hi", "lo", "chi", "clo"), lambda hi, lo, *c: scale(Expansion(hi, lo), Expansion(*c)))


def on_random_expansions(run: Run, update: Update, inputs: Tensors) -> list[torch.Tensor]:
    """The words, as float64, of `update` on bf16 numbers given as float64."""
    return [word.double() for word in run(update, [x.bfloat16() for x in inputs])]


def random_increments(ratio: int) -> torch.Tensor:
    """Numbers down to 2**-24 of those of `random_expansions`, and up to `ratio` times as large."""
    g = torch.Generator().manual_seed(9)
    signs = (torch.randint(0, 2, (N,), generator=g) * 2 - 1).double()
    significands = torch.randint(128, 256, (N,), generator=g).double()
    return torch.ldexp(significands * signs, torch.randint(-1, 24 + ratio.bit_length() - 1, (N,), generator=g))


def grow_error(words: Tensors, e: Expansion, a: torch.Tensor) -> torch.Tensor:
    """The error of hi + lo as part of |e.hi| + |e.hi + a|."""
    hi, lo = words
    error = (hi + lo - (e.hi + e.lo + a)).abs() / (e.hi.abs() + (e.hi + a).abs())
    assert isinstance(error, torch.Tensor)
    return error


# Half an ulp is at most 2**-8 of a number: so is lo of hi, v of u = round(hi + a), and the one rounding of lo + v:
# (|lo| + |v|) * 2**-8 <= (|hi| + |u|) * 2**-16, and |u| <= |hi + a| * (1 + 2**-8). The two fast_two_sums are exact.
GROW_BOUND = 2**-16 * (1 + 2**-8)


def test_grow_errs_only_in_the_rounding_of_the_low_words(run: Run) -> None:
    e, a = random_expansions(1), random_increments(1)
    a = torch.where(a.abs() <= e.hi.abs(), a, 0.0)
    words = on_random_expansions(run, GROW, (*e, a))
    assert all(map(torch.equal, words, as_rounded_in_float64(GROW, (*e, a))))
    assert torch.equal(rounded(words[0] + words[1]), words[0])
    assert grow_error(words, e, a).max() <= GROW_BOUND


def scale_error(words: Tensors, e: Expansion, c: Expansion) -> torch.Tensor:
    """The relative error of hi + lo, in float64 (2**-52: nothing, here)."""
    exact = (e.hi + e.lo) * (c.hi + c.lo)
    error = ((words[0] + words[1] - exact) / exact).abs()
    assert isinstance(error, torch.Tensor)
    return error


# With u = 2**-8 (half an ulp, at the lower end of a binade) and in units of u**2 of the product: the product of the low
# words, dropped, 1; each cross product rounded, 1 + 1; their sum, 2 * u, rounded, 2; with q, 3 * u, rounded, 3. That is
# 8 * 2**-16 = 2**-13, to first order; each bound is itself relative to something up to 1 + u too large, thrice at most.
SCALE_BOUND = 2**-13 * (1 + 2**-8) ** 3


def random_decays() -> Expansion:
    """Expansions of either sign with hi between 1/2 and 1."""
    hi, lo = (torch.ldexp(word, torch.tensor(-31)) for word in random_expansions(3))
    return Expansion(hi, lo)


def test_scale_keeps_all_but_two_to_the_minus_thirteen(run: Run) -> None:
    e, c = random_expansions(2), random_decays()
    words = on_random_expansions(run, SCALE, (*e, *c))
    assert all(map(torch.equal, words, as_rounded_in_float64(SCALE, (*e, *c))))
    assert scale_error(words, e, c).max() <= SCALE_BOUND
    assert scale_error([words[0], torch.zeros(())], e, c).max() > 2**-9  # what one word alone would keep
