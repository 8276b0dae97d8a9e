"""The instrument pass: sums and counts on XLA, and the pass and its parts."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.fx as fx
from exact import intervals, on_xla
from instrumented import (
    UNDERFLOW,
    U,
    Updates,
    check_on_reference,
    hundredth_step,
    terms,
    updates,
    updates_of,
)
from models import MODES
from planned import capture
from torch import Tensor
from updates import OPTIMIZERS, random_inputs, rewritten

from collage_neuron.errors import VerificationError
from collage_neuron.numerics.eft import narrow, widen
from collage_neuron.numerics.reductions import REDUCTIONS, count, total
from collage_neuron.numerics.strategies import formats_for
from collage_neuron.passes.backends import reference
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.backends.xla import lower
from collage_neuron.passes.backends.xla.lower import rows
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import verify
from collage_neuron.passes.pipeline import rewrite


class Range(NamedTuple):
    low: float
    high: float


def allowed(u: Updates, inputs: Sequence[Tensor], shape: tuple[int, ...]) -> tuple[list[Range], list[Range]]:
    """Between which numbers each sum and each count must be, whatever XLA contracts and in whatever order it adds.

    A sum of m numbers in any order is off by (m - 1) U of the sum of magnitudes, to first order; a row is one such sum,
    the rows another, and each term was rounded once: 1 % more covers the second order.
    """
    found = intervals(terms(u.measured), inputs, u.scalars)[len(u.measured.outputs) :]
    sums, counts = found[: len(u.measured.sums)], found[len(u.measured.sums) :]
    error = 1.01 * (sum(rows(math.prod(shape))) + 1) * U
    ranges = []
    for i in sums:
        slack = error * float(torch.maximum(i.low.abs(), i.high.abs()).sum()) + UNDERFLOW
        ranges.append(Range(float(i.low.sum()) - slack, float(i.high.sum()) + slack))
    return ranges, [Range(int(i.low.sum()), int(i.high.sum())) for i in counts]


def distinct() -> Iterator[tuple[str, str, str]]:
    """Each optimizer in every mode, but for modes that store its values in the same formats as one before.

    SGD has no second moment: for it split422 is split423, plus is light, and so on.
    """
    for name, (_, states) in OPTIMIZERS.items():
        seen = set()
        for strategy, arithmetic in MODES:
            formats = formats_for(strategy, states, {s: "slow" for s in states if "sq" in s}, torch.bfloat16)
            key = arithmetic, *formats.values()
            if key not in seen:
                yield name, strategy, arithmetic
            seen.add(key)


@pytest.mark.sampled(of=4)  # the reference measures in each mode in test_instrument.py; XLA adds in one way
@pytest.mark.parametrize(("name", "strategy", "arithmetic"), list(distinct()))
def test_on_xla_they_are_what_contraction_and_the_order_of_addition_allow(
    xla: torch.device, name: str, strategy: str, arithmetic: str
) -> None:
    u, shape = updates(name, strategy, arithmetic), (64, 192)  # a block, and a shorter one in each row
    inputs = random_inputs(u.measured, shape)
    check_on_reference(u, inputs)
    sums, counts = on_xla(u.measured, inputs, u.scalars)[len(u.measured.outputs) :]
    sum_ranges, count_ranges = allowed(u, inputs, shape)
    for value, (low, high) in zip([*sums.tolist(), *counts.tolist()], sum_ranges + count_ranges, strict=True):
        assert low <= value <= high
    assert all(high - low <= 12288 / 100 for low, high in count_ranges)  # fewer than one element in a hundred is open


@pytest.mark.parametrize("shape", [(), (1,), (3, 5, 7), (2 * 50257,), (0,)])
def test_parameters_of_every_shape_are_measured(xla: torch.device, shape: tuple[int, ...]) -> None:
    u = updates("adamw", "plus", "fp32")
    inputs = random_inputs(u.measured, shape)
    check_on_reference(u, inputs)
    sums, counts = on_xla(u.measured, inputs, u.scalars)[len(u.measured.outputs) :]
    assert (sums.dtype, counts.dtype) == (torch.float32, torch.int32)
    sum_ranges, count_ranges = allowed(u, inputs, shape)
    for value, (low, high) in zip([*sums.tolist(), *counts.tolist()], sum_ranges + count_ranges, strict=True):
        assert low <= value <= high


def adding() -> Update:
    """Stores an fp32 value as it is, and adds it up."""
    graph = fx.Graph()
    x = widen(fx.Proxy(graph.placeholder("x"), fx.proxy.GraphAppendingTracer(graph)))
    graph.output(tuple(r.node for r in (narrow(x, "fp32"), total(x), count(x == x))))
    return Update.elementwise(graph, ("x",), ("x",), ScalarProgram(), {}, sums=("x",), counts=("x",))


def test_xla_adds_millions_of_equal_terms_within_the_bound(xla: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running sum in fp32, or in eight of them, would be off by more: the control."""
    n, x = 1 << 22, 0.1
    exact = n * torch.tensor(x).double().item()
    bound = 1.01 * sum(rows(n)) * U * exact
    _, sums, counts = on_xla(adding(), [torch.full((n,), x)])
    assert abs(sums.item() - exact) <= bound
    assert counts.item() == n
    monkeypatch.setattr(lower, "rows", lambda n: (1, n))
    _, sums, _ = on_xla(adding(), [torch.full((n,), x)])
    assert abs(sums.item() - exact) > bound


