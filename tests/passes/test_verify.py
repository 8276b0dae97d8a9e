"""Verify: each invariant of explicit-rounding form and of stages, broken once, is caught."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.fx as fx
from models import MODES, REPRESENTATIVE
from planned import capture
from running import as_written_too
from torch.optim import AdamW
from updates import rewritten

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate, VerificationError
from collage_neuron.numerics.eft import Value, narrow, round_to, sqrt, widen
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.reductions import total
from collage_neuron.numerics.strategies import formats_for
from collage_neuron.passes.backends import registry
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.stage import ELEMENTWISE, KINDS, REDUCTION, Stage
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import verify

pytestmark = pytest.mark.usefixtures("rejecting")


# --- verify: each invariant of explicit-rounding form, broken once, is caught -----------------------------------------


def adamw_update(strategy: str, arithmetic: str) -> Update:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=1e-3, weight_decay=0.1)
    captured = capture(AdamW, optimizer, optimizer.param_groups[0], p, {}).captured
    formats = formats_for(strategy, captured.states, {"exp_avg": "average", "exp_avg_sq": "slow"}, torch.bfloat16)
    return rewritten(captured, formats, arithmetic)


@pytest.mark.parametrize(("strategy", "arithmetic"), MODES)
def test_golden_text_of_adamw(strategy: str, arithmetic: str, golden: Callable[[str, str], None]) -> None:
    update = adamw_update(strategy, arithmetic)
    verify(update)
    if strategy in REPRESENTATIVE:  # the others keep each value in a format that one of these has
        golden(f"adamw_{strategy}_{arithmetic}.txt", f"{update.scalars}\n{format_graph(update.graph.graph)}")


def without(update: Update, index: int) -> Update:
    """The update with its `index`-th round_to replaced by what it rounds."""
    module = copy.deepcopy(update.graph)
    node = [n for n in module.graph.nodes if n.target is round_to][index]
    node.replace_all_uses_with(node.args[0])
    module.graph.erase_node(node)
    module.recompile()
    return update.with_body(module.graph)


@pytest.mark.parametrize("strategy", ["light", "plus", "full"])
def test_dropping_any_rounding_in_fp32_arithmetic_is_caught_by_verify(strategy: str) -> None:
    update = adamw_update(strategy, "fp32")
    for i in range(sum(n.target is round_to for n in update.graph.graph.nodes)):
        with pytest.raises(VerificationError, match="without a round_to: a rounding was lost"):
            verify(without(update, i))


def with_foreign_operation(update: Update) -> Update:
    broken = update.with_body(copy.deepcopy(update.graph).graph)
    next(n for n in broken.graph.graph.nodes if n.target is sqrt).target = torch.erfinv
    return broken


BROKEN: dict[str, Callable[[Update], Update]] = {
    r"sqrt: .*erfinv.* is not an operation of explicit-rounding form": with_foreign_operation,
    "stores no param_lo, a component of param": lambda update: replace(
        update, outputs=tuple(k if k != "param_lo" else "other" for k in update.outputs)
    ),
    "stored twice": lambda update: replace(update, outputs=(*update.outputs, "param")),
}


@pytest.mark.parametrize("message", BROKEN)
def test_what_is_not_explicit_rounding_form_is_caught(message: str) -> None:
    with pytest.raises(VerificationError, match=message):
        verify(BROKEN[message](adamw_update("plus", "fp32")))


def test_explain_shows_formats_bytes_and_both_graphs() -> None:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(AdamW([p]), strategy="full", arithmetic="bf16")
    text = collage_neuron.explain(optimizer, graphs=True)
    for part in (
        f"strategy full, arithmetic bf16, backend {registry.choose('auto', p.device).name}, 14 bytes a parameter",
        "exp_avg            bf16x2     4 bytes",
        "addcdiv_default = aten.addcdiv.default(mul_tensor, lerp_scalar, add_tensor, value=s6)",
        "= lo((1 - s1))",
        "= round_to(",
    ):
        assert part in text


@pytest.mark.parametrize(
    ("strategy", "size"), [("bf16", 8), ("light", 10), ("plus", 12), ("full", 14), ("fp32", 16), ("fp32_states", 12)]
)
def test_bytes_per_parameter(strategy: str, size: int) -> None:
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    assert collage_neuron.bytes_per_parameter(collage_neuron.compile(AdamW([p]), strategy=strategy)) == size


QUESTIONS: list[Callable[[Any], object]] = [
    collage_neuron.explain,
    collage_neuron.bytes_per_parameter,
    lambda optimizer: collage_neuron.exact_value(optimizer, optimizer.param_groups[0]["params"][0]),
]


@pytest.mark.parametrize("ask", QUESTIONS)
def test_questions_want_a_compiled_optimizer(ask: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match=r"AdamW is not compiled; pass it to collage_neuron\.compile first"):
        ask(AdamW([torch.nn.Parameter(torch.zeros(2))]))
    model = collage_neuron.compile(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match=r"AdamW is not compiled yet: after compile\(model\) .* when it first steps"):
        ask(AdamW(model.parameters()))


def test_the_exact_value_of_a_tensor_that_is_no_parameter_is_refused() -> None:
    optimizer = collage_neuron.compile(AdamW([torch.nn.Parameter(torch.zeros(2))]))
    with pytest.raises(ValueError, match=r"the tensor of shape \[3\] is not a parameter of this CollageAdamW"):
        collage_neuron.exact_value(optimizer, torch.zeros(3))


class RowState(torch.optim.SGD):
    """Keeps a number for each row, in fp32."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if not self.state[p]:
                self.state[p]["rows"] = torch.zeros(p.shape[0])
        return super().step()


@as_written_too()
def test_bytes_are_those_of_the_tensors_that_are_there() -> None:
    """A matrix of 3 x 8: hi, lo and gradient of 2 bytes an element, and 4 bytes a row, on copies."""
    p = torch.nn.Parameter(torch.zeros(3, 8, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(RowState([p]))
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert collage_neuron.bytes_per_parameter(optimizer) == 6 + 4 / 8
    assert "rows               as made    0.5 bytes" in collage_neuron.explain(optimizer)


# --- stages: what they read and give fits together, or `verify` says where it does not --------------------------------


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


BROKEN_STAGES: dict[str, tuple[Callable[[], Update], str]] = {
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


@pytest.mark.parametrize("name", BROKEN_STAGES)
def test_verify_finds_what_does_not_fit(name: str) -> None:
    make, message = BROKEN_STAGES[name]
    with pytest.raises(VerificationError, match=message):
        verify(make())
