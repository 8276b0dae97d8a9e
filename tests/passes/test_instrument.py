"""What an update measures of itself, against float64 on recorded updates, within bounds derived from fp32.

Recorded are the stored components before and after a step, and what the update wanted (`rewritten(..., wanted)`),
element by element. On the reference backend sums must agree within the rounding of their terms, counts to the last
element; test_reference_and_xla.py compares what XLA measures with the reference.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import paper_adamw
import pytest
import torch
import torch.fx as fx
import torch_cases
from as_written import Written
from exact import on_reference, on_xla
from instrumented import CASES, U, Updates, check_on_reference, hundredth_step, updates, updates_of
from models import MODES, REPRESENTATIVE_MODES
from planned import capture, plan_update
from torch import Tensor
from updates import random_inputs

import collage_neuron
from collage_neuron.errors import VerificationError
from collage_neuron.numerics.eft import narrow, widen
from collage_neuron.numerics.reductions import count, total
from collage_neuron.numerics.strategies import STRATEGIES
from collage_neuron.passes.backends.xla import lower
from collage_neuron.passes.backends.xla.lower import rows
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import verify
from collage_neuron.states import word_encoding
from collage_neuron.states.visible_states import ParamShaped

SHAPE = (12, 20)


STEPS = 4


def steps_of(case: torch_cases.Case, strategy: str, arithmetic: str) -> Iterator[tuple[Updates, list[Tensor]]]:
    """The updates of some steps of a compiled optimizer, and the components that each starts with."""
    p = torch_cases.parameter(torch_cases.weights(SHAPE), torch.bfloat16)
    optimizer = collage_neuron.compile(case.of(p), strategy=strategy, arithmetic=arithmetic)
    for g in torch_cases.gradients(STEPS, SHAPE):
        p.grad = g.to(p.dtype)
        job = plan_update(case.base, optimizer, optimizer.param_groups[0], [p])
        before = {k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, Tensor)}
        before |= {"param": p.detach().clone(), "grad": p.grad}
        optimizer.step()
        u = updates_of(job.recording, strategy, arithmetic)
        fresh = {k: v for k, v in optimizer.state[p].items() if isinstance(v, Tensor) and k not in before}
        starts = job.recording.captured.fresh
        before |= {k: torch.full_like(v, starts.get(k, 0.0)) for k, v in fresh.items()}
        yield u, [before[key] for key in u.measured.inputs]


EVERYWHERE = ["adamw", "adam_amsgrad", "sgd_options", "adagrad", "asgd", "rprop", "rmsprop_centered"]
"""Optimizers that are tried under every strategy; the others under `plus`."""


@pytest.mark.sampled(of=12)
@pytest.mark.parametrize(
    ("name", "strategy", "arithmetic"),
    [(name, *pair) for name in CASES for pair in REPRESENTATIVE_MODES if name in EVERYWHERE or pair[0] == "plus"],
)
def test_sums_and_counts_are_those_of_float64_on_recorded_updates(name: str, strategy: str, arithmetic: str) -> None:
    for u, inputs in steps_of(CASES[name], strategy, arithmetic):
        check_on_reference(u, inputs)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_raw_update_in_fp32_arithmetic_is_that_of_float64_within_its_roundings(strategy: str) -> None:
    """AdamW: delta = (s0 - 1) theta + s6 m' / (sqrt(v') / s4 + s5).

    fp32 rounds 3 operations on the way to m' (each at most of |m| + |g|), 4 to v' and so 2 to its root, one for the
    root itself, and one each for / s4, + s5, * s6, the quotient, the product with theta and the sum; each scalar once.
    """
    u = updates("adamw", strategy, "fp32")
    inputs = random_inputs(u.recorded)
    raw = on_reference(u.recorded, inputs, u.scalars)[len(u.recorded.outputs)].double()
    old = dict(zip(u.recorded.inputs, inputs, strict=True))
    theta, m, v = (
        word_encoding.decode(fmt, [old[c] for c in fmt.keys(k)]).double()
        for k, fmt in ((k, u.recorded.formats[k]) for k in ("param", "exp_avg", "exp_avg_sq"))
    )
    g, s = old["grad"].double(), hundredth_step("adamw").slots
    denominator = (v * s[2] + g * g * s[3]).sqrt() / s[4] + s[5]
    step, decay = s[6] * (m + s[1] * (g - m)) / denominator, theta * (s[0] - 1)
    bound = U * (5 * s[6] * -(m.abs() + g.abs()) / denominator + 12 * step.abs() + 2 * decay.abs() + raw.abs())
    assert (bound > 0).all()
    assert ((raw - (decay + step)).abs() <= bound).all()
    assert bound.median() < 1e-5 * raw.abs().median()  # it says something


@pytest.mark.parametrize("strategy", ["light", "plus"])
def test_the_raw_update_in_bf16_arithmetic_is_what_the_paper_aggregates(strategy: str) -> None:
    lr, betas, decay = 1e-3, (0.9, 0.999), 0.1
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW([p], lr=lr, betas=betas, weight_decay=decay)
    states = {s: ParamShaped(p) for s in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(99.0)}
    u = updates_of(capture(torch.optim.AdamW, optimizer, optimizer.param_groups[0], p, states), strategy, "bf16")
    inputs = random_inputs(u.recorded)
    old = dict(zip(u.recorded.inputs, inputs, strict=True))
    stored = old["param"], old["param_lo"], old["exp_avg"], old["exp_avg_sq"]
    state = paper_adamw.State(*stored, old.get("exp_avg_sq_lo"))
    expected, *_ = paper_adamw.aggregated_update(state, old["grad"], 100, paper_adamw.Hyper(lr, *betas, 1e-8, decay))
    raw = on_reference(u.recorded, inputs, u.scalars)[len(u.recorded.outputs)]
    assert torch.equal(raw, expected.float())


def test_an_update_that_replaces_the_parameter_wants_what_fp32_arithmetic_would_put_there() -> None:
    """`where` in place of a sum: the change that it makes is what is wanted."""

    class Replacing(Written):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.0001)

        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p.copy_(torch.where(g > 0, p - group["lr"] * g, p))

    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = Replacing([p])
    recording = capture(Replacing, optimizer, optimizer.param_groups[0], p, {})
    theta, g = torch.linspace(0.5, 1, 64).bfloat16(), torch.linspace(-1, 1, 64).bfloat16()
    for strategy, arithmetic in MODES:
        u = updates_of(recording, strategy, arithmetic)
        fmt = u.recorded.formats["param"]
        old = dict(zip(fmt.keys("param"), fmt.encode(theta.float()), strict=True))
        inputs = [(old | {"grad": g})[key] for key in u.recorded.inputs]
        raw = on_reference(u.recorded, inputs, u.scalars)[len(u.recorded.outputs)].double()
        expected = torch.where(g > 0, -1e-4 * g.double(), 0.0)
        assert ((raw - expected).abs() <= 2 * U).all()  # theta is below 1: a product and a sum
        counts = dict(zip(u.measured.counts, on_reference(u.measured, inputs, u.scalars)[-1].tolist(), strict=True))
        assert counts["zero"] == 32
        # In bf16 arithmetic p - u rounds to p before `where` takes it: lost, and seen to be.
        assert (counts["lost pair"] == 32) == (strategy in ("bf16", "fp32_states") or arithmetic == "bf16")


# --- the pass ---------------------------------------------------------------------------------------------------------


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


def test_golden_text_of_an_update_that_measures_itself(golden: Callable[[str, str], None]) -> None:
    u = updates("sgd", "light", "fp32").measured
    golden("measured_sgd_light_fp32.txt", f"sums: {u.sums}\ncounts: {u.counts}\n{format_graph(u.graph.graph)}")


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
