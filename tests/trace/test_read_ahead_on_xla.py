"""On an XLA device a step computes all numbers that it is going to read in one program, and reads them at once."""

from __future__ import annotations

from collections.abc import Callable
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


def counted(optimizer: Any) -> tuple[int, int]:
    """The executions and reads of a later step, of which one execution takes the updates."""
    run(optimizer, 6)
    torch_xla.sync(wait=True)
    before = counts()
    optimizer.step()
    torch_xla.sync(wait=True)
    executions, reads = (now - then for now, then in zip(counts(), before, strict=True))
    return executions, reads


@pytest.mark.parametrize(
    ("make", "expected"),
    [(torch.optim.Adafactor, (3, 2)), (lambda params: Stepping(params, update=that_asks_first), (2, 1))],
    ids=["Adafactor", "that_asks_first"],
)
def test_a_step_waits_for_its_numbers_once_or_twice(make: Any, expected: tuple[int, int], xla: torch.device) -> None:
    """Adafactor reads two numbers of each of twelve tensors, the second of what the first one scales."""
    optimizer = compiled(make, ((32, 32),) * 12, xla, strategy="plus", backend="xla")
    assert counted(optimizer) == expected
    plain = make([Parameter(torch.ones(32, 32, dtype=torch.bfloat16).to(xla)) for _ in range(12)])
    assert counted(plain) == (25, 24)


def halved(x: torch.Tensor) -> torch.Tensor:
    x.view(-1).mul_(0.5)
    return x


AS_WRITTEN: dict[str, Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "topk": lambda o, p, m: halved(m.topk(2, 0)[0]).sum(0),
    "max": lambda o, p, m: halved(m.max(0)[0]),
    "a row of a square": lambda o, p, m: m.sort()[0][0],
    "argmax, then a view of the parameter": lambda o, p, m: halved(p)[0] * m.argmax(),
    "a view, then a number of the last step": lambda o, p, m: halved(m)[0] + kept(o, m),
    "a graph": lambda o, p, m: with_graph(m),
}
"""What a step does that runs as written from there on."""


def kept(o: Any, m: torch.Tensor) -> torch.Tensor:
    o.kept["size"] = o.kept.get("size", 0.0) * 0.5 + m.norm()
    return torch.clamp(o.kept["size"], max=1.0)


def with_graph(m: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        v = m * 1.0
    return halved(v.detach())[0]


@pytest.mark.parametrize("name", AS_WRITTEN)
def test_views_alias_in_a_step_that_runs_as_written_from_its_middle_on(name: str, xla: torch.device) -> None:
    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        m = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
        p.sub_(m.add_(AS_WRITTEN[name](o, p, m)), alpha=0.1)

    values, plain = (found(update, ((5, 5), (4, 5)), xla, strategy)[0] for strategy in ("fp32", ""))
    for x, y in zip(values, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)
