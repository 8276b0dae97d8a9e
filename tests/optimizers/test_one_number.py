"""States of one number that a step computes from tensors (NovoGrad's second moment): captured, counted, or rejected."""

from __future__ import annotations

from typing import Any

import as_written
import pytest
import torch
from as_written import Written, equal, run, values
from staged import Novograd
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import TranslationError, UnsupportedUpdate
from collage_neuron.passes.backends import reference

BACKENDS = ("reference", "native")
SHAPES = ((24, 40), (40, 16), (16,), (1,), (0, 3))

pytestmark = pytest.mark.usefixtures("rejecting")


def parameters(dtype: torch.dtype = torch.bfloat16) -> list[Parameter]:
    return as_written.parameters(dtype, SHAPES)


def compiled(make: Any = Novograd, strategy: Any = "full", **settings: Any) -> tuple[Any, list[Parameter]]:
    return as_written.compiled(make, strategy, SHAPES, verbose=False, **settings)


def test_fp32_parameters_have_them_too() -> None:
    params, plain = parameters(torch.float32), parameters(torch.float32)
    with pytest.warns(UserWarning, match="float32 parameters"):
        optimizer = collage_neuron.compile(Novograd)(params)
    run(optimizer, 3)
    run(Novograd(plain), 3)
    for ours, theirs in zip(params, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=2**-18, atol=2**-20)


def test_a_nan_reaches_the_number() -> None:
    for backend in BACKENDS:
        optimizer, params = compiled(backend=backend)
        run(optimizer, 1)
        params[0].grad = torch.full_like(params[0], torch.nan)
        optimizer.step()
        assert optimizer.state[params[0]]["v"].isnan()
        assert not optimizer.state[params[1]]["v"].isnan()


@pytest.mark.parametrize("steps", [1, 2])
def test_validation_notices_a_number_that_is_not_stored(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    optimizer, _ = compiled(backend="reference", validate="on")
    run(optimizer, steps - 1)
    monkeypatch.setattr(reference, "store_small", lambda launch, found: None)
    with pytest.raises(TranslationError, match=r"v becomes .*rounding explains"):
        run(optimizer, 1, first=5)


# --- what is rejected -------------------------------------------------------------------------------------------------


class Double(Written):
    """Keeps its number in float64, by the author's choice."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        v = g.double().square().sum()
        state["v"] = 0.9 * state["v"] + v if "v" in state else v
        p.sub_((g / state["v"].sqrt()).to(p.dtype), alpha=group["lr"])


class Branching(Written):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        square = g.pow(2).sum()
        state["v"] = square if "v" not in state or state["v"] == 0 else 0.9 * state["v"] + square
        p.sub_(g / state["v"].sqrt(), alpha=group["lr"])


class Flags(Written):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["large"] = g.norm() > 1.0
        p.sub_(torch.where(state["large"], 0.1 * g, g), alpha=group["lr"])


@pytest.mark.parametrize("make", [Double, Flags])
def test_what_is_not_understood_is_rejected(make: type[Written]) -> None:
    with pytest.raises(UnsupportedUpdate, match=r"float64|a state is not fp32"):
        compiled(make)


def test_it_may_decide_a_branch() -> None:
    optimizer, params = compiled(Branching, "fp32")
    run(optimizer, 3)
    run(Branching(exact := parameters(torch.float32)), 3)
    for ours, theirs in zip(values(optimizer, params), exact, strict=True):
        assert torch.allclose(ours, theirs, rtol=2**-18, atol=2**-20)


def test_that_of_a_parameter_without_dimensions_is_in_words() -> None:
    params = [Parameter(torch.tensor(1.0).bfloat16())]
    optimizer = collage_neuron.compile(Novograd(params), strategy="fp32")
    run(optimizer, 3)
    run(Novograd(exact := [Parameter(torch.tensor(1.0))]), 3)
    assert torch.allclose(collage_neuron.exact_value(optimizer, params[0]), exact[0], rtol=2**-18)


def test_a_number_that_two_parameters_share_is_rejected() -> None:
    optimizer, params = compiled()
    run(optimizer, 1)
    before = [p.clone() for p in params]
    optimizer.state[params[1]]["v"] = optimizer.state[params[0]]["v"]
    with pytest.raises(UnsupportedUpdate, match="two parameters hold a state of the same memory"):
        run(optimizer, 1)
    assert equal(before, params)
