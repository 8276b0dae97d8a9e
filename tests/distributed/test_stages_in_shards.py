"""Norms and means over parameters of which each process has a shard: those of the whole, in real processes.

A sum in shards is rounded to fp32 from a double that is within 2^-47 of that of one process, so that the fp32 numbers
are equal but where a rounding's tie lies between the two: with these weights, none does, and all bits are equal.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import pytest
import staged_shards as runs
import torch
from staged import Chained, Lamb, Novograd, StableAdamW
from worlds import run_world

from collage_neuron.numerics.tensor_sums import added_shards

BACKENDS = {Lamb: "native", StableAdamW: "reference", Novograd: "native", Chained: "reference"}


class Everything(NamedTuple):
    """What a process has found."""

    equal: dict[str, list[str]]
    steps: dict[str, runs.Steps]
    missing: list[str]
    rejected: list[str]
    trained: dict[str, list[str]]


def everything(folder: Path) -> Everything:
    steps = {cls.__name__: runs.steps_of(cls, backend) for cls, backend in BACKENDS.items()}
    return Everything(runs.in_two(), steps, runs.missing(), runs.rejected(), runs.trained(folder))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Everything]:
    """What each of two processes found: one world for all tests."""
    folder = tmp_path_factory.mktemp("world")
    return run_world(2, folder, everything, folder / "saved")


def test_shards_end_with_the_bits_of_one_process(found: list[Everything]) -> None:
    """Uneven and empty shards, rows and columns, replicas, both backends, random bits, skipped steps; fp64 beside."""
    for own in found:
        assert {claim: names for claim, names in own.equal.items() if names} == {}
        assert {name: steps.wrong for name, steps in own.steps.items() if steps.wrong} == {}


def test_fsdp_ends_where_one_process_ends_also_after_a_checkpoint(found: list[Everything]) -> None:
    for own in found:
        assert len(own.trained) == 4
        assert {claim: names for claim, names in own.trained.items() if names} == {}


@pytest.mark.parametrize("name", ["Lamb", "StableAdamW", "Novograd"])
def test_it_is_noticed_if_the_sums_of_one_process_are_left_out(name: str, found: list[Everything]) -> None:
    for own in found:
        assert "0 param" in own.steps[name].left_out


@pytest.mark.parametrize(
    ("name", "levels"), [("Lamb", [2]), ("StableAdamW", [1]), ("Novograd", [1]), ("Chained", [1, 1, 1])]
)
def test_a_step_has_one_collective_for_each_level_and_one_that_compares_steps(
    name: str, levels: list[int], found: list[Everything]
) -> None:
    """The sums of all five parameters at once: two norms of LAMB are one level, the mean of what has one is another."""
    sizes = [2, *(len(runs.SHAPES) * n for n in levels)]
    for own in found:
        assert own.steps[name].sizes == sizes
        assert own.steps[name].sent == {("allgather_base", torch.float64): 8 * sum(sizes)}


def test_a_gradient_that_one_process_lacks_is_an_error_in_all(found: list[Everything]) -> None:
    for own in found:
        first, second, third, *others = own.missing
        for said in (first, second, third):
            assert "about to take different steps" in said
            assert "nothing was updated" in said
        assert others == []


def test_what_cannot_be_right_is_rejected(found: list[Everything]) -> None:
    for own in found:
        read, rows, parts, number = own.rejected
        assert ".item()" in read
        assert "over rows or columns" in rows
        assert "handles shards itself (DTensor in OfShards.update())" in parts
        assert "['v'] is a number as torch's own step leaves it beside shards" in number


def test_replicas_are_not_counted_twice_and_shards_in_two_dimensions_are(tmp_path: Path) -> None:
    for own in run_world(4, tmp_path, runs.in_four):
        for said in own.pop("a process without a gradient"):
            assert "about to take different steps" in said
        assert len(own) == 4
        assert {claim: names for claim, names in own.items() if names} == {}


@pytest.mark.parametrize("count", [1, 2, 3, 5, 64])
def test_totals_of_shards_are_added_within_the_documented_bound(count: int) -> None:
    x = torch.randn(7, count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    levels = math.ceil(math.log2(count))
    for own, total in zip(x.tolist(), added_shards(x).tolist(), strict=True):
        assert abs(total - math.fsum(own)) <= (levels + 1) * 2**-53 * math.fsum(map(abs, own))
