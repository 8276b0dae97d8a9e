"""Real processes on the CPU: a sharded run has the bits of an unsharded one, and sends nothing but high words."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharded_runs as runs
import torch
from models import REPRESENTATIVE
from sharded_runs import different
from worlds import run_world

SIZES = (2, 4)
ELEMENTS = 6 * 5 + 5 + 5 * 1 + 1


@pytest.fixture(scope="module")
def unsharded() -> dict[str, runs.Whole]:
    """The end of an uninterrupted run in one process, by strategy."""
    return {strategy: runs.trajectory("plain", strategy) for strategy in REPRESENTATIVE}


# --- the same bits as one process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_every_kind_of_sharding_ends_where_one_process_ends(
    size: int, unsharded: dict[str, runs.Whole], tmp_path: Path
) -> None:
    """Processes that see the same batch: every order of compiling and sharding, every format."""
    cases = [(kind, "full") for kind in runs.KINDS if kind != "plain"]
    cases += [(kind, strategy) for kind in ("ddp", "fsdp") for strategy in REPRESENTATIVE if strategy != "full"]
    for found in run_world(size, tmp_path, runs.trajectories, cases):
        wrong = {case: different(found[case], unsharded[case[1]]) for case in cases}
        assert {case: names for case, names in wrong.items() if names} == {}


def test_replicas_of_shards_end_where_one_process_ends(unsharded: dict[str, runs.Whole], tmp_path: Path) -> None:
    for found in run_world(4, tmp_path, runs.trajectory_on_mesh, "full"):
        assert different(found, unsharded["full"]) == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_given_the_same_gradients_the_update_has_the_same_bits(kind: str, size: int, tmp_path: Path) -> None:
    """Processes that see batches of their own."""
    assert run_world(size, tmp_path, runs.beside_a_twin, kind, "full") == [[]] * size


@pytest.mark.parametrize("size", SIZES)
def test_tensors_sharded_by_rows_or_columns_and_gradients_in_parts(size: int, tmp_path: Path) -> None:
    expected: dict[str, list[str]] = {name: [] for name in runs.PLACEMENTS}
    assert run_world(size, tmp_path, runs.tensor_parallel, "full") == [expected] * size


@pytest.mark.parametrize("alone", [False, True], ids=["(model, optimizer)", "(model)"])
def test_replicas_that_were_built_from_different_weights_hold_the_same_after_a_broadcast(
    alone: bool, tmp_path: Path
) -> None:
    """Low words too: those of weights that were replaced are dropped, in every process."""
    first, second = run_world(2, tmp_path, runs.replicas, [0, 1], alone)
    assert different(first, second) == []
    assert any(bits.any() for name, bits in first.items() if name.endswith("param_lo"))


def test_fp32_shards_are_split_and_not_rounded(tmp_path: Path) -> None:
    assert run_world(2, tmp_path, runs.values, "plus") == [[]] * 2


def test_a_model_that_fsdp_has_laid_out_in_fp32_is_refused_and_left_alone(tmp_path: Path) -> None:
    for message in run_world(2, tmp_path, runs.after_a_forward):
        assert "compile before the first forward" in message


def test_fp32_values_that_are_not_sharded_as_the_parameters_are_refused(tmp_path: Path) -> None:
    for of_model, of_value in run_world(2, tmp_path, runs.unsharded_values):
        assert "'0.weight' is not sharded and in the model sharded (a DTensor): distribute_tensor makes" in of_model
        assert of_value == "the parameter is sharded (a DTensor) and the value not sharded; nothing was written"


# --- what is sent, and what lies where --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_under_fsdp_only_high_words_and_gradients_travel(size: int, tmp_path: Path) -> None:
    """As many bytes as pure bf16 training sends, all of them bf16, and none in the update."""
    plus = run_world(size, tmp_path / "plus", runs.placement, "fsdp", "full")
    pure = run_world(size, tmp_path / "bf16", runs.placement, "fsdp", "bf16")
    for found, expected in zip(plus, pure, strict=True):
        assert found["update"] == {}
        assert found["gradients"] == expected["gradients"]
        assert {dtype for _, dtype in found["gradients"]} == {torch.bfloat16}
        assert {operation for operation, _ in found["gradients"]} == {"allgather_base", "reduce_scatter_base"}


@pytest.mark.parametrize("size", SIZES)
def test_under_fsdp_low_words_stay_with_their_shard(size: int, tmp_path: Path) -> None:
    found = run_world(size, tmp_path, runs.placement, "fsdp", "full")
    assert sum(f["elements"] for f in found) == ELEMENTS
    assert min(min(f["rows"]) for f in found) == 0  # some hold nothing of a parameter
    for f in found:
        assert f["sharded like the parameter"]
        assert f["keys"] == {"param_lo", "exp_avg", "exp_avg_lo", "exp_avg_sq", "exp_avg_sq_lo"}
        assert f["bytes of states"] == 5 * 2 * f["elements"]


def test_under_ddp_only_gradients_travel(tmp_path: Path) -> None:
    for found in run_world(2, tmp_path, runs.placement, "ddp", "full"):
        assert found["update"] == {}
        assert found["gradients"] == {("allreduce", torch.bfloat16): 2 * ELEMENTS}
