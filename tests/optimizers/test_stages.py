"""Optimizers with norms and means of whole tensors: captured in stages, within bounds, or rejected where parts are."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from as_written import SHAPES, Written, compiled, in_fp32, parameters, run, values
from headed import Mini
from rowed import Came, Factored
from staged import Lamb, Novograd, StableAdamW
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adafactor

import collage_neuron
from collage_neuron.errors import TranslationError, UnsupportedUpdate
from collage_neuron.numerics import reductions

BACKENDS = ("reference", "native")
pytestmark = pytest.mark.usefixtures("rejecting")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("gradient", [0.0, math.nan, math.inf, 1e-36, 1e25])
def test_extreme_gradients_and_zero_norms(gradient: float, backend: str) -> None:
    """Zero norms give the ratio 1; NaN spreads to the whole parameter; huge ones differ only where fp32 overflows."""
    params = [Parameter(w.bfloat16()) for w in (torch.zeros(40), torch.ones(8, 30), torch.ones(0, 3))]
    optimizer = collage_neuron.compile(Lamb(params), strategy="fp32", backend=backend, validate="off")
    exact = [Parameter(p.detach().double()) for p in params]
    plain = Lamb(exact)
    for p, q in zip(params, exact, strict=True):
        p.grad = torch.full(p.shape, gradient).bfloat16()
        q.grad = p.grad.double()
    optimizer.step()
    plain.step()
    for ours, theirs in zip(values(optimizer, params), exact, strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan()) or gradient == 1e25  # g * g is beyond fp32
        if gradient in (0.0, 1e-36):
            assert torch.allclose(ours.double(), theirs, rtol=2**-20, atol=0)


FACTORED = ["row                fp32 by row", "stage 0, reduction: grad -> reduced0, reduced1", "mean_to(",
            "state row = number0"]  # fmt: skip
NUMBER = ["v                  one fp32", "stage 1, numbers: v, reduced0 -> number0, number1", "state v = number0"]
EXPLAINED: list[tuple[Any, str, Any, list[str], float]] = [
    (
        Lamb,
        "full",
        SHAPES,
        ["stage 0, reduction: param, param_lo, grad", "stage 1, numbers: reduced0, reduced1 -> num"],
        14,
    ),
    (Factored, "full", ((40, 24), (16,)), FACTORED, (960 * 10 + 4 * (40 + 24) + 16 * 14) / 976),
    (Factored, "split433", ((40, 24), (16,)), FACTORED, (960 * 10 + 4 * (40 + 24) + 16 * 12) / 976),
    (Adafactor, "split433", ((24, 40), (17,)), ["fp32 by row", "fp32 by column"], (960 * 6 + 17 * 9 + 4 * 64) / 977),
    (Novograd, "full", ((24, 40), (16,), (0, 3)), NUMBER, 10 + 4 * 3 / 976),
    (Mini, "split433", ((8, 80),), ["vmean              fp32 by row", "seen in the shape [4, 160]"], 9 + 4 * 4 / 640),
]
"""Optimizers, strategies, shapes, lines of `explain`, and bytes per parameter."""


@pytest.mark.parametrize(("make", "strategy", "shapes", "said", "size"), EXPLAINED)
def test_it_is_explained_and_measured(make: Any, strategy: str, shapes: Any, said: list[str], size: float) -> None:
    optimizer, _ = compiled(make, strategy, shapes)
    monitor = collage_neuron.monitor(optimizer, every=1)
    run(optimizer, 2)
    assert monitor.latest() is not None
    text = collage_neuron.explain(optimizer, graphs=True)
    assert [line for line in said if line not in text] == []
    assert collage_neuron.bytes_per_parameter(optimizer) == pytest.approx(size)


@pytest.mark.parametrize("make", [Came, Novograd])
def test_bytes_choose_a_strategy(make: Any) -> None:
    optimizer = collage_neuron.compile(make(parameters(torch.bfloat16, ((40, 24),))), bytes=10, verbose=False)
    assert "chosen by bytes=10" in collage_neuron.explain(optimizer)


class PerStep(Written):
    """Takes the norm in every other step only."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state["step"] = state.get("step", 0) + 1
        p.sub_(g / (g.norm() + 1e-6) if state["step"] % 2 else g, alpha=group["lr"])


def test_steps_with_and_without_a_reduction_alternate() -> None:
    optimizer, params = compiled(PerStep)
    run(optimizer, 4)
    for ours, theirs in zip(values(optimizer, params), in_fp32(PerStep, 4), strict=True):
        assert (ours - theirs).abs().max() <= 2**-20 * theirs.abs().max()


class Fourth(Written):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g / (g.norm(p=4) + 1e-6), alpha=group["lr"])


class OfFilled(Written):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g / torch.full_like(p, 2.0).norm(), alpha=group["lr"])


@pytest.mark.parametrize("make", [Fourth, OfFilled], ids=lambda make: make.__name__)
def test_what_has_no_rule_is_rejected(make: type[Written]) -> None:
    with pytest.raises(UnsupportedUpdate, match=r"norm of order 4|filled with a number"):
        compiled(make)


class OverDimensions(Written):
    """Names the only dimension of a vector: over that of a matrix it would be another update."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g / (g.pow(2).mean(dim=0).sqrt() + 1e-6), alpha=group["lr"])


@pytest.mark.parametrize("shapes", [((6,), (4,)), ((6,), (1, 4)), ((1, 4), (6,)), ((6,), (1,))])
def test_dimensions_that_are_all_of_one_shape_are_not_all_of_another(shapes: tuple[tuple[int, ...], ...]) -> None:
    params = [Parameter(torch.ones(shape).bfloat16()) for shape in shapes]
    optimizer = collage_neuron.compile(OverDimensions(params), strategy="fp32")
    exact = [Parameter(torch.ones(shape)) for shape in shapes]
    run(optimizer, 3)
    run(OverDimensions(exact), 3)
    for ours, theirs in zip(values(optimizer, params), exact, strict=True):
        assert torch.allclose(ours, theirs, rtol=2**-20, atol=0)


@pytest.mark.parametrize("make", [Lamb, Came, Novograd])
def test_bf16_arithmetic_has_no_sums(make: Any) -> None:
    said = (
        "adds up all elements of a tensor, which arithmetic='bf16'"
        if make is Lamb
        else "arithmetic='bf16' does not define"
    )
    with pytest.raises(UnsupportedUpdate, match=said):
        compiled(make, "full", ((40, 24),), arithmetic="bf16")


def test_validation_notices_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _ = compiled(StableAdamW, "full", backend="reference", validate="on")
    right = reductions.OF_TENSOR[reductions.mean_of]
    wrong = right._replace(finish=lambda total, n: 4 * total / max(n, 1))
    monkeypatch.setitem(reductions.OF_TENSOR, reductions.mean_of, wrong)
    with pytest.raises(TranslationError, match="rounding explains"):
        run(optimizer, 2)


def test_what_zero_has_split_is_rejected() -> None:
    zero = pytest.importorskip("torch_xla.distributed.zero_redundancy_optimizer").ZeroRedundancyOptimizer
    optimizer, _ = compiled(Lamb)
    (held := zero.__new__(zero)).base_optimizer = optimizer  # it makes its optimizer itself, of parts
    with pytest.raises(UnsupportedUpdate, match="torch_xla's ZeRO-1"):
        run(optimizer, 1)
    held.base_optimizer = None
