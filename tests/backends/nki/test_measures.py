"""A monitor's sums and counts in kernels: of every element once, within the error in docs/development/evidence.md."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.fx as fx
from nki_runs import INFINITY, bits, differing, narrowed, run, step_of
from torch import Tensor
from torch_cases import CASES

import collage_neuron
from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.numerics.eft import narrow, round_to, widen
from collage_neuron.numerics.formats import BUILT_IN, Format
from collage_neuron.numerics.reductions import count, total
from collage_neuron.passes.backends.nki.chunk_totals import measure_of
from collage_neuron.passes.backends.nki.ir import IN_PLACE, Column, Spread, Value, View
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.backends.nki.schedule import Plan
from collage_neuron.passes.backends.nki.tiling import SUMMED, Cut
from collage_neuron.passes.backends.protocol import Measure
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.usefixtures("rejecting", "short_search")

DIALECTS = ("nki", "beta1")
NOTHING = torch.zeros(0)
ROUNDING = 2.0**-24
NAMES: dict[str, Any] = {"sums": ("z", "x*z"), "counts": ("positive", "not 0")}


def measures(x: Any, z: Any) -> list[Any]:
    return [total(z), total(x * z), count(z > 0.0), count(z != 0.0)]


@cache
def update(stored: str = "fp32") -> Update:
    """x = z = x + y + 1, not 0 beyond the end; sums of z and of x * z, counts of positive z, and of z but 0."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    x, y = (widen(fx.Proxy(graph.placeholder(name), tracer)) for name in ("x", "y"))
    z: Any = x + y + 1.0
    new = narrow(z if stored == "fp32" else round_to(z, stored), stored)
    graph.output(tuple(o.node for o in [new, *measures(x, z)]))
    return Update.elementwise(graph, ("x", "y"), ("x",), ScalarProgram(), {}, **NAMES)


@cache
def kernel(dialect: str) -> Kernel:
    return lower_to_nki(update(), "trn1", dialect, components={"x": "fp32", "y": "fp32"})


def given(n: int) -> dict[str, Tensor]:
    """Numbers of many magnitudes; x + y is -1 for some."""
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(2, n, generator=generator) * torch.exp2(torch.randn(2, n, generator=generator) * 4)
    y[torch.rand(n, generator=generator) < 0.2] *= 0
    return {"x": torch.where(y == 0, -1.0, x), "y": y}


def is_right(measure: Measure, x: Tensor, z: Tensor, terms: int) -> bool:
    """Returns True if counts are exact, and sums within the roundings of so many terms of the sum of magnitudes."""
    of = torch.stack([z, x * z]).double().flatten(1)
    error = (measure.sums - of.sum(1)).abs()
    exact = measure.counts.tolist() == [int((z > 0).sum()), int((z != 0).sum())]
    return exact and bool((error <= 1.001 * (terms - 1) * ROUNDING * of.abs().sum(1)).all())


def holds(dialect: str, n: int, cut: Cut, order: str = "forward", source: str | None = None) -> bool:
    inputs = given(n)
    device = replace(INFINITY, order=order)
    found = run(kernel(dialect), inputs, NOTHING, device, source, cut).results
    z = inputs["x"] + inputs["y"] + 1.0
    assert torch.equal(bits(found["x"]), bits(z))
    return is_right(measure_of(update(), found["measures"]), inputs["x"], z, max(cut.width, 16))


SMALL = Cut(6, 2)
TILE = 128 * 6


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("turns", [0, 1, 2, 5])
def test_every_element_is_counted_once_in_any_number_of_turns(turns: int, dialect: str) -> None:
    for left in (0, 5, 6, 12, 6 * 127 + 5):
        if n := turns * TILE + left:
            assert holds(dialect, n, SMALL), left
    for rest in (1, 127, 128, 300):
        assert holds(dialect, 1024 * turns + rest, Cut(1024, SUMMED))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_what_is_measured_is_not_rounded_as_what_is_stored_is(dialect: str) -> None:
    inputs, u = given(TILE + 5), update("bf16")
    inputs["x"] = inputs["x"].bfloat16()
    k = lower_to_nki(u, "trn1", dialect, components={"x": "bf16", "y": "fp32"})
    found, x = run(k, inputs, NOTHING, INFINITY, cut=SMALL).results, inputs["x"].float()
    z = x + inputs["y"] + 1.0
    assert torch.equal(found["x"], z.bfloat16())
    assert is_right(measure_of(u, found["measures"]), x, z, 16)


def test_behind_the_kernel_a_device_adds_in_rows(xla: torch.device) -> None:
    """Of K sums each number is rounded less often than 2 * (sqrt(K) + 1) times; counts are whole numbers."""
    k = 10007
    sums, counts = torch.randn(k, 2), torch.randint(0, SUMMED + 1, (k, 2))
    found = measure_of(update(), torch.cat([sums, counts], 1).view(-1).to(xla))
    assert (found.sums.dtype, found.counts.dtype) == (torch.float32, torch.int32)
    assert torch.equal(found.counts.cpu(), counts.sum(0, dtype=torch.int32))
    error = (found.sums.cpu().double() - sums.double().sum(0)).abs()
    assert (error <= 2 * (k**0.5 + 1) * ROUNDING * sums.double().abs().sum(0)).all()


@cache
def on_blocks(dialect: str) -> Kernel:
    return lower_to_nki(_of_format(BUILT_IN["i16q4"]), "trn1", dialect, components={"x": "fp32"})


