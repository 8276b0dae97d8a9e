"""Where Trainium approximates: documented domains, divisors shown to be positive, results within derived bounds.

Evidence level: stand-in. No bound is published for the square root and the reciprocal of the device; here they are off
by up to two ulps of fp32. Validation compares kernels with a user's step inside the documented domains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import nki_standin
import pytest
import torch
from as_written import Written
from exact import update_of
from nki_runs import INFINITY, Step, differing, run, step_of
from running import compiled_only
from torch_cases import CASES

import collage_neuron
from collage_neuron.errors import TranslationError
from collage_neuron.numerics.eft import Value, split, sqrt
from collage_neuron.passes.backends.nki import calls
from collage_neuron.passes.backends.nki.backend import Nki
from collage_neuron.passes.backends.nki.lower import lower_to_nki
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Update
from collage_neuron.validation import sample

pytestmark = pytest.mark.usefixtures("short_search")

ULPS = 2
OFF = nki_standin.Device(ulps=ULPS, overflow="infinity")


@cache
def step(name: str, strategy: str, arithmetic: str) -> Step:
    return step_of(CASES[name], strategy, arithmetic)


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


DIVISORS = [-(2.0**60), -1.0, -(2.0**-43), 0.0, 2.0**-50, 2.0**-42, 1e-3, 1.0, 2.0**42, 2.0**43]
GUARDED: dict[str, tuple[list[float], Callable[[Any], Value], Callable[[torch.Tensor], torch.Tensor]]] = {
    "square root": (EDGES, lambda x: sqrt(x), lambda x: sqrt(x.clamp(2.0**-116, 2.0**118))),
    "positive divisor": (DIVISORS, lambda x: 1.0 / torch.abs(x), lambda x: 1 / x.abs().clamp(2.0**-42, 2.0**42)),
}


@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
@pytest.mark.parametrize("name", GUARDED)
@pytest.mark.whole
def test_what_is_approximated_is_guarded_and_nothing_changes_in_its_range(name: str, target: str) -> None:
    given, of, wanted = GUARDED[name]
    kernel = lower_to_nki(update_of(["x"], lambda x: [of(x)]), target, components={"x": "fp32"})
    found = run(kernel, {"x": torch.tensor(given)}, torch.zeros(0)).results["out0"]
    assert torch.equal(found, wanted(torch.tensor(given)))


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
    assert kernel.plan.program.nonnegative == {0}
    x, zero = torch.tensor([4.0]), torch.tensor([0.0])
    assert torch.equal(run(kernel, {"x": x}, zero).results["out0"], torch.tensor([2.0]))
    with pytest.raises(ValueError, match=r"scalar c0 is -0\.5, but the kernel.*positive divisors; use backend='xla'"):
        kernel.scalar_input(torch.tensor([-0.5]))


ROOTS: dict[str, Callable[[Any], Value]] = {
    "root": lambda v: sqrt(v),
    "root of a root": lambda v: sqrt(sqrt(v)),
    "eighth root": lambda v: sqrt(sqrt(sqrt(v))),
    "root of a product with a root": lambda v: sqrt(sqrt(v) * 3.0),
    "root of a sum with a root": lambda v: sqrt(sqrt(v) + 0.5),
    "product with a root of a root": lambda v: sqrt(sqrt(v)) * 0.25 + 1.0,
    "root of a root that is read twice": lambda v: sqrt(sqrt(v)) + sqrt(v) * 0.0,
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_divisor_has_all_of_its_roots(name: str) -> None:
    """Each quotient within 2**-20: roots that are missing make it larger or smaller by much more."""
    m, v = torch.randn(500), torch.rand(500).mul(20).sub(15).exp2()
    update = update_of(["m", "v"], lambda m, v: [m / (ROOTS[name](v) + 1e-8)])
    found = run(lower_to_nki(update, components={"m": "fp32", "v": "fp32"}), {"m": m, "v": v}, torch.zeros(0)).results
    wanted = in_float64(name, m, v)
    assert ((found["out0"].double() - wanted) / wanted).abs().max() < 2**-20


def in_float64(name: str, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The quotient, of a divisor whose roots are rounded to fp32."""
    divisor: Any = ROOTS[name](v.double())
    result: torch.Tensor = m.double() / (divisor + 1e-8)
    return result


def compiled(make: Callable[[Any], torch.optim.Optimizer], n: int = 40, **options: Any) -> torch.optim.Optimizer:
    p = torch.nn.Parameter(torch.zeros(n))
    return collage_neuron.compile(make([p]), verbose=False, **options)


def after(optimizer: torch.optim.Optimizer, gradient: float | torch.Tensor) -> torch.Tensor:
    """The exact value of the parameter after a step with this gradient, or with gradients of this size."""
    p = optimizer.param_groups[0]["params"][0]
    given = gradient if isinstance(gradient, torch.Tensor) else torch.linspace(0.5, 1, p.numel()).mul(gradient)
    p.grad = given.to(p.dtype)
    optimizer.step()
    return collage_neuron.exact_value(optimizer, p)


@pytest.fixture
def nki(own_folder: None) -> Iterator[None]:
    """The newer dialect on the stand-in, which warns of clamped divisors anew."""
    calls._warn_of_clamped.cache_clear()
    with nki_standin.install("nki", "trn1", INFINITY):
        yield


