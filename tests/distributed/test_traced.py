"""Traced steps over shards, in real processes: launched, or as written with the communication of torch's DTensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import traced_shards as runs
from torch.torch_version import TorchVersion
from worlds import in_turn, run_world

from collage_neuron.runtime.process_agreement import AS_WRITTEN, LAUNCHES, READS

Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """What each of two processes found: one world for all tests."""
    folder = tmp_path_factory.mktemp("world")
    calls: dict[str, tuple[Any, ...]] = {
        "launched": (runs.all_launched,),
        "as written": (runs.all_as_written,),
        "fsdp": (runs.of_fsdp, folder / "saved"),
        "one decision": (runs.one_decision,),
    }
    return run_world(2, folder, in_turn, calls)


OTHERS = "columns", "replicas", "random bits", "looks"


@pytest.mark.parametrize("name", [*runs.TRACED, *OTHERS])
def test_traced_shards_have_the_words_of_whole_parameters(name: str, found: Found) -> None:
    """Uneven and empty shards too; where steps ask what a DTensor knows, those of steps that do not."""
    for ended in (own["launched"][name] for own in found):
        assert ended.different == []
        assert (ended.misses, ended.why) == (0, "")
        assert ended.kinds


@pytest.mark.parametrize("name", [*runs.SUMMED, "lamb of columns"])
def test_sums_over_shards_are_launched(name: str, found: Found) -> None:
    """Of parameters, of parts, and of all: as in float64, but for some roundings.

    Newer torch gathers parts of different sizes for their mean: such a step runs as written.
    """
    is_gathered = name == "stable_adamw" and TorchVersion(torch.__version__) >= "2.10"
    for ended in (own["as written"][name] for own in found):
        assert ended.different == []
        assert ended.misses == 4 * is_gathered
        assert ("all_gather" in ended.why) if is_gathered else (ended.why == "" and ended.kinds)


WITH_OTHERS = "muon of replicas", "novograd, partial gradients"


@pytest.mark.parametrize("name", [*runs.AS_WRITTEN, *WITH_OTHERS])
def test_other_steps_over_shards_run_as_written(name: str, found: Found) -> None:
    """Numbers as states, matrix products, parts that are kept, gathered values: as plain torch over fp32 DTensors."""
    for ended in (own["as written"][name] for own in found):
        assert ended.different == []
        assert ended.misses or name == "holds_gradients"


def test_fsdp_is_as_plain_torch_and_resumes(found: Found) -> None:
    """Each process has data of its own; states are DTensors, and the same in all processes."""
    for own in found:
        assert {claim: wrong for claim, wrong in own["fsdp"].items() if wrong} == {}


def test_replicas_of_shards_and_shards_in_two_dimensions_are_as_plain_torch(tmp_path: Path) -> None:
    for own in run_world(4, tmp_path, runs.of_meshes):
        for said in own.pop("a process without a gradient"):
            assert "about to take different steps" in said
        assert {claim: wrong for claim, wrong in own.items() if wrong} == {}


def test_all_processes_take_the_same_decision(found: Found) -> None:
    """None waits for others that do not come, and states have the same formats."""
    for own in (each["one decision"] for each in found):
        *decided, said = own["sent"]
        assert decided == [LAUNCHES, AS_WRITTEN, READS, AS_WRITTEN, LAUNCHES]
        assert "about to take different steps" in str(said)
        for said, *wrong in own["without"]:
            assert "about to take different steps" in said
            assert wrong == []
        assert own["launched without"][0] == "no refusal"
        said, *changed = own["failed"]
        assert "rejects this step, or raises in it" in said or "one process" in said
        assert changed == own["unlike"] == own["kept and read"].different == []
        assert own["kept and read"].misses
        assert own["misses"]
