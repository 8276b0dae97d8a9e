"""States of one number, and of means over rows and columns, that a step computes: captured, counted, or rejected."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import as_written
import pytest
import torch
from as_written import Written, equal, parameters, run, values
from as_written import but_for_backends as bits
from rowed import Came, Products
from staged import Novograd
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import StrategyChanged, TranslationError, UnsupportedUpdate
from collage_neuron.numerics import reductions
from collage_neuron.passes.backends import staged
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.store import record_of

pytestmark = [pytest.mark.usefixtures("rejecting"), pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer")]


# --- optimizers with means over rows and columns, kept as states: captured, within bounds, on two backends alike ------

BACKENDS = ("reference", "native")
SHAPES = ((40, 40), (130, 33), (1, 48), (48, 1), (3, 5, 37), (17,), (0, 36), (36, 0))
LONG = ((130, 260), (3, 66, 33), (32, 32), (1, 129), (65, 64))
"""Rows that machine code takes."""


def compiled(
    make: Any = Came, strategy: str = "full", shapes: Sequence[tuple[int, ...]] = SHAPES, **settings: Any
) -> tuple[Any, list[Parameter]]:
    return as_written.compiled(make, strategy, shapes, verbose=False, **settings)


class Slow(Written):
    """Second moments of rows and columns that decay slowly, kept with a dimension of one."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        means = {"row": (g * g).mean(-1, keepdim=True), "col": (g * g).mean(-2, keepdim=True)}
        for name, mean in means.items():
            state.setdefault(name, torch.zeros_like(mean)).mul_(0.999).add_(mean, alpha=0.001)
        v = state["row"] * state["col"] / state["row"].mean(-2, keepdim=True)
        p.sub_(g / (v.sqrt() + 1e-8), alpha=group["lr"])


@pytest.mark.parametrize("shape", [(1, 8), (8, 1), (3, 1, 5), (6, 4, 1, 1)])
def test_the_second_moment_of_one_row_or_column_is_that_of_its_elements(shape: tuple[int, ...]) -> None:
    """What is a mean of one element each is recognised as a second moment: `plus` keeps it in two words."""
    optimizer, (p,) = compiled(Slow, "plus", (shape,))
    run(optimizer, 5)
    (exact,) = parameters(torch.float64, (shape,))
    run(Slow([exact]), 5)
    whole = [name for name in ("row", "col") if optimizer.state[p][name].shape == p.shape]
    assert whole
    assert {record_of(optimizer, p)[name] for name in whole} == {"bf16x2"}
    assert torch.allclose(collage_neuron.exact_value(optimizer, p).double(), exact, rtol=0, atol=2**-14)


def test_a_checkpoint_of_another_model_is_rejected() -> None:
    optimizer, _ = compiled(shapes=((40, 24),))
    run(optimizer, 1)
    other, _ = compiled(shapes=((40, 32),))
    with pytest.raises(ValueError, match=r"has shape \[24\] and the parameter \[40, 32\]|has shape \[40, 24\]"):
        other.load_state_dict(optimizer.state_dict())


def test_a_nan_reaches_its_row_and_its_column() -> None:
    found = []
    for backend in BACKENDS:
        optimizer, (p,) = compiled(backend=backend, shapes=((40, 50),))
        run(optimizer, 1)
        assert p.grad is not None
        p.grad[3, 5] = torch.nan
        optimizer.step()
        state = optimizer.state[p]
        assert state["sq_row"].isnan().nonzero().tolist() == [[3]]
        assert state["sq_col"].isnan().nonzero().tolist() == [[5]]
        found.append({k: v for k, v in state.items() if k.endswith(("row", "col"))})
    assert all(torch.equal(found[0][k].nan_to_num(7.0), found[1][k].nan_to_num(7.0)) for k in found[0])


