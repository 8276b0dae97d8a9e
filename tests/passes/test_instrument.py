"""What an update measures of itself, against float64 on recorded updates, within bounds derived from fp32.

Recorded are the stored components before and after a step, and what the update wanted (`rewritten(..., wanted)`),
element by element. On the reference backend sums must agree within the rounding of their terms, counts to the last
element. On XLA a loop that measures may contract other products to FMAs than the loop that stores: `exact.intervals`
says which numbers that allows for each element, and sums and counts must lie between what its ends give.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import paper_adamw
import pytest
import torch
import torch.fx as fx
import torch_cases
from exact import edited, intervals, on_reference, on_xla
from models import MODES, REPRESENTATIVE_MODES
from torch import Tensor
from updates import OPTIMIZERS, random_inputs, rewritten

import collage_neuron
from collage_neuron.errors import VerificationError
from collage_neuron.numerics.eft import narrow, widen
from collage_neuron.numerics.reductions import REDUCTIONS, count, total
from collage_neuron.numerics.strategies import STRATEGIES, formats_for, formats_of_signs
from collage_neuron.passes.analysis.accumulators import magnitude_states, slow_states
from collage_neuron.passes.backends import reference
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.backends.xla import lower
from collage_neuron.passes.backends.xla.lower import rows
from collage_neuron.passes.capture.capture import capture
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import ParamShaped
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.verify import verify
from collage_neuron.passes.pipeline import rewrite
from collage_neuron.runtime import plan
from collage_neuron.states import words

U = 2.0**-24
"""What one rounding to fp32 may change, relatively."""


DRAWING = [1, 2, 3, 0]
"""Seed, step, parameter and first element, for what is stored by chance."""


class Updates(NamedTuple):
    """One step's update: as it measures itself, and as it returns what it wants, element by element."""

    measured: Update
    recorded: Update
    scalars: Tensor


def updates_of(recording: Recording, strategy: str, arithmetic: str) -> Updates:
    captured = recording.captured
    slow = slow_states(captured.graph)
    formats = formats_for(strategy, captured.states, slow, torch.bfloat16)
    formats = formats_of_signs(strategy, formats, magnitude_states(captured.graph))
    recorded = rewritten(captured, formats, arithmetic, {"param", *slow})
    measured = rewrite(captured, formats, arithmetic, frozenset({"param", *slow}))
    verify(recorded)
    return Updates(
        measured, recorded, torch.tensor(measured.scalars.run(recording.slots, DRAWING), dtype=torch.float32)
    )


# Sums and counts in float64, from what was recorded ------------------------------------------------------------------


class Numbers(NamedTuple):
    """Sums, the sums of their terms' magnitudes, and counts, by name."""

    sums: dict[str, float]
    magnitudes: dict[str, float]
    counts: dict[str, int]


def direct(update: Update, old: dict[str, Tensor], new: dict[str, Tensor], wanted: dict[str, Tensor]) -> Numbers:
    """What `update` should measure, written out in float64 from its definition."""
    terms: dict[str, Tensor] = {}
    masks: dict[str, Tensor] = {}
    for name, fmt in update.formats.items():
        after = words.decode(fmt, [new[key] for key in fmt.keys(name)]).double()
        high_after = new[name].double()
        if len(fmt.components) > 1 and not fmt.is_coded:
            terms[f"low {name}"] = (after - high_after) ** 2
        if name not in wanted or any(key not in old for key in fmt.keys(name)):
            continue
        before = words.decode(fmt, [old[key] for key in fmt.keys(name)]).double()
        if name != "param":
            masks[f"falling {name}"] = wanted[name].double() < before
            masks[f"stalled {name}"] = (wanted[name].double() < before) & (after == before)
            continue
        raw = wanted["param"].double()
        masks["zero"], terms["raw"] = raw == 0, raw * raw
        effects = {"pair": after - before, "high": high_after - old["param"].double()}
        for which in effects if len(fmt.components) > 1 else ["pair"]:
            terms[which], terms[f"{which}*raw"] = effects[which] ** 2, effects[which] * raw
            masks[f"lost {which}"] = (raw != 0) & (effects[which] == 0)
    return Numbers(
        {k: float(t.sum()) for k, t in terms.items()},
        {k: float(t.abs().sum()) for k, t in terms.items()},
        {k: int(m.sum()) for k, m in masks.items()},
    )


def measured_by(update: Update, results: Sequence[Tensor]) -> tuple[dict[str, float], dict[str, int]]:
    sums, counts = results[len(update.outputs) :]
    return (
        dict(zip(update.sums, sums.tolist(), strict=True)),
        dict(zip(update.counts, counts.tolist(), strict=True)),
    )


TERM = 3.001 * U
"""A term is a product of two differences: three roundings. The reference adds in float64, which counts for nothing."""
UNDERFLOW = 2.0**-120
"""For all terms below 2**-126 together, which have fewer digits."""


