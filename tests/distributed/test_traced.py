"""Traced steps over shards, in real processes: the words of captured steps, or captured themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import traced_shards as runs
from worlds import run_world


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, runs.Ended]]:
    """What each of two processes found: one world for all tests."""
    folder: Path = tmp_path_factory.mktemp("world")
    return run_world(2, folder, runs.everything)


OTHERS = "columns", "replicas", "random bits", "fully_shard", "looks"


@pytest.mark.parametrize("name", [*runs.TRACED, *OTHERS])
def test_traced_shards_have_the_words_of_captured_ones(name: str, found: list[dict[str, runs.Ended]]) -> None:
    """Uneven and empty shards too; where steps ask what a DTensor knows, captured ones that do not."""
    for own in found:
        assert own[name].different == []
        assert own[name].errors == ("", "")
        assert (own[name].misses, own[name].why) == (0, "")
        assert own[name].kinds


@pytest.mark.parametrize("name", runs.CAPTURED)
def test_other_steps_over_shards_are_captured(name: str, found: list[dict[str, runs.Ended]]) -> None:
    """Norms, parts that are added up or kept, gathered values: no process is left waiting."""
    for own in found:
        assert own[name].different == []
        assert own[name].errors[0] == own[name].errors[1]
        assert own[name].misses
