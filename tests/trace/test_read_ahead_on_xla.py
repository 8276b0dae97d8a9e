"""On an XLA device a step computes all numbers that it is going to read in one program, and reads them at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reading_updates import READ, UPDATES, of_rows, that_asks_first
from torch.nn import Parameter
from traced_updates import Stepping, stepped_beside
from xla_runs import compiled, met, run, torch_xla

SHAPES = {"mixed": ((4, 6), (70, 70), (4, 6), (), (3,), (70, 70)), "large": ((70, 70),) * 5}
EXECUTIONS, READS = "ExecuteTime", "TransferFromDeviceTime"
MADE_ON_THE_HOST = (of_rows,)
"""They do not run on XLA in plain torch either."""


def found(
    update: Any, shapes: Any, xla: torch.device, strategy: str = "fp32"
) -> tuple[list[torch.Tensor], list[float]]:
    torch.manual_seed(0)
    dtype = torch.bfloat16 if strategy else torch.float32
    params = [Parameter(torch.randn(shape).bfloat16().to(xla, dtype)) for shape in shapes]
    READ.clear()
    _, values = stepped_beside(lambda own: Stepping(own, update=update), params, strategy, 6, validate="off")
    return [x.cpu() for x in values], READ.copy()


@pytest.mark.sampled(of=6)
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("update", [x for x in UPDATES if x not in MADE_ON_THE_HOST])
def test_values_are_those_of_numbers_that_are_read_when_asked_for(
    update: Any, shapes: Any, xla: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    values, ahead = found(update, shapes, xla)
    monkeypatch.setattr("collage_neuron.trace.read_ahead.FEWEST", 10**6)
    expected, asked = found(update, shapes, xla)
    assert ahead == pytest.approx(asked, rel=2**-17)  # a larger program may add up in another order
    for x, y, plain in zip(values, expected, found(update, shapes, xla, "")[0], strict=True):
        torch.testing.assert_close(x, y, rtol=2**-17, atol=2**-17)
        torch.testing.assert_close(x, plain, rtol=1e-5, atol=1e-5)


def counts() -> list[int]:
    return [int((met.metric_data(name) or [0])[0]) for name in (EXECUTIONS, READS)]


@pytest.mark.parametrize(
    ("make", "expected"),
    [(torch.optim.Adafactor, (3, 2)), (lambda params: Stepping(params, update=that_asks_first), (2, 1))],
    ids=["Adafactor", "that_asks_first"],
)
def test_a_step_waits_for_its_numbers_once_or_twice(make: Any, expected: tuple[int, int], xla: torch.device) -> None:
    """Adafactor reads two numbers of each of twelve tensors, the second of what the first one scales."""
    optimizer = compiled(make, ((32, 32),) * 12, xla, strategy="plus", backend="xla")
    run(optimizer, 6)
    torch_xla.sync(wait=True)
    before = counts()
    optimizer.step()
    torch_xla.sync(wait=True)
    executions, reads = (now - then for now, then in zip(counts(), before, strict=True))
    assert (executions, reads) == expected  # of which one execution takes the updates
