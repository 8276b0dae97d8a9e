"""Error-free transforms on every backend against exact numbers: exhaustively, and with each rounding lost in turn.

The domain. Scaling both operands by a power of 2 scales every step, so one of them may lie in [2**7, 2**8) and what
counts is the gap between their exponents; negating both negates every step, so one sign is enough. From a gap of 10
on, b is below a quarter of the last place of a and its bf16 sum is a; from 26 on b is below a quarter of the last
place that a has in fp32, and the fp32 sum is a as well (a quarter, because below a power of 2 the places are half as
wide). Gaps 0 to 26 both ways therefore are all there is: further ones repeat the last. With every number an integer
below 2**35, float64 sums are exact.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest
import torch
from eft_runs import GAPS, SIGNIFICANDS, A, B, Run, Tensors, sum_update
from exact import fractions, from_bits, rne, rounded, ulp, update_of

from collage_neuron.numerics.eft import Expansion, Value, fast_two_sum, split, two_prod, two_sum
from collage_neuron.passes.ir.update import Update

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


def test_fast_two_sum_fails_elsewhere_at_every_gap(run: Run) -> None:
    """Which is why two_sum exists."""
    wrong = wrong_sums(run, sum_update(fast_two_sum)) & ~FIRST_IS_LARGER
    assert wrong[(GAPS < 0).flatten()].flatten(1).any(1).all()


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
