"""The instrument pass and its parts; test_reference_and_xla.py compares what XLA measures with the reference."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from as_written import Written
from exact import on_xla
from instrumented import U, hundredth_step, updates, updates_of
from planned import capture
from updates import random_inputs, rewritten

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

    class Copying(Written):
        def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            state["anchor"] = p.clone()
            p.sub_(g)

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