@cache
def _of_format(fmt: Format) -> Update:
    """x = the state's value + x, with its sums; and the state = x."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    keys = fmt.keys("state")
    *words, old = (fx.Proxy(graph.placeholder(name), tracer) for name in (*keys, "x"))
    z = fmt.decode(words) + widen(old)
    graph.output(tuple(s.node for s in [*fmt.encode(z), narrow(z, "fp32"), *measures(widen(old), z)]))
    return Update.elementwise(graph, (*keys, "x"), (*keys, "x"), ScalarProgram(), {"state": fmt}, **NAMES)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("shape", [(5,), (129,), (3, 7), (130, 300), (3, 256), (131, 384), (2, 128 * 128 * 3 + 128)])
def test_rows_of_blocks_of_every_length(shape: tuple[int, ...], dialect: str) -> None:
    k = on_blocks(dialect)
    x = given(torch.Size(shape).numel())["x"].view(shape)
    words = (*shape[:-1], -(-shape[-1] // BLOCK))
    inputs = {"state": torch.ones(shape, dtype=torch.int16) * 9000, "state_scale": torch.ones(words), "x": x}
    found = run(k, inputs, NOTHING, cut=narrowed(k, shape, 2 * BLOCK, BLOCK)).results
    of = _of_format(BUILT_IN["i16q4"])
    right = ReferenceUpdate(of)([inputs[key] for key in of.inputs], NOTHING)
    assert not differing({key: found[key] for key in of.outputs}, dict(zip(of.outputs, right, strict=False)))
    assert is_right(measure_of(of, found["measures"]), x, found["x"], BLOCK)


STEPS = [
    ("adamw", "plus"), ("adamw", "split433"), ("adamw", "bf16"), ("adamw", "split423"), ("sgd_momentum", "full"),
    ("adamax", "plus"), ("rprop", "light"),
]  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("case", "strategy"), STEPS)
def test_what_is_stored_does_not_depend_on_the_monitor(case: str, strategy: str, dialect: str) -> None:
    """Nor would it on a device that approximates otherwise: the same instructions compute it."""
    plain, watched = (step_of(CASES[case], strategy, "fp32", measured=m) for m in (False, True))
    without, with_it = (lower_to_nki(s.update, "trn1", dialect) for s in (plain, watched))
    assert how(without.plan) == how(with_it.plan)
    for device in (INFINITY, replace(INFINITY, ulps=2)):
        found = run(with_it, plain.components, plain.vector, device).results
        totals = found.pop("measures")
        assert not differing(found, run(without, plain.components, plain.vector, device).results)
    _agrees(watched.by_reciprocals().update, plain.components, plain.vector, watched.update, totals)


def _agrees(of: Update, components: dict[str, Tensor], vector: Tensor, update: Update, totals: Tensor) -> None:
    """Sums within 2 % and counts within 1 %, with approximations off by two ulps: elements are neither lost nor twice.

    Which elements count as lost may depend on last bits.
    """
    *_, sums, counts = ReferenceUpdate(of)([components[key] for key in of.inputs], vector)
    found, n = measure_of(update, totals), components["param"].numel()
    torch.testing.assert_close(found.sums, sums.double(), rtol=0.02, atol=0.0)
    assert (found.counts - counts).abs().max() <= n / 100


def how(plan: Plan) -> dict[str, Any]:
    """By which instructions each component is computed, down to the loads."""
    steps = dict(plan.steps)

    @cache
    def of(x: Any) -> Any:
        if isinstance(x, (View, Spread)):
            return type(x).__name__, getattr(x, "half", None), of(x.tile)
        if isinstance(x, Column):
            return x.text([f"c{k}" for k in range(20)])
        if not isinstance(x, Value):
            return x
        if x.op == "load":
            return x.name
        kept = (of(x.args[IN_PLACE[x.op]]),) if x.op in IN_PLACE else ()
        fields = tuple((name, of(operand)) for name, operand in steps[x].fields)
        return x.op, x.dtype, steps[x].kind, steps[x].engine, fields, kept

    return {key: of(value) for key, value in plan.program.stores.items()}


def test_a_monitor_of_a_step_on_kernels(dialect: str) -> None:
    """Parameters, counts and everything else are those of the reference; sums of fp32 within their error."""
    (found, params), (wanted, right) = map(_monitored, ("nki", "reference"))
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(params, right, strict=True))
    for a, b in zip(found, wanted, strict=True):
        for name in ("lost", "ratio", "norm"):
            assert getattr(a.total.pair, name) == pytest.approx(getattr(b.total.pair, name), rel=2**-14)
        counts = ((x.total.zero, x.total.pair.lost, x.total.high.lost) for x in (a, b))
        assert len(set(counts)) == 1


def _monitored(backend: str) -> tuple[Any, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=generator).bfloat16()) for s in ((3, 5), (300,), (0, 4), ())]
    for p in params:
        p.grad = (torch.randn(p.shape, generator=generator) * 1e-2).bfloat16()
    sgd = torch.optim.SGD(params, lr=1e-2, momentum=0.9)
    optimizer = collage_neuron.compile(sgd, strategy="plus", backend=backend)
    monitor = collage_neuron.monitor(optimizer)
    for _ in range(3):
        optimizer.step()
    monitor.close()
    return monitor.history, [p.detach() for p in params]
