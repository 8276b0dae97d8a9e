"""Integer words, powers of two, and numbers as two halves of bits: the bits of the reference, in every word there is.

Evidence level: stand-in.
"""

from __future__ import annotations

import pytest
import torch
from exact import all_high_words, on_reference, patterns, update_of
from nki_runs import differing, run, step_of, wild
from torch import Tensor
from torch_cases import CASES

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics import eft
from collage_neuron.numerics.eft import (
    beyond,
    bf16,
    inverse_power_of_two,
    limit_places,
    places,
    power_of_two,
    round_to,
    storage_named,
)
from collage_neuron.passes.backends.nki import words
from collage_neuron.passes.backends.nki.ir import Column, Value
from collage_neuron.passes.backends.nki.legalize import _rounded_number, programs_of
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.usefixtures("rejecting", "short_search")

MACHINES = [("trn1", "nki"), ("trn1", "beta1"), ("trn2", "nki"), ("trn3", "nki")]
TYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int8: "int8", torch.int16: "int16"}


def kernel_of(update: Update, inputs: dict[str, Tensor], target: str = "trn1", dialect: str = "nki") -> Kernel:
    return lower_to_nki(update, target, dialect, components={k: TYPES[x.dtype] for k, x in inputs.items()})


def found_by(update: Update, inputs: dict[str, Tensor], *machine: str, source: str | None = None) -> dict[str, Tensor]:
    return run(kernel_of(update, inputs, *machine), inputs, torch.zeros(0), source=source).results


def on_nki(update: Update, inputs: dict[str, Tensor], *machine: str) -> list[Tensor]:
    found = found_by(update, inputs, *machine)
    return [found[key] for key in update.outputs]


def expected(update: Update, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(zip(update.outputs, on_reference(update, list(inputs.values())), strict=True))


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_powers_of_two_are_masks_on_bits(dtype: torch.dtype, target: str, dialect: str) -> None:
    x = patterns() if dtype == torch.float32 else all_high_words()
    update = update_of(["x"], lambda x: [power_of_two(x), inverse_power_of_two(x)])
    found = on_nki(update, {"x": x}, target, dialect)
    assert torch.equal(found[0].float(), power_of_two(x.float()))
    assert torch.equal(found[1].float(), inverse_power_of_two(x.float()))


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
@pytest.mark.parametrize("name", ["int8", "int16"])
def test_rounding_to_an_integer_is_the_type_of_a_tile(name: str, target: str, dialect: str) -> None:
    low, high = storage_named(name).limits
    x = torch.cat([torch.arange(2 * low - 6, 2 * high + 6) / 2.0, torch.tensor([torch.inf, -torch.inf, -0.0, 3e38])])
    update = update_of(["x"], lambda x: [round_to(x, name), round_to(x, name) * 0.5], [name, "fp32"])
    stored, half = on_nki(update, {"x": x}, target, dialect)
    expected = x.double().round().clamp(low, high)
    assert stored.dtype == storage_named(name).dtype
    assert torch.equal(stored.double(), expected)
    assert torch.equal(half.double(), expected / 2)


def test_a_number_of_the_step_is_not_rounded_to_an_integer() -> None:
    update = update_of(["x"], lambda x: [round_to(x, "int8")], ["int8"])
    assert isinstance(next(iter(programs_of(update, {"x": "fp32"})[0].stores.values())), Value)
    assert _rounded_number(Column(entry=0), "float32", "n") == Column(entry=0)
    with pytest.raises(
        UnsupportedUpdate, match=r"rounds a number of the step to int8 \(node n\), which no kernel does"
    ):
        _rounded_number(Column(entry=0), "int8", "n")


def numbers() -> Tensor:
    """fp32 numbers of every sign, exponent and upper mantissa, with lower halves next to where something changes."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    low = (0, 1, 0x7FFF, 0x8000, 0x8001, 0x80FF, 0x8100, 0x8101, 0xFFFF)
    x = torch.cat([upper | n for n in low]).view(torch.float32)
    return x[x.isfinite()]


DECODE = {
    torch.int16: update_of(["hi", "lo"], lambda hi, lo: [beyond(hi, lo)]),
    torch.int8: update_of(["hi", "lo"], lambda hi, lo: [beyond(hi, lo * 256.0)]),
}


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
@pytest.mark.parametrize("dtype", DECODE, ids=str)
def test_every_upper_half_with_places_of_each_kind(dtype: torch.dtype, target: str, dialect: str) -> None:
    """All 65 536 bf16 numbers, infinities and NaNs too: nothing but halves of bits moves."""
    low = torch.iinfo(dtype).min
    lo = torch.tensor([low, low + 1, -1, 0, 1, -low - 1]).to(dtype)
    hi = all_high_words()
    inputs = {"hi": hi.repeat(len(lo)), "lo": lo.repeat_interleave(len(hi))}
    sure = (inputs["hi"] != 0) | (inputs["lo"] >= 0)  # nothing is below zero
    inputs = {k: x[sure] for k, x in inputs.items()}
    found, right = found_by(DECODE[dtype], inputs, target, dialect), expected(DECODE[dtype], inputs)
    assert not differing(found, right)


def test_every_int8_below_and_above_every_upper_half() -> None:
    hi, lo = all_high_words(), torch.arange(-128, 128).to(torch.int8)
    inputs = {"hi": hi.repeat(256), "lo": lo.repeat_interleave(len(hi))}
    sure = inputs["hi"] != 0
    inputs = {k: x[sure] for k, x in inputs.items()}
    assert not differing(found_by(DECODE[torch.int8], inputs), expected(DECODE[torch.int8], inputs))


def _encode(x: eft.Value) -> list[eft.Value]:
    y = limit_places(x, 32512)
    return [bf16(y), round_to(places(y) * 2.0**-8, "int8"), x * 2.0]


ENCODE = update_of(["x"], _encode, ["bf16", "int8", "fp32"])


@pytest.mark.parametrize(("target", "dialect"), MACHINES)
def test_both_halves_of_a_number_that_is_read_elsewhere_too(target: str, dialect: str) -> None:
    """The number itself must not be limited: its product is that of the old one."""
    x = numbers()
    inputs = {"x": x[(x.abs() < 2.0**127) & ((x == 0) | (x.abs() >= 2.0**-126))]}
    assert not differing(found_by(ENCODE, inputs, target, dialect), expected(ENCODE, inputs))


def test_the_bits_of_a_number_of_the_step_are_not_taken_apart() -> None:
    with pytest.raises(UnsupportedUpdate, match=r"takes the bits of a number of the step apart \(node n\), which no"):
        words.ON_HALVES[places](lambda *_: None, [Column(entry=0)], "n")  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", ["split444", "split433"])
@pytest.mark.parametrize("case", ["adamw", "sgd_momentum"])
def test_a_step_has_the_bits_of_the_reference(case: str, strategy: str) -> None:
    """Also where a high word is 0 and the low one is not: a weight that something else has set to 0."""
    s = wild(step_of(CASES[case], strategy, "fp32"))
    for key, x in s.components.items():
        if key + "_lo" in s.components:
            x[:4] = torch.tensor([0.0, -0.0, 0.0, -0.0])
            s.components[key + "_lo"][:4] = torch.tensor([-100, -100, 100, 100])
    for target, dialect in MACHINES:
        kernel = lower_to_nki(s.update, target, dialect)
        assert not differing(run(kernel, s.components, s.vector).results, s.by_reciprocals().expected())
