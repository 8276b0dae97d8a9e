"""Traced steps over shards, in real processes: launched, or as written with the communication of torch's DTensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import traced_shards as runs
from worlds import run_world

from collage_neuron.runtime.cross_rank_check import AS_WRITTEN, LAUNCHES, READS


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, runs.Ended]]:
    """What each of two processes found: one world for all tests."""
    return run_world(2, tmp_path_factory.mktemp("world"), runs.all_launched)


@pytest.fixture(scope="module")
def as_written(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, runs.Ended]]:
    """The same of steps that are not launched, and of sums."""
    return run_world(2, tmp_path_factory.mktemp("world"), runs.all_as_written)


OTHERS = "columns", "replicas", "random bits", "looks"


@pytest.mark.parametrize("name", [*runs.TRACED, *OTHERS])
def test_traced_shards_have_the_words_of_whole_parameters(name: str, launched: list[dict[str, runs.Ended]]) -> None:
    """Uneven and empty shards too; where steps ask what a DTensor knows, those of steps that do not."""
    for own in launched:
        assert own[name].different == []
        assert (own[name].misses, own[name].why) == (0, "")
        assert own[name].kinds


@pytest.mark.parametrize("name", [*runs.SUMMED, "lamb of columns"])
def test_sums_over_shards_are_launched(name: str, as_written: list[dict[str, runs.Ended]]) -> None:
    """Of parameters, of parts, and of all: as in float64, but for some roundings."""
    for own in as_written:
        assert own[name].different == []
        assert (own[name].misses, own[name].why) == (0, "")
        assert own[name].kinds


WITH_OTHERS = "muon of replicas", "novograd, partial gradients"


@pytest.mark.parametrize("name", [*runs.AS_WRITTEN, *WITH_OTHERS])
def test_other_steps_over_shards_run_as_written(name: str, as_written: list[dict[str, runs.Ended]]) -> None:
    """Numbers as states, matrix products, parts that are kept, gathered values: as plain torch over fp32 DTensors."""
    for own in as_written:
        assert own[name].different == []
        assert own[name].misses or name.startswith("holds") or name == "adafactor"


def test_fsdp_is_as_plain_torch_and_resumes(tmp_path: Path) -> None:
    """Each process has data of its own; states are DTensors, and the same in all processes."""
    for own in run_world(2, tmp_path, runs.of_fsdp, tmp_path / "saved"):
        assert {claim: wrong for claim, wrong in own.items() if wrong} == {}


def test_replicas_of_shards_and_shards_in_two_dimensions_are_as_plain_torch(tmp_path: Path) -> None:
    for own in run_world(4, tmp_path, runs.of_meshes):
        for said in own.pop("a process without a gradient"):
            assert "about to take different steps" in said
        assert {claim: wrong for claim, wrong in own.items() if wrong} == {}


def test_all_processes_take_the_same_decision(tmp_path: Path) -> None:
    """None waits for others that do not come, and states have the same formats."""
    for own in run_world(2, tmp_path, runs.one_decision):
        *decided, said = own.sent
        assert decided == [LAUNCHES, AS_WRITTEN, READS, AS_WRITTEN, LAUNCHES]
        assert "about to take different steps" in str(said)
        for said, *wrong in (own.without_one, own.without_all):
            assert "about to take different steps" in said
            assert wrong == []
        assert own.launched_without[0] == "no refusal"
        said, *changed = own.failed
        assert "rejects this step, or raises in it" in said or "one process" in said
        assert changed == []
        assert own.unlike == []
        assert own.kept_and_read.different == []
        assert own.kept_and_read.misses
        assert own.misses