def check_on_reference(u: Updates, inputs: Sequence[Tensor]) -> Numbers:
    results = on_reference(u.measured, inputs, u.scalars)
    recorded = on_reference(u.recorded, inputs, u.scalars)
    size = len(u.measured.outputs)
    assert all(map(torch.equal, results[:size], recorded[:size]))  # measuring changes nothing
    old = dict(zip(u.measured.inputs, inputs, strict=True))
    new = dict(zip(u.measured.outputs, results, strict=False))
    expected = direct(u.measured, old, new, dict(zip(u.recorded.wanted, recorded[size:], strict=True)))
    sums, counts = measured_by(u.measured, results)
    assert counts == expected.counts
    assert sums.keys() == expected.sums.keys()
    for name, value in sums.items():
        assert abs(value - expected.sums[name]) <= TERM * expected.magnitudes[name] + UNDERFLOW, name
    return expected


CASES = {k: c for k, c in torch_cases.CASES.items() if not k.endswith(("foreach", "fused", "capturable", "tensors"))}
SHAPE = (12, 20)
STEPS = 4


def steps_of(case: torch_cases.Case, strategy: str, arithmetic: str) -> Iterator[tuple[Updates, list[Tensor]]]:
    """The updates of some steps of a compiled optimizer, and the components that each starts with."""
    p = torch_cases.parameter(torch_cases.weights(SHAPE), torch.bfloat16)
    optimizer = collage_neuron.compile(case.of(p), strategy=strategy, arithmetic=arithmetic)
    for g in torch_cases.gradients(STEPS, SHAPE):
        p.grad = g.to(p.dtype)
        job = plan.plan_update(case.base, optimizer, optimizer.param_groups[0], [p])
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


@pytest.mark.parametrize(
    ("name", "strategy", "arithmetic"),
    [(name, *pair) for name in CASES for pair in REPRESENTATIVE_MODES if name in EVERYWHERE or pair[0] == "plus"],
)
def test_sums_and_counts_are_those_of_float64_on_recorded_updates(name: str, strategy: str, arithmetic: str) -> None:
    for u, inputs in steps_of(CASES[name], strategy, arithmetic):
        check_on_reference(u, inputs)


# What is wanted, against float64 and against the paper ---------------------------------------------------------------


@cache
def hundredth_step(name: str) -> Recording:
    make, states = OPTIMIZERS[name]
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = make([p])
    step = {"step": torch.tensor(99.0)} if "exp_avg" in states else {}
    return capture(type(optimizer), optimizer, optimizer.param_groups[0], p, {s: ParamShaped(p) for s in states} | step)


def updates(name: str, strategy: str, arithmetic: str) -> Updates:
    return updates_of(hundredth_step(name), strategy, arithmetic)


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
        words.decode(fmt, [old[c] for c in fmt.keys(k)]).double()
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

    class Replacing(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 1e-4})

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.copy_(torch.where(p.grad > 0, p - group["lr"] * p.grad, p))

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


# XLA ---------------------------------------------------------------------------------------------------------------


def terms(update: Update) -> Update:
    """`update` returning, in place of its sums and counts, what is added up and counted."""
    graph = fx.Graph()
    results = graph.graph_copy(update.graph.graph, {})
    assert isinstance(results, tuple)
    graph.output(tuple(n.args[0] if n.target in REDUCTIONS else n for n in results))
    graph.eliminate_dead_code()
    return update.with_body(graph)


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
            formats = formats_for(strategy, states, frozenset(s for s in states if "sq" in s), torch.bfloat16)
            key = arithmetic, *formats.values()
            if key not in seen:
                yield name, strategy, arithmetic
            seen.add(key)


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


def test_rows_are_divisors_as_near_to_one_another_as_can_be() -> None:
    assert [rows(n) for n in (0, 1, 12, 49, 97, 2 * 97, 1 << 24)] == [
        (1, 0), (1, 1), (3, 4), (7, 7), (1, 97), (2, 97), (4096, 4096)
    ]  # fmt: skip


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
    formats = formats_for("plus", captured.states, slow_states(captured.graph), torch.bfloat16)
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


MUTATIONS: dict[Any, Any] = {
    operator.sub: operator.add, operator.lt: operator.ge, operator.eq: operator.ne, operator.ne: operator.eq,
    torch.logical_and: torch.logical_or, operator.mul: operator.add,
}  # fmt: skip


@pytest.mark.parametrize("strategy", ["bf16", "plus", "fp32"])
def test_every_operation_that_measures_is_tested(strategy: str) -> None:
    """Exchanged for another one it is seen, by the comparison with float64 above."""
    u = updates("adamw", strategy, "fp32")
    inputs = random_inputs(u.measured)
    shared = len(u.recorded.graph.graph.nodes) - 1  # both graphs start with the same nodes
    nodes = list(u.measured.graph.graph.nodes)
    tried = [i for i, n in enumerate(nodes) if i >= shared and n.target in MUTATIONS]
    assert len(tried) >= 8
    for i in tried:
        mutant = edited(u.measured, i, lambda node: setattr(node, "target", MUTATIONS[node.target]))
        with pytest.raises(AssertionError):
            check_on_reference(u._replace(measured=mutant), inputs)
