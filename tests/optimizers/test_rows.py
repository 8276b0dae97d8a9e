"""Optimizers with means over rows and columns, kept as states: captured, within bounds, on two backends alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import as_written
import pytest
import torch
from as_written import LAYOUTS, Written, assert_near, backends_agree, equal, large, parameters, run, with_threads
from as_written import but_for_backends as bits
from pytorch_optimizer import CAME
from rowed import ALL, ByNeuron, Came, Factored, Products
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import StrategyChanged, TranslationError, UnsupportedUpdate
from collage_neuron.numerics import matrix_sums
from collage_neuron.passes.backends.reference import BACKEND as REFERENCE
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.format_record import record_of

BACKENDS = ("reference", "native")
SHAPES = ((40, 40), (130, 33), (1, 48), (48, 1), (3, 5, 37), (17,), (0, 36), (36, 0))
LONG = ((130, 260), (3, 66, 33), (32, 32), (1, 129), (65, 64))
"""Rows that machine code takes."""
LARGE = ((150, 300), (3, 70, 40))

pytestmark = [pytest.mark.usefixtures("rejecting"), pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer")]


EVERY: tuple[Any, ...] = (*ALL, partial(CAME, lr=0.02, weight_decay=0.01))


def compiled(
    make: Any = Came, strategy: str = "full", shapes: Sequence[tuple[int, ...]] = SHAPES, **settings: Any
) -> tuple[Any, list[Parameter]]:
    # Validation is two thirds of the time; it is on in `backends_agree`.
    return as_written.compiled(make, strategy, shapes, verbose=False, **{"validate": "off", **settings})


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("make", EVERY)
def test_it_is_as_near_to_float64_as_fp32_is(make: Any) -> None:
    """Within 2**-18 of a step, six steps long: some thirty roundings of 2**-24, of which few add up."""
    shapes = [s for s in SHAPES if math.prod(s)]
    optimizer, params = compiled(make, "fp32", shapes)
    run(optimizer, 6)
    assert not bookkeeping(optimizer).as_written
    exact = parameters(torch.float64, shapes)
    plain = make(exact)
    run(plain, 6)
    assert_near(optimizer, params, exact, parameters(torch.float64, shapes), 6)
    for p, q in zip(params, exact, strict=True):
        for name, value in optimizer.state[p].items():
            if name in bookkeeping(optimizer).small:
                wanted = plain.state[q][name]
                assert (value.dtype, value.shape) == (torch.float32, wanted.shape)
                assert ((value - wanted).abs() <= 2**-19 * wanted.abs()).all()


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize(
    ("make", "strategy"),
    [*((m, "full") for m in EVERY), (Factored, "plus"), (Came, "split433"), (Factored, "stochastic")],
)
def test_backends_give_the_same_bits(make: Any, strategy: str) -> None:
    assert backends_agree(2, make, strategy, SHAPES[::2])


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("make", EVERY)
def test_machine_code_runs_all_of_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = compiled(make, shapes=LONG, backend="reference")
    run(wanted, 3)
    optimizer, _ = compiled(make, shapes=LONG, backend="native")

    def never(*args: Any) -> Any:
        raise AssertionError("left to the reference")

    monkeypatch.setattr(REFERENCE, "run_one", never)
    monkeypatch.setattr("collage_neuron.passes.backends.reference.RowSums.__call__", never)
    run(optimizer, 3)
    assert bits(optimizer) == bits(wanted)


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


@cache
def in_order() -> list[Tensor]:
    return large(Came, LARGE, "reference")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_order_does_not_matter(backend: str, layout: str) -> None:
    assert equal(large(Came, LARGE, backend, LAYOUTS[layout]), in_order())


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_and_pieces_do_not_matter(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one, three = in_order(), with_threads(partial(large, Came, LARGE, backend), 3)
    monkeypatch.setattr("collage_neuron.passes.backends.reference.CHUNK", 1 << 10)
    monkeypatch.setattr(REFERENCE, "_lowered", {})
    assert equal(one, three)
    assert equal(one, large(Came, LARGE, backend))


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
    right = matrix_sums.ENDINGS[matrix_sums.mean_to]
    wrong = right._replace(finish=lambda total, n: total / max(n - 1, 1))
    monkeypatch.setitem(matrix_sums.ENDINGS, matrix_sums.mean_to, wrong)
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


class Transposed(Written):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g.mT.contiguous().mean(dim=-1), alpha=group["lr"])


class FirstOfThree(Written):
    """A mean over another dimension than the last two."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g - g.mean(dim=0, keepdim=True), alpha=group["lr"])


class Crossed(Written):
    """Of a square matrix the means of rows, beside its columns: broadcasting takes one for the other."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g - g.mean(dim=-1), alpha=group["lr"])


class Mixed(Written):
    """Of a square matrix a state that is of rows in one place, and of columns in another."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["v"] = torch.zeros(p.shape[:1], device=p.device)
        state["v"].lerp_(g.mean(dim=-1), 0.1)
        p.sub_(g - state["v"], alpha=group["lr"])


class Blocks(Written):
    """Means over the rows of each half, beside means of whole rows."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = g.view(2, -1, p.shape[-1]).mean(dim=1)
        p.sub_(g - mean.mean() * g.mean(dim=1, keepdim=True), alpha=group["lr"])


class Fourth(Written):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g / (g.norm(p=4, dim=-1, keepdim=True) + 1e-6), alpha=group["lr"])


REJECTED: dict[type[Written], tuple[int, ...]] = {
    Transposed: (6, 6), FirstOfThree: (3, 4, 5), Crossed: (6, 6), Mixed: (6, 6), Blocks: (6, 4), Fourth: (6, 4),
}  # fmt: skip


@pytest.mark.parametrize("make", REJECTED, ids=lambda make: make.__name__)
def test_what_is_not_understood_is_rejected(make: type[Written]) -> None:
    with pytest.raises(UnsupportedUpdate, match=r"not elementwise|of shape"):
        collage_neuron.compile(make([Parameter(torch.ones(REJECTED[make]).bfloat16())]), verbose=False)


def test_words_of_blocks_are_rejected() -> None:
    with pytest.raises(UnsupportedUpdate, match=r"words of blocks beside sums of rows or columns"):
        compiled(ByNeuron, "split311", ((40, 24),))


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
    with pytest.raises(UnsupportedUpdate, match="shares its memory"):
        optimizer.step()
