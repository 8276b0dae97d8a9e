"""Optimizers that step another one over FSDP2, DDP, ZeRO-1 and on XLA: those of plain torch."""

from __future__ import annotations

import inner_spread as runs
import pytest
from worlds import run_world

pytest.importorskip("pytorch_optimizer")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[str]]]:
    """What each of two processes found: one world for all tests."""
    return run_world(2, tmp_path_factory.mktemp("world"), runs.all_of_them)


@pytest.mark.parametrize("name", runs.TABLE)
def test_spread_over_processes_they_are_those_of_plain_torch(name: str, found: list[dict[str, list[str]]]) -> None:
    """In the strategy `fp32` bit for bit, but for launched steps; where torch raises an error, so does ours."""
    assert [own[name] for own in found] == [[], []]


def test_on_xla_they_are_those_of_a_cpu() -> None:
    """SAM, whose closure needs the weights in the middle of the step; others are launched."""
    torch_xla = pytest.importorskip("torch_xla")
    here, there = (runs.values_on(device) for device in ("cpu", torch_xla.device()))
    assert max(float((x - y).abs().max()) for x, y in zip(here, there, strict=True)) < 2**-20
