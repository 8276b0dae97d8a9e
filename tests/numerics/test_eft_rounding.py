"""Rounding to bf16, and grow and scale within their bounds, on every backend against exact numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx
from eft_runs import ALL_BITS, ROUNDING, Run, Tensors, nearest_even_bits, wrong_roundings
from exact import fractions, from_bits, on_reference, rne, rounded, to_bits, update_of

from collage_neuron.numerics.eft import Expansion, grow, narrow, round_to, scale, widen
from collage_neuron.passes.ir.update import Update


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


def test_grow_by_more_than_hi_loses_its_bound() -> None:
    e, a = random_expansions(1), random_increments(1 << 9)
    words = on_random_expansions(on_reference, GROW, (*e, a))
    assert grow_error(words, e, a).max() > 2**-12


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
