"""Storage types are data: one table, which every backend reads. Each rounds as exact rationals do."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from exact import fractions, rne

from collage_neuron.numerics.eft import STORAGE_TYPES, StorageType, storage_named, storage_of
from collage_neuron.passes.backends.nki.ir import itemsize
from collage_neuron.passes.backends.xla.hlo import ELEMENT_TYPES

TYPES = list(STORAGE_TYPES.values())
INTEGERS = [t for t in TYPES if not t.is_floating]


@pytest.mark.parametrize("storage", TYPES, ids=lambda t: t.name)
def test_every_backend_knows_each_type_by_its_name(storage: StorageType) -> None:
    assert storage_named(storage.name) is storage_of(storage.dtype) is storage
    assert storage.dtype.itemsize * 8 == storage.bits == 8 * storage.bytes == 8 * itemsize(storage.nki)
    assert storage.hlo in ELEMENT_TYPES
    assert storage.is_floating is storage.dtype.is_floating_point


def test_the_widths_of_the_floating_types_fill_their_words() -> None:
    floats = [t for t in TYPES if t.precision is not None]
    assert {t.name for t in floats} == {"bf16", "fp32", "fp16", "e4m3", "e5m2"}
    assert all(1 + sum(t.precision or ()) == t.bits for t in floats)


def test_integer_types_have_limits_that_fp32_holds() -> None:
    signed = {"int8": (-128, 127), "int16": (-(2**15), 2**15 - 1)}
    assert {t.name: t.limits for t in INTEGERS} == signed | {"uint8": (0, 255), "uint16": (0, 2**16 - 1)}


@pytest.mark.parametrize("storage", INTEGERS, ids=lambda t: t.name)
def test_rounding_to_an_integer_is_to_nearest_even_and_saturates(storage: StorageType) -> None:
    """All halves and quarters of the type's range and beyond it, against rationals."""
    low, high = storage.limits
    step = Fraction(1, 4) if storage.bits == 8 else Fraction(1, 2)
    x = torch.arange(int((low - 3) / step), int((high + 4) / step)).float() * float(step)
    wanted = [min(max(Fraction(round(q)), Fraction(low)), Fraction(high)) for q in fractions(x)]
    assert fractions(storage.round(x)) == wanted
    ends = storage.round(torch.tensor([-torch.inf, -3e38, -0.25, 3e38, torch.inf]))
    assert ends.tolist() == [low, low, 0, high, high]


def test_rounding_to_a_float_is_to_nearest_even() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert fractions(storage_named("bf16").round(x)) == [rne(q) for q in fractions(x)]
    assert torch.equal(storage_named("fp32").round(x), x)


@pytest.mark.parametrize("name", ["int7", None, 8])
def test_an_unknown_name_is_rejected_with_those_that_are_known(name: object) -> None:
    with pytest.raises(ValueError, match=r"unknown storage type .*; known types: bf16, fp32, int8, int16"):
        storage_named(name)


def test_a_dtype_without_a_type_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"no storage type has words of torch.float64; known types: bf16, fp32"):
        storage_of(torch.float64)


def test_a_type_of_ones_own_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = StorageType("word", torch.uint32, hlo="u32", nki="uint32", precision=None)
    monkeypatch.setitem(STORAGE_TYPES, mine.name, mine)
    assert storage_of(torch.uint32) is storage_named("word") is mine
    assert mine.limits == (0, 2**32 - 1)
