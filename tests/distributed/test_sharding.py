"""Real processes on the CPU: a sharded run has the bits of an unsharded one, and sends nothing but high words."""

from __future__ import annotations

from typing import Any

import pytest
import sharded_runs as runs
import torch
from models import REPRESENTATIVE
from sampling import WHOLE, part
from sharded_runs import different
from worlds import in_turn, run_world

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
    **{f"{kind} beside a twin": (runs.beside_a_twin, kind, "full") for kind in ("ddp", "fsdp")},
    "trajectories": (runs.trajectories, TRAJECTORIES[2]),
    "replicas": (runs.replicas, [0, 1], False),
    "replicas, model alone": (runs.replicas, [0, 1], True),
    "values": (runs.values, "plus"),
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


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_given_the_same_gradients_the_update_has_the_same_bits(kind: str, found: Found) -> None:
    """Processes that see batches of their own."""
    assert [own[f"{kind} beside a twin"] for own in found[2]] == [[]] * 2


def test_tensors_sharded_by_rows_or_columns_and_gradients_in_parts(found: Found) -> None:
    expected: dict[str, list[str]] = {name: [] for name in runs.PLACEMENTS}
    assert [own["tensor parallel"] for own in found[4]] == [expected] * 4


@pytest.mark.parametrize("name", ["replicas", "replicas, model alone"])
def test_replicas_that_were_built_from_different_weights_hold_the_same_after_a_broadcast(
    name: str, found: Found
) -> None:
    """Low words too: those of weights that were replaced are dropped, in every process."""
    first, second = (own[name] for own in found[2])
    assert different(first, second) == []
    assert any(bits.any() for key, bits in first.items() if key.endswith("param_lo"))


def test_fp32_shards_are_split_and_not_rounded(found: Found) -> None:
    assert [own["values"] for own in found[2]] == [[]] * 2


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
