"""Updates by rows run as written on copies where that is faster, unless it is asked for that they are captured."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from rowed import Factored
from torch.nn import Parameter

import collage_neuron
from collage_neuron.runtime import worth
from collage_neuron.states.bookkeeping import bookkeeping


def run(*shapes: tuple[int, ...], turn: bool = False, **settings: Any) -> tuple[str, list[torch.Tensor]]:
    g = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(shape, generator=g).bfloat16()) for shape in shapes]
    params = [Parameter(p.data.T.contiguous().T) if turn and p.dim() > 1 else p for p in params]
    optimizer = collage_neuron.compile(Factored(params), verbose=False, **{"strategy": "full"} | settings)
    for _ in range(3):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).bfloat16()
        optimizer.step()
    return bookkeeping(optimizer).twin, [p.detach() for p in params]


@pytest.fixture(autouse=True)
def from_1000_elements_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worth, "LEAST", 1000)


def test_large_matrices_are_captured() -> None:
    assert run((64, 64), (8,), (20, 32))[0] == ""


@pytest.mark.parametrize(
    ("shapes", "settings"),
    [
        ([(20, 33), (8,)], {}),
        ([(400, 16)], {}),
        ([(64, 64)], {"turn": True}),
        ([(64, 64)], {"strategy": "stochastic"}),
        ([(300, 40), *[(10, 40)] * 20], {}),
    ],
    ids=["small", "short rows", "transposed", "drawn", "small on average"],
)
def test_others_run_as_written(shapes: list[tuple[int, ...]], settings: dict[str, Any]) -> None:
    twin, found = run(*shapes, **settings)
    assert "faster as written" in twin
    assert all(p.isfinite().all() for p in found)


@pytest.mark.parametrize("settings", [{"unsupported": "error"}, {"backend": "reference"}, {"backend": "native"}])
def test_whoever_asks_for_it_gets_it_captured(settings: dict[str, Any]) -> None:
    assert run((20, 33), **settings)[0] == ""


def test_both_ways_agree() -> None:
    found, wanted = run((20, 40), strategy="fp32"), run((20, 40), strategy="fp32", backend="reference")
    assert found[0]
    assert not wanted[0]
    assert all(
        torch.allclose(a.float(), b.float(), rtol=2**-7, atol=1e-6) for a, b in zip(found[1], wanted[1], strict=True)
    )


def test_a_vector_first_is_captured_and_stays_so() -> None:
    """The first parameter decides at `compile`; a later decision would convert the states of a run."""
    assert run((8,), (20, 33))[0] == ""


@pytest.mark.parametrize(("saved", "compiled"), [("native", "auto"), ("auto", "native")])
def test_a_checkpoint_decides_with_its_settings_how_a_run_goes_on(saved: str, compiled: str) -> None:
    """So that its states have their formats again, and the run its bits."""

    def made(backend: str) -> tuple[list[Parameter], Any]:
        g = torch.Generator().manual_seed(0)
        params = [Parameter(torch.randn(shape, generator=g).bfloat16()) for shape in ((20, 33), (1, 40))]
        return params, collage_neuron.compile(Factored(params), strategy="split433", backend=backend, verbose=False)

    def steps(params: list[Parameter], optimizer: Any, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape, generator=g).bfloat16()
            optimizer.step()

    (params, optimizer), (others, resumed) = made(saved), made(compiled)
    steps(params, optimizer, 1)
    for p, q in zip(params, others, strict=True):
        q.data.copy_(p.data)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert bool(bookkeeping(resumed).twin) == bool(bookkeeping(optimizer).twin) == (saved == "auto")
    steps(params, optimizer, 2)
    steps(others, resumed, 2)
    assert all(map(torch.equal, params, others))
    for p, q in zip(params, others, strict=True):
        a, b = optimizer.state[p], resumed.state[q]
        assert a.keys() == b.keys()
        assert all(torch.equal(torch.as_tensor(a[k]), torch.as_tensor(b[k])) for k in a)
