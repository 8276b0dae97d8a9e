"""Traced steps beside recorded ones and plain torch, for parameters that are not all whole tensors of bf16 numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from running import compiled_only
from torch.nn import Parameter
from traced_cases import COMPUTED, LAUNCHED, Stepping, initial, set_gradients
from traced_classes import FOREIGN, OF_TORCH

import collage_neuron
from collage_neuron.trace.recorded_classes import TRACE

Words = dict[str, Any]


def model() -> torch.nn.Sequential:
    """Its norm's parameters have the shape of a bias."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.LayerNorm(6), torch.nn.Linear(6, 3))


def stepped(make: Any, steps: int = 6, **chosen: Any) -> tuple[Words, Any]:
    """All words of the parameters and states after some steps, and what was traced."""
    trained = model()
    trained, optimizer = collage_neuron.compile(trained, make(trained.parameters()), verbose=False, **chosen)
    params = list(trained.parameters())
    for t in range(1, steps + 1):
        set_gradients(params, t)
        optimizer.step()
    words = {f"{i} {key}": x for i, p in enumerate(params) for key, x in optimizer.state[p].items()}
    return words | {f"{i} param": p.detach() for i, p in enumerate(params)}, optimizer._collage_bookkeeping.traces


def different(monkeypatch: pytest.MonkeyPatch, make: Any, **chosen: Any) -> list[str]:
    """The words of traced steps that are not those of recorded ones."""
    recorded, _ = stepped(make, **chosen)
    monkeypatch.setenv(TRACE, "on")
    traced, traces = stepped(make, **chosen)
    assert traces.misses == 0, traces.why
    assert traces.kinds, "nothing was traced"
    assert traced.keys() == recorded.keys()
    return [key for key, x in recorded.items() if not _are_same(torch.as_tensor(x), torch.as_tensor(traced[key]))]


def _are_same(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.dtype == y.dtype and torch.equal(x, y)


OF_LISTS = {"foreach_nadam"}
"""Lists are recorded as loops are, and round otherwise."""


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("strategy", ["plus", "split433", "fp32", "bf16"])
@pytest.mark.parametrize("name", sorted(OF_TORCH.keys() - OF_LISTS))
def test_a_step_has_the_recorded_bits(name: str, strategy: str, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "native":
        pytest.importorskip("llvmlite")
    assert different(monkeypatch, OF_TORCH[name], strategy=strategy, backend=backend) == []


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("strategy", ["plus", "split433", "fp32", "bf16", "stochastic"])
@pytest.mark.parametrize("name", sorted(OF_TORCH.keys() - OF_LISTS))
def test_fp32_parameters_beside_bf16_ones(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"strategy": strategy, "keep_fp32": [torch.nn.LayerNorm]}
    assert different(monkeypatch, OF_TORCH[name], **kept) == []


@pytest.mark.parametrize("kept", [[torch.nn.LayerNorm], lambda *_: True])
@pytest.mark.parametrize("name", FOREIGN)
def test_fp32_parameters_of_classes_of_others(name: str, kept: Any) -> None:
    found, traces = stepped(FOREIGN[name], strategy="fp32", keep_fp32=kept)
    plain = model()
    optimizer = FOREIGN[name](plain.parameters())
    for t in range(1, 7):
        set_gradients(list(plain.parameters()), t)
        optimizer.step()
    values = [found.get(f"{i} param_master", found[f"{i} param"]) for i in range(6)]
    for x, p in zip(values, plain.parameters(), strict=True):
        torch.testing.assert_close(x, p.detach(), rtol=2**-20, atol=2**-21)
    assert traces.misses == 0, traces.why


@pytest.mark.sampled(of=4)
@pytest.mark.parametrize("strategy", ["plus", "light", "bf16"])
@pytest.mark.parametrize("name", sorted(OF_TORCH.keys() - OF_LISTS))
def test_bf16_arithmetic(name: str, strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert different(monkeypatch, OF_TORCH[name], strategy=strategy, arithmetic="bf16") == []


def _sharing(params: list[Any]) -> None:
    """Two gradients have elements in common; those that are parts of one buffer would wait."""
    both = torch.randn(30, generator=torch.Generator().manual_seed(7)).bfloat16()
    params[0].grad, params[1].grad = both[:24].view(4, 6), both[20:26]


@pytest.mark.parametrize("arithmetic", ["bf16", "fp32"])
@pytest.mark.parametrize("name", ["a_value_in_double", "the_gradient_is_replaced", "gradients that share memory"])
def test_what_may_not_run_as_written_is_rejected(name: str, arithmetic: str) -> None:
    """A step as written computes in fp32."""
    update = COMPUTED.get(name, LAUNCHED["momentum"])
    params = initial(torch.bfloat16)
    before = [p.detach().clone() for p in params]

    def first_step() -> None:
        made = Stepping(params, update)
        optimizer = collage_neuron.compile(made, strategy="plus", verbose=False, arithmetic=arithmetic)
        set_gradients(params, 1)
        if name not in COMPUTED:
            _sharing(params)
        optimizer.step()

    with compiled_only(), pytest.raises(collage_neuron.UnsupportedUpdate, match="Stepping cannot"):
        first_step()
    assert all(map(torch.equal, params, before))


SHAPES = (4, 6), (0,), (6,), (0, 3), (), (3, 0), ()
OTHERS = {"half": torch.float16, "int8": torch.int8, "double": torch.float64}


def _with_others(make: Any, frozen: str, steps: int = 6) -> tuple[Words, Any]:
    """Steps in which some parameters have no elements or dimensions, and changing ones no gradients; one is frozen."""
    torch.manual_seed(0)
    params = [Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES]
    base = Parameter(torch.ones(3, dtype=OTHERS[frozen]), requires_grad=False)
    optimizer = collage_neuron.compile(make([*params, base]), strategy="split433", verbose=False)
    for t in range(1, steps + 1):
        set_gradients(params, t)
        for p in params[t % 3 :: 3] if t < 5 else params:
            p.grad = None
        optimizer.step()
    assert not optimizer.state.get(base)
    assert base.dtype == OTHERS[frozen]
    words = {f"{i} {key}": x for i, p in enumerate(params) for key, x in optimizer.state[p].items()}
    return words | {f"{i} param": p.detach() for i, p in enumerate(params)}, optimizer._collage_bookkeeping.traces


@pytest.mark.parametrize("frozen", OTHERS)
@pytest.mark.parametrize("name", ["adamw", "fused_adamw"])
def test_without_elements_dimensions_or_gradients(name: str, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, _ = _with_others(OF_TORCH[name], frozen)
    monkeypatch.setenv(TRACE, "on")
    traced, traces = _with_others(OF_TORCH[name], frozen)
    assert (traces.misses, traces.why) == (0, "")
    assert len(traces.kinds) == 4
    assert traced.keys() == recorded.keys()
    assert [key for key, x in recorded.items() if not _are_same(torch.as_tensor(x), torch.as_tensor(traced[key]))] == []
