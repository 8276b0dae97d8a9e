"""What the comparison of kernels with the reference would notice: nearly every rounding, subtraction and bf16 tile.

A kernel is broken in one place at a time and compared on wild data. What goes unnoticed is listed by name with the
reason why nothing is lost there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache

import nki_standin
import pytest
from exact import with_swapped_operands, without_rounding
from nki_runs import Step, differing, run, search_less, step_of, wild
from torch_cases import CASES

from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.ir.update import Update

STORED = "the tile that is stored rounds it, being bf16"
GRADIENT = "a bf16 gradient is bf16"
RESIDUAL = "the residual of a product of two bf16 numbers is one (Dekker)"
SECOND = "fast_two_sum: b - z is a bf16 number where z is s - a (Dekker)"
LIMITED = "a bf16 number limited by half a place of another is one"
CAPPED = "the smaller of two bf16 numbers is one"
FIRST = "fast_two_sum: s - a is a bf16 number where a is the larger (Dekker)"

HARMLESS: dict[tuple[str, str], dict[str, str]] = {
    ("plus", "fp32"): dict.fromkeys(("round_to_1", "round_to_2", "round_to_4"), STORED),
    ("plus", "bf16"): {
        "round_to": LIMITED,
        "round_to_1": GRADIENT,
        "round_to_5": RESIDUAL,
        "round_to_12": SECOND,
        "round_to_16": SECOND,
        "round_to_19": FIRST,
        "round_to_20": SECOND,
        "round_to_28": SECOND,
        "round_to_31": FIRST,
        "round_to_32": SECOND,
        "round_to_33": STORED,
    },
}
"""The roundings of AdamW's graph whose loss changes nothing, by strategy and arithmetic."""


@cache
def step(strategy: str, arithmetic: str) -> Step:
    return wild(step_of(CASES["adamw"], strategy, arithmetic))


@cache
def kernel(strategy: str, arithmetic: str) -> Kernel:
    return lower_to_nki(step(strategy, arithmetic).update)


def notices(k: Kernel, s: Step, source: str | None = None) -> bool:
    """Whether the comparison fails (or the kernel does)."""
    try:
        found = run(k, s.components, s.vector, source=source).results
    except nki_standin.StandinError:
        return True
    return bool(differing(found, s.by_reciprocals().expected()))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch, 0)


@pytest.mark.parametrize(("strategy", "arithmetic"), HARMLESS)
def test_the_comparison_passes_without_a_mutation(strategy: str, arithmetic: str) -> None:
    assert not notices(kernel(strategy, arithmetic), step(strategy, arithmetic))


def unnoticed(s: Step, mutations: Callable[[Update], Iterator[tuple[str, Update]]]) -> list[str]:
    return [name for name, mutated in mutations(s.update) if not notices(lower_to_nki(mutated), s)]


@pytest.mark.mutants
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("strategy", "arithmetic"), HARMLESS)
def test_a_lost_rounding_is_noticed(strategy: str, arithmetic: str) -> None:
    assert unnoticed(step(strategy, arithmetic), without_rounding) == list(HARMLESS[strategy, arithmetic])


@pytest.mark.mutants
@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize(("strategy", "arithmetic"), HARMLESS)
def test_swapped_operands_of_a_subtraction_are_noticed(strategy: str, arithmetic: str) -> None:
    assert unnoticed(step(strategy, arithmetic), with_swapped_operands) == []


@pytest.mark.mutants
@pytest.mark.parametrize(("strategy", "arithmetic"), HARMLESS)
def test_swapped_operands_of_an_instruction_are_noticed(strategy: str, arithmetic: str) -> None:
    s, k = step(strategy, arithmetic), kernel(strategy, arithmetic)
    found = list(re.finditer(r"data1=(.*?),\s+data2=(.*?),\s+op=nl.subtract", k.source))
    swapped = [
        k.source[: m.start(1)] + m[2] + k.source[m.end(1) : m.start(2)] + m[1] + k.source[m.end(2) :] for m in found
    ]
    assert len(swapped) == sum(i["op"] == "subtract" for _, i in k.plan.steps) > 0
    assert all(notices(k, s, source) for source in swapped)


def widened(source: str) -> Iterator[tuple[str, str]]:
    """For each bf16 tile of a kernel: its name, and the source with an fp32 tile there."""
    lines = source.splitlines()
    for i, line in enumerate(lines):
        if "= nl.ndarray(" in line and "dtype=nl.bfloat16" in line:
            wide = line.replace("nl.bfloat16", "nl.float32")
            yield line.split()[0], "\n".join([*lines[:i], wide, *lines[i + 1 :]]) + "\n"


@pytest.mark.mutants
def test_a_wider_tile_is_noticed() -> None:
    """Unless it only takes what a DMA brings, or is only emptied by one: a DMA between types rounds once itself.

    The parameter's bits are looked at, for the size of its last place: its tile has to be a bf16 one.
    """
    s, k = step("plus", "fp32"), kernel("plus", "fp32")
    names = [name for name, source in widened(k.source) if not notices(k, s, source)]
    assert names == [f"{a.key}_in" for a in k.arguments[1:]] + ["param_lo_out", "exp_avg_out", "exp_avg_sq_lo_out"]


EXACT = {
    "smaller_1": CAPPED,
    "smaller_2": CAPPED,
    "difference_1": RESIDUAL,
    "smaller_3": CAPPED,
    "difference_3": SECOND,
    "smaller_4": CAPPED,
    "difference_5": SECOND,
    "smaller_5": CAPPED,
    "difference_6": FIRST,
    "smaller_6": CAPPED,
    "smaller_7": CAPPED,
    "difference_9": SECOND,
    "smaller_8": CAPPED,
    "difference_10": FIRST,
}
"""Tiles of the kernel of AdamW, plus, in the paper's arithmetic, whose values are bf16 numbers anyway."""


@pytest.mark.mutants
@pytest.mark.slow
def test_a_wider_tile_is_noticed_in_the_papers_arithmetic() -> None:
    s, k = step("plus", "bf16"), kernel("plus", "bf16")
    names = [name for name, source in widened(k.source) if not notices(k, s, source)]
    outs = ["param_out", "param_lo_out", "exp_avg_sq_lo_out"]  # the first is read into a tile of bf16 alone
    assert names == [f"{a.key}_in" for a in k.arguments[1:]] + [*outs, *EXACT]
