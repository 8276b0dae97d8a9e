"""Kernels where Trainium approximates: within derived bounds, inside the documented domains, on the stand-in.

No bound is published for the device's square root and reciprocal; here they are off by up to two ulps of fp32.
"""

from __future__ import annotations

from functools import cache

import nki_standin
import pytest
import torch
from exact import update_of
from nki_intervals import outside, undecided
from nki_runs import Step, differing, run, search_less, step_of
from torch_cases import CASES

from collage_neuron.numerics.eft import Value, split, sqrt
from collage_neuron.passes.backends.nki.lower import lower_to_nki
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Update

ULPS = 2
OFF = nki_standin.Device(ulps=ULPS, overflow="infinity")

MEASURED = [name for name, case in CASES.items() if case.measured]


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch)


@cache
def step(name: str, strategy: str, arithmetic: str) -> Step:
    return step_of(CASES[name], strategy, arithmetic)


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MEASURED)
def test_results_are_within_their_intervals(name: str, arithmetic: str) -> None:
    s = step(name, "plus", arithmetic)
    found = run(lower_to_nki(s.update), s.components, s.vector, OFF).results
    assert not outside(found, s, ULPS)


def test_the_intervals_say_something() -> None:
    """They are points for most numbers, and a kernel whose function is off by more leaves them."""
    s = step("adamw", "plus", "fp32")
    assert undecided(s, ULPS) < 0.1
    worse = nki_standin.Device(ulps=64, overflow="infinity")
    assert outside(run(lower_to_nki(s.update), s.components, s.vector, worse).results, s, ULPS)


def quotient(m: Value, v: Value) -> list[Value]:
    """Adam's update: lr * m / (sqrt(v) / root of the bias correction + eps), with numbers for the hundredth step."""
    return [m * 1e-3 / (sqrt(v) / 0.3085 + 1e-8)]


def test_an_update_is_within_eight_ulps() -> None:
    """Relative errors in units of 2**-23, which is at most an ulp: of sqrt and reciprocal 2 and their rounding, 1/2.

    m * lr: 1/2. sqrt(v): 5/2; times the reciprocal of a number that is itself rounded, 1; plus eps, 1/2: 4. Its
    reciprocal: 4 + 5/2. The last product: 1/2. In all 15/2; products of errors are below 2**-18 of that.
    """
    g = torch.Generator().manual_seed(0)
    m = torch.randn(1 << 15, generator=g)
    v = torch.randn(1 << 15, generator=g).square() * torch.randint(-60, 1, (1 << 15,), generator=g).float().exp2()
    update = update_of(["m", "v"], quotient)
    found = run(lower_to_nki(update, components={"m": "fp32", "v": "fp32"}), {"m": m, "v": v}, torch.zeros(0), OFF)
    exact = m.double() * 1e-3 / (v.double().sqrt() / 0.3085 + 1e-8)
    error = ((found.results["out0"].double() - exact) / exact).abs() * 2**23
    assert 1 < float(error.max()) < 8


EDGES = [0.0, 2.0**-149, 2.0**-126, 2.0**-117, 2.0**-116, 2.0**-115, 1e-8, 1.0, 2.0**117, 2.0**118, 2.0**119, 2.0**127]


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_a_square_root_is_guarded_and_the_guard_changes_nothing_in_its_range(target: str) -> None:
    x = torch.tensor(EDGES)
    kernel = lower_to_nki(update_of(["x"], lambda x: [sqrt(x)]), target, components={"x": "fp32"})
    found = run(kernel, {"x": x}, torch.zeros(0)).results["out0"]
    assert torch.equal(found, sqrt(x.clamp(2.0**-116, 2.0**118)))
    within = (x >= 2.0**-116) & (x <= 2.0**118)
    assert torch.equal(found[within], sqrt(x[within]))


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_a_divisor_is_guarded_where_it_is_known_to_be_positive(target: str) -> None:
    x = torch.tensor([-(2.0**60), -1.0, -(2.0**-43), 0.0, 2.0**-50, 2.0**-42, 1e-3, 1.0, 2.0**42, 2.0**43])
    kernel = lower_to_nki(update_of(["x"], lambda x: [1.0 / torch.abs(x)]), target, components={"x": "fp32"})
    found = run(kernel, {"x": x}, torch.zeros(0)).results["out0"]
    assert torch.equal(found, 1 / x.abs().clamp(2.0**-42, 2.0**42))


def test_a_divisor_of_any_sign_goes_to_the_vector_engine() -> None:
    x = torch.tensor([-(2.0**60), -3.0, 2.0**-50, 7.0])
    kernel = lower_to_nki(update_of(["x"], lambda x: [2.0 / x]), components={"x": "fp32"})
    assert "nisa.reciprocal(" in kernel.source
    assert torch.equal(run(kernel, {"x": x}, torch.zeros(0)).results["out0"], 2 * (1 / x))


def with_edges(eps: float) -> Step:
    """A step of AdamW with every second moment of EDGES, and this eps."""
    s = step_of(CASES["adamw"], "plus", "fp32", n=len(EDGES))
    hi, lo = (word.bfloat16() for word in split(torch.tensor(EDGES)))
    gradient = torch.zeros(len(EDGES)).bfloat16()
    components = {**s.components, "exp_avg_sq": hi, "exp_avg_sq_lo": lo, "grad": gradient}
    return s._replace(components=components, vector=s.vector.index_fill(0, torch.tensor(5), eps))


@pytest.mark.parametrize("eps", [0.0, 1e-30, 1e-8])
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_no_second_moment_leaves_a_domain(target: str, eps: float) -> None:
    """The stand-in fails where no approximation is documented. What is inside all domains keeps its bits."""
    s = with_edges(eps)
    kernel = lower_to_nki(s.update, target)
    run(kernel, s.components, s.vector, OFF)
    found, wanted = run(kernel, s.components, s.vector).results, s.by_reciprocals().expected()
    divisor = torch.tensor(EDGES).sqrt() + eps
    inside = (divisor > 2**-41) & (divisor < 2**36) & (torch.tensor(EDGES) > 2.0**-116)
    assert int(inside.sum()) >= 2
    assert not differing({k: x[inside] for k, x in found.items()}, {k: x[inside] for k, x in wanted.items()})


def divided_by_scalar_sum() -> Update:
    """x / (sqrt(x) + c0)."""
    update = update_of(["x", "c0"], lambda x, c: [x / (sqrt(x) + c)])
    graph = update.graph.graph
    for node in list(graph.nodes):  # the scalar comes as it is, and not from a component
        if node.target == "c0":
            (wide,) = node.users
            wide.replace_all_uses_with(node)
            graph.erase_node(wide)
    update.graph.recompile()
    return Update.elementwise(graph, ("x",), update.outputs, ScalarProgram([("fp32", Scalar.slot(0))]), {})


def test_a_divisor_that_a_scalar_makes_negative_is_refused_before_anything_runs() -> None:
    kernel = lower_to_nki(divided_by_scalar_sum(), components={"x": "fp32"})
    assert kernel.nonnegative == {0}
    x, zero = torch.tensor([4.0]), torch.tensor([0.0])
    assert torch.equal(run(kernel, {"x": x}, zero).results["out0"], torch.tensor([2.0]))
    with pytest.raises(ValueError, match=r"scalar c0 is -0\.5, but the kernel.*positive divisors; use backend='xla'"):
        kernel.scalar_input(torch.tensor([-0.5]))
