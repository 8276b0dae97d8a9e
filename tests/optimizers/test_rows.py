"""Optimizers with means over rows and columns, kept as states: captured, within bounds, on two backends alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from as_written import Written, equal, everything, on_both_backends, run, values
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
SHAPES = ((40, 40), (24, 70), (130, 33), (1, 48), (48, 1), (3, 5, 37), (2, 3, 4, 36), (17,), (0, 36), (36, 0))
LONG = ((130, 260), (3, 66, 33), (32, 32), (1, 129), (65, 64))
"""Rows that machine code takes."""

pytestmark = [pytest.mark.usefixtures("rejecting"), pytest.mark.filterwarnings("ignore::UserWarning:pytorch_optimizer")]


def published(params: Any) -> Any:
    return CAME(params, lr=0.02, weight_decay=0.01)


EVERY: tuple[Any, ...] = (*ALL, published)


def parameters(dtype: torch.dtype = torch.bfloat16, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    g = torch.Generator().manual_seed(0)
    return [Parameter((0.3 * torch.randn(shape, generator=g)).bfloat16().to(dtype)) for shape in shapes]


def compiled(
    make: Any = Came, strategy: str = "full", shapes: Sequence[tuple[int, ...]] = SHAPES, **settings: Any
) -> tuple[Any, list[Parameter]]:
    params = parameters(shapes=shapes)
    settings = {"validate": "off", **settings}  # two thirds of the time; on in `on_both_backends`
    return collage_neuron.compile(make(params), strategy=strategy, verbose=False, **settings), params


def bits(optimizer: Any) -> Any:
    params, states, groups = everything(optimizer)
    return params, states, [{k: v for k, v in group.items() if k != "collage_backend"} for group in groups]


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("make", EVERY)
def test_it_is_as_near_to_float64_as_fp32_is(make: Any) -> None:
    """Within 2**-18 of a step, ten steps long: some thirty roundings of 2**-24, of which few add up."""
    shapes = [s for s in SHAPES if math.prod(s)]
    optimizer, params = compiled(make, "fp32", shapes)
    run(optimizer, 10)
    assert not bookkeeping(optimizer).as_written
    exact = parameters(torch.float64, shapes)
    plain = make(exact)
    run(plain, 10)
    for p, q, before in zip(params, exact, parameters(shapes=shapes), strict=True):
        ours, theirs, start = collage_neuron.exact_value(optimizer, p), q.detach(), before.detach().double()
        stores = 10 * 2**-24 * torch.maximum(start.abs(), theirs.abs())
        assert ((ours - theirs).abs() <= 2**-18 * (theirs - start).abs().max() + 1.1 * stores).all()
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
    def two_steps(**settings: Any) -> Any:
        optimizer, _ = compiled(make, strategy, **settings)
        run(optimizer, 2)
        return optimizer

    reference, native = on_both_backends(two_steps)
    assert native == reference


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("make", EVERY)
def test_machine_code_runs_all_of_it(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, _ = compiled(make, shapes=LONG, backend="reference")
    run(wanted, 3)
    optimizer, _ = compiled(make, shapes=LONG, backend="native")

    def never(*args: Any) -> Any:
        raise AssertionError("left to the reference")

    monkeypatch.setattr(REFERENCE, "run_one", never)
    monkeypatch.setattr("collage_neuron.passes.backends.reference_rows.RowSums.__call__", never)
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


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: torch.empty_like(t.mT.contiguous()).mT.copy_(t),
    "strided": lambda t: torch.stack([t, t], dim=-1)[..., 1],
}


def large(backend: str, layout: Callable[[Tensor], Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    params = [Parameter(layout(torch.randn(shape).bfloat16())) for shape in ((150, 300), (3, 70, 40))]
    optimizer = collage_neuron.compile(Came(params), strategy="full", backend=backend)
    for _ in range(3):
        for p in params:
            p.grad = layout(torch.randn(p.shape).bfloat16())
        optimizer.step()
    return values(optimizer, params)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_memory_order_does_not_matter(backend: str, layout: str) -> None:
    assert equal(large(backend, LAYOUTS[layout]), large("reference", torch.Tensor.contiguous))


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_and_pieces_do_not_matter(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(large(backend, torch.Tensor.contiguous))
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr("collage_neuron.passes.backends.reference.CHUNK", 1 << 10)
    monkeypatch.setattr(REFERENCE, "_lowered", {})
    found.append(large(backend, torch.Tensor.contiguous))
    assert equal(found[0], found[1])
    assert equal(found[0], found[2])


def test_a_checkpoint_of_another_model_is_rejected() -> None:
    optimizer, _ = compiled(shapes=((40, 24),))
    run(optimizer, 1)
    other, _ = compiled(shapes=((40, 32),))
    with pytest.raises(ValueError, match=r"has shape \[24\] and the parameter \[40, 32\]|has shape \[40, 24\]"):
        other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("strategy", ["full", "split433"])
def test_it_is_explained_measured_and_counted(strategy: str) -> None:
    optimizer, _ = compiled(Factored, strategy, ((40, 24), (16,)))
    monitor = collage_neuron.monitor(optimizer, every=1)
    run(optimizer, 2)
    assert monitor.latest() is not None
    text = collage_neuron.explain(optimizer, graphs=True)
    assert "row                fp32 by row" in text
    assert "stage 0, reduction: grad -> reduced0, reduced1" in text
    assert "mean_to(" in text
    assert "state row = number0" in text
    each = {"full": 10, "split433": 10}[strategy]
    wanted = (960 * each + 4 * (40 + 24) + 16 * {"full": 14, "split433": 12}[strategy]) / 976
    assert collage_neuron.bytes_per_parameter(optimizer) == pytest.approx(wanted)
    chosen = collage_neuron.compile(Came(parameters(shapes=((40, 24),))), bytes=10, verbose=False)
    assert "chosen by bytes=10" in collage_neuron.explain(chosen)


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


def test_words_of_blocks_and_bf16_arithmetic_are_rejected() -> None:
    with pytest.raises(UnsupportedUpdate, match=r"words of blocks beside sums of rows or columns"):
        compiled(ByNeuron, "split311", ((40, 24),))
    with pytest.raises(UnsupportedUpdate, match=r"arithmetic='bf16' does not define"):
        compiled(Came, "full", ((40, 24),), arithmetic="bf16")


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