class Scaled(Written):
    """Divides by the square of a gradient that is multiplied by a number of the group; or by the number once."""

    def __init__(self, params: Sequence[torch.nn.Parameter], k: float, power: int = 2) -> None:
        super().__init__(params, lr=0.1, k=k)
        self.power = power

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        scaled = g * group["k"]
        divisor = scaled * (scaled if self.power == 2 else g) + 1
        p.addcdiv_(g, divisor, value=-group["lr"])


@pytest.mark.parametrize("k", [-1.0, 0.0, 3.0])
def test_the_square_of_a_product_with_a_number_of_any_sign_is_positive(k: float, nki: None) -> None:
    gradient = torch.linspace(-2, 2, 37)
    found, wanted = (after(compiled(partial(Scaled, k=k), 37, backend=b), gradient) for b in ("nki", "reference"))
    assert (found - wanted).abs().max() <= 2**-20
    assert wanted.abs().max() > 0.015


@compiled_only()
def test_a_number_without_its_pair_is_still_asked_for(nki: None) -> None:
    with pytest.raises(ValueError, match=r"scalar c\d is -1\.0, but the kernel"):
        after(compiled(partial(Scaled, k=-1.0, power=1), backend="nki", validate="off"), 0.5)


@pytest.mark.parametrize("largest", [2.0**30, 2e19])
def test_a_lazy_device_is_not_rejected_at_first(largest: float, nki: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of lazy devices have drawn gradients; with one of 2e19 a divisor is beyond 2**42, where it is clamped."""
    monkeypatch.setattr(sample, "DEVICES", ("cpu",))
    monkeypatch.setattr(Nki, "largest", largest)
    optimizer = compiled(torch.optim.AdamW, 300, backend="nki")
    with pytest.raises(TranslationError, match="drawn values") if largest > 2**42 else nullcontext():
        after(optimizer, 1.0)


class Own(Written):
    """Adam's second moment, and an update that it enters as `rule` says."""

    def __init__(self, params: Any, rule: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]) -> None:
        super().__init__(params, lr=0.01, eps=1e-8)
        self.rule = rule

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        v = state.setdefault("v", torch.zeros_like(p))
        v.mul_(0.9).addcmul_(g, g, value=0.1)
        p.add_(self.rule(g, v, group["eps"]), alpha=-group["lr"])


INSIDE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "Adamax": torch.optim.Adamax,
    "Adagrad": torch.optim.Adagrad,
    "Adadelta": torch.optim.Adadelta,
    "RMSprop": torch.optim.RMSprop,
    "centered": partial(torch.optim.RMSprop, centered=True),
    "amsgrad": partial(torch.optim.AdamW, amsgrad=True),
    "RAdam": torch.optim.RAdam,
    "NAdam": torch.optim.NAdam,
    "eps in the root": partial(Own, rule=lambda g, v, eps: g / (v + eps).sqrt()),
    "root of a root": partial(Own, rule=lambda g, v, eps: g / (v.sqrt() + eps).sqrt()),
    "maximum": partial(Own, rule=lambda g, v, eps: g / v.sqrt().clamp(min=eps)),
    "twice": partial(Own, rule=lambda g, v, eps: g / ((v.sqrt() + eps) * 2.0)),
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("strategy", ["plus", "split422"])
def test_divisors_with_an_eps_are_not_warned_of(name: str, strategy: str, nki: None) -> None:
    after(compiled(INSIDE[name], backend="nki", strategy=strategy, validate="off"), 1e-3)


OUTSIDE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": partial(torch.optim.AdamW, eps=1e-15),
    "no eps": partial(torch.optim.AdamW, eps=0.0),
    "eps in the root": partial(Own, rule=lambda g, v, eps: g / (v + eps * 1e-20).sqrt()),
    "square": partial(Own, rule=lambda g, v, eps: g / (g * g)),
    "magnitude": partial(Own, rule=lambda g, v, eps: g / g.abs()),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_divisors_that_may_be_clamped_are_warned_of_once(name: str, nki: None) -> None:
    optimizer = compiled(OUTSIDE[name], backend="nki", validate="off")
    with pytest.warns(collage_neuron.ClampedDivisor, match=r"2\.3e-13.*larger eps, or backend='xla'.*filter"):
        after(optimizer, 1e-3)
    after(optimizer, 1e-3)


@pytest.mark.filterwarnings("ignore::collage_neuron.ClampedDivisor")
@pytest.mark.parametrize(
    ("make", "gradient"),
    [
        (partial(torch.optim.AdamW, eps=1e-15), 1e-14),
        (torch.optim.AdamW, 1e13),
        (partial(Own, rule=lambda g, v, eps: torch.where(v.sqrt() > 0, g, g + 1.0)), 0.0),
    ],
    ids=["eps", "gradient", "root of 0"],
)
def test_the_error_names_the_domain(make: Callable[[Any], torch.optim.Optimizer], gradient: float, nki: None) -> None:
    optimizer = compiled(make, backend="nki")
    with pytest.raises(
        TranslationError,
        match=r"drop a number.*aws-neuron-sdk#1296.*2\*\*-42 .*larger eps.*backend='xla'.*only hide it",
    ):
        after(optimizer, gradient)