# The pass and its parts ----------------------------------------------------------------------------------------------


def test_the_reference_adds_the_pieces_of_a_large_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    u = updates("adamw", "plus", "fp32")
    inputs = random_inputs(u.measured, (7, 1000))
    whole = ReferenceUpdate(u.measured)(inputs, u.scalars)
    monkeypatch.setattr(reference, "CHUNK", 999)
    pieces = ReferenceUpdate(u.measured)(inputs, u.scalars)
    assert all(map(torch.equal, whole[:-2], pieces[:-2]))
    assert torch.equal(whole[-1], pieces[-1])
    torch.testing.assert_close(whole[-2], pieces[-2], rtol=7000 * 2.0**-53, atol=0)
    assert whole[-2].dtype == torch.float64


def test_golden_text_of_an_update_that_measures_itself(golden: Callable[[str, str], None]) -> None:
    u = updates("sgd", "light", "fp32").measured
    golden("measured_sgd_light_fp32.txt", f"sums: {u.sums}\ncounts: {u.counts}\n{format_graph(u.graph.graph)}")


def test_without_a_monitor_the_graph_is_what_it_was() -> None:
    captured = hundredth_step("adamw").captured
    formats = formats_for("plus", captured.states, {"exp_avg_sq": "slow"}, torch.bfloat16)
    plain = rewrite(captured, formats, "fp32")
    updates("adamw", "plus", "fp32")
    assert rewrite(captured, formats, "fp32") is plain
    assert not plain.sums + plain.counts + plain.wanted
    assert str(plain.graph.graph) == str(rewritten(captured, formats, "fp32").graph.graph)
    assert not any(n.target in REDUCTIONS for n in plain.graph.graph.nodes)


def test_an_old_value_that_no_update_reads_is_not_measured() -> None:
    """A first step that makes its state a copy of the parameter: there is nothing it was before."""

    class Copying(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                self.state[p]["anchor"] = p.clone()
                p.sub_(p.grad)

    p = torch.nn.Parameter(torch.zeros(2))
    u = updates_of(capture(Copying, Copying([p]), {"params": [p]}, p, {}), "plus", "fp32")
    assert "low anchor" in u.measured.sums
    assert not any("anchor" in name for name in u.measured.counts)


def broken(update: Update, edit: Callable[[fx.Graph, tuple[fx.Node, ...]], tuple[fx.Node, ...]]) -> Update:
    graph = fx.Graph()
    results = graph.graph_copy(update.graph.graph, {})
    graph.output(edit(graph, results))  # type: ignore[arg-type]  # a tuple of nodes
    return update.with_body(graph)


def test_verify_wants_sums_and_counts_in_their_places() -> None:
    u = updates("sgd", "light", "fp32").measured
    with pytest.raises(VerificationError, match="not its 12 outputs, sums and counts in order"):
        verify(broken(u, lambda _, results: (*results[:-1], results[-2])[:-1]))
    with pytest.raises(VerificationError, match="outputs, sums and counts in order"):
        verify(broken(u, lambda _, results: (*results[:-4], results[-1], *results[-3:-1], results[-4])))
    with pytest.raises(VerificationError, match="a number of the whole update, and an operation computes with it"):
        verify(broken(u, lambda graph, results: (*results, graph.call_function(operator.add, (results[-1], 1)))))