@pytest.mark.parametrize("steps", [1, 2])
def test_validation_notices_a_wrong_mean(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    optimizer, _ = compiled(backend="reference", shapes=((40, 40),), validate="on")
    run(optimizer, steps - 1)
    right = reductions.ENDINGS[reductions.mean_to]
    wrong = right._replace(finish=lambda total, n: total / max(n - 1, 1))
    monkeypatch.setitem(reductions.ENDINGS, reductions.mean_to, wrong)
    with pytest.raises(TranslationError, match="rounding explains"):
        run(optimizer, 1, first=5)


def test_large_parameters_are_validated_in_a_corner() -> None:
    optimizer, _ = compiled(shapes=((200, 300), (5, 90, 80)), validate="on")
    run(optimizer, 3)
    assert not bookkeeping(optimizer).as_written


def test_the_strategy_changes_in_training() -> None:
    optimizer, params = compiled(shapes=LONG)
    run(optimizer, 2)
    before = [optimizer.state[p]["sq_row"].clone() for p in params]
    with pytest.warns(StrategyChanged):
        optimizer = collage_neuron.compile(optimizer, strategy="split433", verbose=False)
    assert equal(before, [optimizer.state[p]["sq_row"] for p in params])
    run(optimizer, 2, first=2)
    assert not bookkeeping(optimizer).as_written


# --- what is rejected -------------------------------------------------------------------------------------------------


def test_a_reduction_that_reads_no_component() -> None:
    found = []
    for backend in BACKENDS:
        optimizer, params = compiled(Products, "fp32", LONG, backend=backend)
        run(optimizer, 3)
        found.append(bits(optimizer))
    run(Products(exact := parameters(torch.float64, LONG)), 3)
    assert found[0] == found[1]
    for p, q in zip(params, exact, strict=True):
        assert torch.allclose(collage_neuron.exact_value(optimizer, p).double(), q, rtol=2**-21, atol=2**-26)


def test_a_gradient_in_the_memory_of_a_state_is_rejected() -> None:
    """What is written first would be read."""
    optimizer, (p,) = compiled(Came, "fp32", ((40, 50),), backend="native")
    run(optimizer, 1)
    p.grad = optimizer.state[p]["m"].view(-1).view(torch.bfloat16)[:2000].view(40, 50)
    with pytest.raises(ValueError, match="share memory"):
        optimizer.step()


# --- states of one number that a step computes from tensors (NovoGrad's second moment): captured, counted, or rejected

NUMBERS = ((24, 40), (40, 16), (16,), (1,), (0, 3))


def numbers(dtype: torch.dtype = torch.bfloat16) -> list[Parameter]:
    return as_written.parameters(dtype, NUMBERS)


def compiled_number(make: Any = Novograd, strategy: Any = "full", **settings: Any) -> tuple[Any, list[Parameter]]:
    return as_written.compiled(make, strategy, NUMBERS, verbose=False, **settings)


def test_fp32_parameters_have_them_too() -> None:
    params, plain = numbers(torch.float32), numbers(torch.float32)
    with pytest.warns(UserWarning, match="float32 parameters"):
        optimizer = collage_neuron.compile(Novograd)(params)
    run(optimizer, 3)
    run(Novograd(plain), 3)
    for ours, theirs in zip(params, plain, strict=True):
        assert torch.allclose(ours, theirs, rtol=2**-18, atol=2**-20)


@pytest.mark.parametrize("steps", [1, 2])
def test_validation_notices_a_number_that_is_not_stored(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    optimizer, _ = compiled_number(backend="reference", validate="on")
    run(optimizer, steps - 1)
    monkeypatch.setattr(staged, "store_small", lambda launch, found: None)
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
        compiled_number(make)


def test_it_may_decide_a_branch() -> None:
    optimizer, params = compiled_number(Branching, "fp32")
    run(optimizer, 3)
    run(Branching(exact := numbers(torch.float32)), 3)
    for ours, theirs in zip(values(optimizer, params), exact, strict=True):
        assert torch.allclose(ours, theirs, rtol=2**-18, atol=2**-20)


def test_a_number_that_two_parameters_share_is_rejected() -> None:
    optimizer, params = compiled_number()
    run(optimizer, 1)
    before = [p.clone() for p in params]
    optimizer.state[params[1]]["v"] = optimizer.state[params[0]]["v"]
    with pytest.raises(UnsupportedUpdate, match="two parameters hold a state of the same memory"):
        run(optimizer, 1)
    assert equal(before, params)
