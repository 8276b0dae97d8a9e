"""torch.distributed.checkpoint with real processes: low words travel with their high words to any number of shards."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sharded_runs as runs
from models import REPRESENTATIVE
from sampling import part
from sharded_runs import different
from worlds import in_turn, run_world

from collage_neuron import STRATEGIES
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.rounding import digits

RESHARDINGS: dict[str, tuple[list[tuple[int, str]], list[str], bool]] = {
    "2, 4, 1": ([(2, "fsdp"), (4, "fsdp"), (1, "plain")], part(REPRESENTATIVE, 2), False),
    "2, 1, 2 (DDP to FSDP2), flat": ([(2, "ddp"), (1, "plain"), (2, "fsdp")], ["full", "fp32"], True),
    "2, 2 (FSDP2, model alone)": ([(2, "fsdp_model"), (2, "fsdp_model")], ["light"], False),
    "2, 2 (DDP)": ([(2, "ddp"), (2, "ddp")], ["full", "stochastic", "split311"], False),
}
"""Legs, each (processes, kind) with an equal part of the steps; strategies; whether the optimizer's state is flat."""

BLOCKS = [s for s in REPRESENTATIVE if runs.has_blocks(s)]
OTHERS = ("full", "fp32")

Found = dict[str, list[list[Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each process found, by call and leg: the legs of all calls that need as many processes are one world."""
    folder, ended = tmp_path_factory.mktemp("worlds"), dict[str, list[list[Any]]]()
    for i in range(3):
        for size in (1, 2, 4):
            calls = {
                name: leg[1:] for name, legs in _calls(folder).items() for leg in legs[i : i + 1] if leg[0] == size
            }
            world = run_world(size, folder / f"{size} in leg {i}", in_turn, calls) if calls else []
            for name in calls:
                ended.setdefault(name, []).append([own[name] for own in world])
    return ended


def _calls(folder: Path) -> dict[str, list[tuple[Any, ...]]]:
    """The legs of each call: processes, function and its arguments."""
    calls: dict[str, list[tuple[Any, ...]]] = {
        "refusals": [(2, runs.refusals, "plus")],
        "zero": [(2, runs.zero, part((s for s in REPRESENTATIVE if s != "fp32"), 3))],
        "cut": [(size, runs.cut, BLOCKS, folder / "cut", size == 2) for size in (2, 1)],
        **{f"consolidated {s}": [(2, runs.consolidated, s)] for s in OTHERS},
    }
    for case, (legs, strategies, flat) in RESHARDINGS.items():
        length = runs.STEPS // len(legs)
        calls[case] = [
            (size, runs.leg, kind, strategies, range(i * length, (i + 1) * length), folder / case, flat)
            for i, (size, kind) in enumerate(legs)
        ]
    return calls


@pytest.mark.parametrize("case", RESHARDINGS)
def test_a_run_goes_on_with_other_shards_bit_for_bit(case: str, found: Found) -> None:
    """What is loaded is what was saved, and the end is that of an uninterrupted run in one process."""
    for world in found[case]:
        assert all(different(own[s][1], world[0][s][1]) == [] for own in world for s in own)  # all gathered the same
    for before, after in pairwise(world[0] for world in found[case]):
        assert [s for s in after if different(after[s][0], before[s][1])] == []
    for strategy in RESHARDINGS[case][1]:
        assert different(found[case][-1][0][strategy][1], runs.trajectory("plain", strategy)) == []


@pytest.mark.parametrize("strategy", OTHERS)
def test_an_unsharded_state_is_sharded_again_bit_for_bit(strategy: str, found: Found) -> None:
    for again, expected in found[f"consolidated {strategy}"][0]:
        assert different(again, expected) == []


def test_a_state_that_is_sharded_otherwise_than_the_parameters_is_refused(found: Found) -> None:
    for said in found["refusals"][0]:
        assert ["set_optimizer_state_dict" in message for message in said] == [True, True]


def test_blocks_that_shards_cut_are_within_one_rounding_of_the_format(found: Found) -> None:
    """A vector of 600 elements on two processes: its blocks are others than those of one process."""
    (saved, _), (read,) = found["cut"]
    for strategy in BLOCKS:
        s = STRATEGIES[strategy]
        for name, fmt in (("exp_avg", s.state), ("exp_avg_sq", s.slow)):
            before, after = saved[strategy][name], read[strategy][name]
            assert float((after - before).norm() / before.norm()) <= 2 * 2.0 ** -digits(format_named(fmt))


def test_zero_of_torch_goes_on_bit_for_bit(found: Found) -> None:
    """What it loads does not pass through `load_state_dict` of the optimizer inside."""
    for own in found["zero"][0]:
        assert {strategy: names for strategy, names in own.items() if names} == {}
