"""Real processes: sharded runs have the bits of an unsharded one, send high words, and resume with other shards."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import sharded_runs as runs
import torch
from models import REPRESENTATIVE
from sampling import WHOLE, part
from sharded_runs import different
from worlds import in_turn, run_world

from collage_neuron import STRATEGIES
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.underflow import digits

# --- real processes on the CPU: a sharded run has the bits of an unsharded one, and sends nothing but high words ------

SIZES = (2, 4)
ELEMENTS = 6 * 5 + 5 + 5 * 1 + 1


@pytest.fixture(scope="module")
def unsharded() -> dict[str, runs.Whole]:
    """The end of an uninterrupted run in one process, by strategy."""
    return {strategy: runs.trajectory("plain", strategy) for strategy in REPRESENTATIVE}


CASES = [(kind, "full") for kind in runs.KINDS if kind != "plain"]
for i, strategy in enumerate(s for s in REPRESENTATIVE if s != "full"):
    CASES += [(kind, strategy) for kind in (("ddp", "fsdp") if WHOLE else (("ddp", "fsdp")[i % 2],))]
"""Every order of compiling and sharding, and every format: on four processes a part of them."""
TRAJECTORIES = {2: CASES, 4: part(CASES, 4, "of four")}

OF_TWO: dict[str, tuple[Any, ...]] = {
    "trajectories": (runs.trajectories, TRAJECTORIES[2]),
    "replicas": (runs.replicas, [0, 1], False),
    "replicas, model alone": (runs.replicas, [0, 1], True),
    "written": (runs.written, "split433"),
    "moved": (runs.moved, "split433"),
    "placed": (runs.placed, "plus"),
    "after a forward": (runs.after_a_forward,),
    "unsharded values": (runs.unsharded_values,),
}
OF_FOUR: dict[str, tuple[Any, ...]] = {
    "tensor parallel": (runs.tensor_parallel, "full"),
    **{f"{kind}, {s}": (runs.placement, kind, s) for kind, s in (("fsdp", "full"), ("fsdp", "bf16"), ("ddp", "full"))},
    "trajectories": (runs.trajectories, TRAJECTORIES[4]),
    "mesh": (runs.trajectory_on_mesh, "full"),
}

Found = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each process found, by the number of processes: one world for all tests."""
    folder, calls = tmp_path_factory.mktemp("worlds"), {2: OF_TWO, 4: OF_FOUR}
    return {size: run_world(size, folder / str(size), in_turn, calls[size]) for size in SIZES}


# --- the same bits as one process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_sharding_ends_where_one_process_ends(
    size: int, unsharded: dict[str, runs.Whole], found: Found
) -> None:
    """Processes that see the same batch."""
    for own in found[size]:
        wrong = {case: different(own["trajectories"][case], unsharded[case[1]]) for case in TRAJECTORIES[size]}
        assert {case: names for case, names in wrong.items() if names} == {}


def test_replicas_of_shards_end_where_one_process_ends(unsharded: dict[str, runs.Whole], found: Found) -> None:
    for own in found[4]:
        assert different(own["mesh"], unsharded["full"]) == []


def test_tensors_sharded_by_rows_or_columns_and_gradients_in_parts(found: Found) -> None:
    expected: dict[str, list[str]] = {name: [] for name in runs.PLACEMENTS}
    assert [own["tensor parallel"] for own in found[4]] == [expected] * 4


@pytest.mark.parametrize("name", ["replicas", "replicas, model alone"])
def test_replicas_built_from_different_weights_hold_the_same_after_a_broadcast(name: str, found: Found) -> None:
    """Low words too: those of weights that were replaced are dropped, in every process."""
    first, second = (own[name] for own in found[2])
    assert different(first, second) == []
    assert any(bits.any() for key, bits in first.items() if key.endswith("param_lo"))


def test_weights_that_are_written_are_those_that_were_written(found: Found) -> None:
    assert [own["written"] + own["moved"] + own["placed"] for own in found[2]] == [[]] * 2


def test_a_model_that_fsdp_has_laid_out_in_fp32_is_refused_and_left_alone(found: Found) -> None:
    for own in found[2]:
        assert "compile before the first forward" in own["after a forward"]


def test_fp32_values_that_are_not_sharded_as_the_parameters_are_refused(found: Found) -> None:
    for own in found[2]:
        of_model, of_value = own["unsharded values"]
        assert "'0.weight' is not sharded and in the model sharded (a DTensor): distribute_tensor makes" in of_model
        assert of_value == "the parameter is sharded (a DTensor) and the value not sharded; nothing was written"


# --- what is sent, and what lies where --------------------------------------------------------------------------------


