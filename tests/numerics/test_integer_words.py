"""Operations of integer words in explicit-rounding form, on both backends, against exact numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from exact import on_reference, on_xla, patterns, update_of
from integer_words import decode
from torch import Tensor

from collage_neuron.errors import VerificationError
from collage_neuron.numerics.eft import (
    inverse_power_of_two,
    narrow,
    power_of_two,
    round_to,
    widen,
)
from collage_neuron.numerics.storage import storage_named
from collage_neuron.passes.ir.verify import verify

BACKENDS = {"reference": on_reference, "xla": on_xla}


def bits(x: Tensor) -> Tensor:
    """fp32 numbers as their bits, all NaNs alike."""
    return torch.where(x.isnan(), torch.nan, x).view(torch.int32)


# --- the operations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
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


@pytest.mark.parametrize("backend", BACKENDS)
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
