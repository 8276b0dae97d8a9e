"""torch.distributed.checkpoint with real processes: low words travel with their high words to any number of shards."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sharded_runs as runs
from models import REPRESENTATIVE
from sharded_runs import different
from worlds import run_world

from collage_neuron import STRATEGIES
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.rounding import digits


@pytest.fixture(scope="module")
def unsharded() -> dict[str, runs.Whole]:
    """The end of an uninterrupted run in one process, by strategy."""
    return {strategy: runs.trajectory("plain", strategy) for strategy in REPRESENTATIVE}


def run_legs(folder: Path, legs: list[tuple[int, str]], strategies: list[str], flat: bool) -> list[dict[str, Any]]:
    """Each leg is (processes, kind) and takes an equal part of the steps; what the first process of each saw."""
    part = runs.STEPS // len(legs)
    found = []
    for i, (size, kind) in enumerate(legs):
        steps = range(i * part, (i + 1) * part)
        world = run_world(size, folder / f"leg {i}", runs.leg, kind, strategies, steps, folder / "saved", flat)
        assert all(
            different(w[s][1], world[0][s][1]) == [] for w in world for s in strategies
        )  # all processes gathered the same
        found.append(world[0])
    return found


RESHARDINGS = {
    "2, 4, 1": ([(2, "fsdp"), (4, "fsdp"), (1, "plain")], REPRESENTATIVE, False),
    "1, 4, 2, flat": ([(1, "plain"), (4, "fsdp"), (2, "fsdp")], ["full", "fp32"], True),
    "2, 2 (FSDP2, model alone)": ([(2, "fsdp_model"), (2, "fsdp_model")], ["full", "light"], False),
    "2, 2 (DDP)": ([(2, "ddp"), (2, "ddp")], REPRESENTATIVE, False),
    "4, 2 (DDP to FSDP2), flat": ([(4, "ddp"), (2, "fsdp")], ["full"], True),
}
"""Legs, strategies, and whether the optimizer's state is flattened."""


@pytest.mark.parametrize("case", RESHARDINGS)
def test_a_run_goes_on_with_other_shards_bit_for_bit(
    case: str, unsharded: dict[str, runs.Whole], tmp_path: Path
) -> None:
    legs, strategies, flat = RESHARDINGS[case]
    found = run_legs(tmp_path, legs, strategies, flat)
    for before, after in pairwise(found):
        for strategy in strategies:
            assert different(after[strategy][0], before[strategy][1]) == []  # what was loaded is what was saved
    for strategy in strategies:
        assert different(found[-1][strategy][1], unsharded[strategy]) == []


@pytest.mark.parametrize("strategy", ["full", "fp32"])
def test_an_unsharded_state_is_sharded_again_bit_for_bit(strategy: str, tmp_path: Path) -> None:
    for found, expected in run_world(2, tmp_path, runs.consolidated, strategy):
        assert different(found, expected) == []


def test_a_state_that_is_sharded_otherwise_than_the_parameters_is_refused(tmp_path: Path) -> None:
    for said in run_world(2, tmp_path, runs.refusals, "plus"):
        assert ["set_optimizer_state_dict" in message for message in said] == [True, True]


def test_blocks_that_shards_cut_are_within_one_rounding_of_the_format(tmp_path: Path) -> None:
    """A vector of 600 elements on two processes: its blocks are others than those of one process."""
    strategies = [s for s in REPRESENTATIVE if runs.has_blocks(s)]
    saved, _ = run_world(2, tmp_path / "two", runs.cut, strategies, tmp_path / "saved", True)
    (read,) = run_world(1, tmp_path / "one", runs.cut, strategies, tmp_path / "saved", False)
    for strategy in strategies:
        s = STRATEGIES[strategy]
        for name, fmt in (("exp_avg", s.state), ("exp_avg_sq", s.slow)):
            before, after = saved[strategy][name], read[strategy][name]
            assert float((after - before).norm() / before.norm()) <= 2 * 2.0 ** -digits(format_named(fmt))


def test_zero_of_torch_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """What it loads does not pass through `load_state_dict` of the optimizer inside."""
    for found in run_world(2, tmp_path, runs.zero, [s for s in REPRESENTATIVE if s != "fp32"]):
        assert {strategy: names for strategy, names in found.items() if names} == {}