def test_under_fsdp_only_high_words_and_gradients_travel(found: Found) -> None:
    """As many bytes as pure bf16 training sends, all of them bf16, and none in the update."""
    for own in found[4]:
        sent, expected = own["fsdp, full"], own["fsdp, bf16"]
        assert sent["update"] == {}
        assert sent["gradients"] == expected["gradients"]
        assert {dtype for _, dtype in sent["gradients"]} == {torch.bfloat16}
        assert {operation for operation, _ in sent["gradients"]} == {"allgather_base", "reduce_scatter_base"}


def test_under_fsdp_low_words_stay_with_their_shard(found: Found) -> None:
    placed = [own["fsdp, full"] for own in found[4]]
    assert sum(f["elements"] for f in placed) == ELEMENTS
    assert min(min(f["rows"]) for f in placed) == 0  # some hold nothing of a parameter
    for f in placed:
        assert f["sharded like the parameter"]
        assert f["keys"] == {"param_lo", "exp_avg", "exp_avg_lo", "exp_avg_sq", "exp_avg_sq_lo"}
        assert f["bytes of states"] == 5 * 2 * f["elements"]


def test_under_ddp_only_gradients_travel(found: Found) -> None:
    for own in found[4]:
        assert own["ddp, full"]["update"] == {}
        assert own["ddp, full"]["gradients"] == {("allreduce", torch.bfloat16): 2 * ELEMENTS}


# --- torch.distributed.checkpoint with real processes: low words travel with their high words to any number of shards -

RESHARDINGS: dict[str, tuple[list[tuple[int, str]], list[str], bool]] = {
    "2, 4, 1": ([(2, "fsdp"), (4, "fsdp"), (1, "plain")], part(REPRESENTATIVE, 3), False),
    "2, 1, 2 (DDP to FSDP2), flat": ([(2, "ddp"), (1, "plain"), (2, "fsdp")], ["full", "fp32"], True),
    "2, 2 (FSDP2, model alone)": ([(2, "fsdp_model"), (2, "fsdp_model")], ["light"], False),
    "2, 2 (DDP)": ([(2, "ddp"), (2, "ddp")], ["full", "stochastic", "split311"], False),
}
"""Legs, each (processes, kind) with an equal part of the steps; strategies; whether the optimizer's state is flat."""

BLOCKS = [s for s in REPRESENTATIVE if runs.has_blocks(s)]
OTHERS = ("full", "fp32")

FoundInLegs = dict[str, list[list[Any]]]


@pytest.fixture(scope="module")
def found_in_legs(tmp_path_factory: pytest.TempPathFactory) -> FoundInLegs:
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
def test_a_run_goes_on_with_other_shards_bit_for_bit(
    case: str, unsharded: dict[str, runs.Whole], found_in_legs: FoundInLegs
) -> None:
    """What is loaded is what was saved, and the end is that of an uninterrupted run in one process."""
    for world in found_in_legs[case]:
        assert all(different(own[s][1], world[0][s][1]) == [] for own in world for s in own)  # all gathered the same
    for before, after in pairwise(world[0] for world in found_in_legs[case]):
        assert [s for s in after if different(after[s][0], before[s][1])] == []
    for strategy in RESHARDINGS[case][1]:
        assert different(found_in_legs[case][-1][0][strategy][1], unsharded[strategy]) == []


@pytest.mark.parametrize("strategy", OTHERS)
def test_an_unsharded_state_is_sharded_again_bit_for_bit(strategy: str, found_in_legs: FoundInLegs) -> None:
    for again, expected in found_in_legs[f"consolidated {strategy}"][0]:
        assert different(again, expected) == []


def test_a_state_that_is_sharded_otherwise_than_the_parameters_is_refused(found_in_legs: FoundInLegs) -> None:
    for said in found_in_legs["refusals"][0]:
        assert ["set_optimizer_state_dict" in message for message in said] == [True, True]


def test_blocks_that_shards_cut_are_within_one_rounding_of_the_format(found_in_legs: FoundInLegs) -> None:
    """A vector of 600 elements on two processes: its blocks are others than those of one process."""
    (saved, _), (read,) = found_in_legs["cut"]
    for strategy in BLOCKS:
        s = STRATEGIES[strategy]
        for name, fmt in (("exp_avg", s.state), ("exp_avg_sq", s.slow)):
            before, after = saved[strategy][name], read[strategy][name]
            assert float((after - before).norm() / before.norm()) <= 2 * 2.0 ** -digits(format_named(fmt))


def test_zero_of_torch_goes_on_bit_for_bit(found_in_legs: FoundInLegs) -> None:
    """What it loads does not pass through `load_state_dict` of the optimizer inside."""
    for own in found_in_legs["zero"][0]:
        assert {strategy: names for strategy, names in own.items() if names} == {}
