"""Stages: what they read and give fits together, or `verify` says where it does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate, VerificationError
from collage_neuron.numerics.eft import Value, narrow, round_to, widen
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.reductions import total
from collage_neuron.passes.backends import registry
from collage_neuron.passes.ir.printer import format_stages, format_update
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.stage import ELEMENTWISE, KINDS, REDUCTION, Stage
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import verify

pytestmark = pytest.mark.usefixtures("rejecting")


def stage(
    kind: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    body: Callable[..., Sequence[Value]],
    reduced: Sequence[str] = (),
) -> Stage:
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    results: Sequence[Any] = body(*(fx.Proxy(graph.placeholder(name), tracer) for name in inputs))
    graph.output(tuple(r.node for r in results))
    return Stage(kind, graph, tuple(inputs), tuple(outputs), tuple(reduced))


def descend(param: Value, grad: Value, norm: Value) -> Sequence[Value]:
    return [narrow(round_to(widen(param) - widen(grad) / norm, "bf16"), "bf16")]


NORM = stage(REDUCTION, ["grad"], [], lambda grad: [total(widen(grad) * widen(grad))], ["norm"])
DESCENT = stage(ELEMENTWISE, ["param", "grad", "norm"], ["param"], descend)


def update_of(*stages: Stage) -> Update:
    """Descent along a gradient divided by its norm."""
    return Update(stages, ("param", "grad"), ("param",), ScalarProgram(), {"param": format_named("bf16")})


def test_a_reduction_gives_the_next_stage_a_small_tensor() -> None:
    update = update_of(NORM, DESCENT)
    verify(update)
    p, g = torch.tensor([1.0, 2.0]).bfloat16(), torch.tensor([3.0, 4.0]).bfloat16()
    (norm,) = NORM.graph(g)
    (new,) = DESCENT.graph(p, g, norm)
    assert torch.equal(new, (p.float() - g.float() / 25).bfloat16())


def test_what_runs_one_elementwise_stage_rejects_others() -> None:
    assert (one := update_of(DESCENT)).only_stage is DESCENT
    assert one.graph is DESCENT.graph
    with pytest.raises(UnsupportedUpdate, match="has the stages reduction, elementwise; only one elementwise stage"):
        _ = update_of(NORM, DESCENT).graph


@pytest.mark.parametrize("name", registry.names())
def test_a_backend_says_that_it_runs_one_elementwise_stage(name: str) -> None:
    backend = registry.get(name)
    assert backend.supports(update_of(DESCENT)) is None
    for update in (update_of(NORM, DESCENT), update_of(DESCENT, DESCENT)):
        reason = backend.supports(update)
        assert reason is not None
        assert "one elementwise stage" in reason


BROKEN: dict[str, tuple[Callable[[], Update], str]] = {
    "none": (lambda: update_of(), "has no stage"),
    "kind": (lambda: update_of(replace(DESCENT, kind="magic")), f"kind 'magic'; there are {', '.join(KINDS)}"),
    "order": (lambda: update_of(DESCENT, NORM), "stage 0 reads norm, which no stage before it gives"),
    "twice": (lambda: update_of(NORM, NORM, DESCENT), "stage 1 gives norm, and so does a stage before it"),
    "missing": (lambda: update_of(NORM), "no stage gives param, which the update stores"),
    "results": (
        lambda: update_of(NORM, replace(DESCENT, reduced=("more",))),
        "returns 1 values, not its 2 outputs, sums and counts in order",
    ),
    "operation": (
        lambda: update_of(stage(REDUCTION, ["grad"], [], lambda g: [torch.erfinv(g)], ["norm"]), DESCENT),
        "is not an operation of explicit-rounding form",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_verify_finds_what_does_not_fit(name: str) -> None:
    make, message = BROKEN[name]
    with pytest.raises(VerificationError, match=message):
        verify(make())


def test_the_key_of_a_component_is_its_value_before_the_step() -> None:
    """A stage may read what an earlier one has stored: it gets the old one, so no order of writing matters."""
    again = stage(ELEMENTWISE, ["param"], ["grad"], lambda p: [p])
    update = replace(update_of(NORM, DESCENT, again), outputs=("param", "grad"))
    verify(update)
    with pytest.raises(VerificationError, match="stage 2 reads new, which no stage before it gives"):
        verify(replace(update, stages=(NORM, DESCENT, replace(again, inputs=("new",)))))


def test_stages_are_printed_by_number_only_if_there_are_several() -> None:
    assert "stage" not in format_stages(update_of(DESCENT))
    assert format_update(update_of(NORM, DESCENT)).splitlines() == [
        "  stage 0, reduction: grad -> norm",
        "  widen = widen(grad)",
        "  widen_1 = widen(grad)",
        "  mul = mul(widen, widen_1)",
        "  total = total(mul)",
        "  return (total) as (norm)",
        "  stage 1, elementwise: param, grad, norm -> param",
        "  widen = widen(param)",
        "  widen_1 = widen(grad)",
        "  truediv = truediv(widen_1, norm)",
        "  sub = sub(widen, truediv)",
        "  round_to = round_to(sub, bf16)",
        "  narrow = narrow(round_to, bf16)",
        "  return (narrow) as (param)",
    ]
