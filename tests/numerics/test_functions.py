"""Functions in explicit-rounding form against float64, and against torch's on special values, on each CPU backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from exact import on_reference, on_xla, ulp, update_of
from native_mutants import hard
from natively import different, results
from torch import Tensor

from collage_neuron.numerics import angles, error_function, functions, hyperbolic, logarithms
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.ir.update import Update

NORMAL = 2.0**-126

Function = Callable[[Any, Any], Any]

EXACT: dict[str, tuple[Function, Callable[[Tensor, Tensor], Tensor]]] = {
    "nearest": (lambda x, y: functions.nearest(x), lambda x, y: torch.round(x)),
    "floor": (lambda x, y: functions.floor(x), lambda x, y: torch.floor(x)),
    "ceil": (lambda x, y: functions.ceil(x), lambda x, y: torch.ceil(x)),
    "truncated": (lambda x, y: functions.truncated(x), lambda x, y: torch.trunc(x)),
    "with_sign_of": (lambda x, y: functions.with_sign_of(x, y), lambda x, y: torch.copysign(x, y)),
}

ROUNDED: dict[str, tuple[Function, Callable[[Tensor, Tensor], Tensor]]] = {
    "expm1": (lambda x, y: functions.expm1(x), lambda x, y: torch.expm1(x)),
    "log1p": (lambda x, y: functions.log1p(x), lambda x, y: torch.log1p(x)),
    "tanh": (lambda x, y: functions.tanh(x), lambda x, y: torch.tanh(x)),
    "softplus": (
        lambda x, y: functions.softplus(x, 2.0, 20.0),
        lambda x, y: torch.nn.functional.softplus(x, 2.0, 20.0),
    ),
    "atan2": (lambda x, y: functions.atan2(x, y), lambda x, y: torch.atan2(x, y)),
    "hypot": (lambda x, y: angles.hypot(x, y), lambda x, y: torch.hypot(x, y)),
    "xlogy": (lambda x, y: logarithms.xlogy(x, y), lambda x, y: torch.xlogy(x, y)),
    "logaddexp": (lambda x, y: logarithms.logaddexp(x, y), lambda x, y: torch.logaddexp(x, y)),
    "logaddexp2": (lambda x, y: logarithms.logaddexp2(x, y), lambda x, y: torch.logaddexp2(x, y)),
}


def _of_first(f: Callable[[Any], Any]) -> Function:
    return lambda x, y: f(x)


for _module, _names in {
    angles: ("tan", "atan", "asin", "acos"),
    hyperbolic: ("sinh", "cosh", "asinh", "acosh", "atanh"),
    logarithms: ("log2", "log10"),
    error_function: ("erf", "erfc"),
}.items():
    for _name in _names:
        ROUNDED[_name] = _of_first(getattr(_module, _name)), _of_first(getattr(torch, _name))

MODULES = (functions, angles, hyperbolic, logarithms, error_function)
ULPS: dict[str, int] = {name: most for module in MODULES for name, most in module.ULPS.items()}
"""How far each may be from the exact result, as its module promises."""

SUMS = ("logaddexp", "logaddexp2")
"""Functions whose units are those of the larger operand, or of 1, if that is more."""

Run = Callable[[Update, list[Tensor]], Tensor]
BACKENDS: dict[str, Run] = {
    "reference": lambda update, xs: on_reference(update, xs)[0],
    "xla": lambda update, xs: on_xla(update, xs)[0],
}
if NATIVE.missing() is None:
    BACKENDS["native"] = lambda update, xs: results(NATIVE, update, xs)[0]

EXP = 5
"""How far exp of XLA:CPU may be off, near its largest results; of the other backends it is within one unit."""

OF_EXP = frozenset({"expm1", "tanh", "softplus", "sinh", "cosh", "erf", "erfc", *SUMS})


def inputs() -> tuple[Tensor, Tensor]:
    """Special values and numbers beside them, each with each; then numbers of many sizes, close ones where it bends."""
    generator = torch.Generator().manual_seed(3)
    x, y = hard()
    sizes = torch.randn(1 << 16, generator=generator) * 10 ** torch.linspace(-8, 3, 1 << 16)
    more = torch.cat([sizes, torch.linspace(-2, 2, 1 << 16), torch.linspace(-90, 90, 1 << 15), _halves()])
    roots = [torch.linspace(-1.01, 1.01, 1 << 15), 1 + torch.logspace(-7, 3, 1 << 14)]  # 1 - x * x vanishes there
    more = torch.cat([more, *roots, torch.linspace(0, 11, 1 << 15)])  # where erfc vanishes
    return torch.cat([x, more]), torch.cat([y, more.flip(0) * 1.1])


def _halves() -> Tensor:
    """Ties, and the numbers next to them, up to beyond the last one."""
    ties = torch.cat([torch.arange(0, 5000) + 0.5, 2.0 ** torch.arange(1, 25) + 0.5, 2.0 ** torch.arange(1, 25) - 0.5])
    beside = [ties, torch.nextafter(ties, torch.tensor(torch.inf)), torch.nextafter(ties, torch.tensor(0.0))]
    return torch.cat([sign * x for x in beside for sign in (1.0, -1.0)])


def found_by(backend: str, f: Function, xs: tuple[Tensor, Tensor]) -> Tensor:
    return BACKENDS[backend](update_of(("x", "y"), lambda x, y: [f(x, y)]), list(xs))


def usual(backend: str, xs: tuple[Tensor, Tensor]) -> Tensor:
    """Where no operand is subnormal, which XLA takes for zero."""
    small = [(x != 0) & (x.abs() < NORMAL) for x in xs]
    return torch.ones_like(small[0]) if backend != "xla" else ~(small[0] | small[1])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EXACT)
def test_whole_numbers_and_signs_are_those_of_torch_bit_for_bit(name: str, backend: str) -> None:
    f, of_torch = EXACT[name]
    xs = inputs()
    assert not (different(found_by(backend, f, xs), of_torch(*xs)) & usual(backend, xs)).any()


def _size(name: str, exact: Tensor, xs: tuple[Tensor, Tensor]) -> Tensor:
    """The magnitude in whose last place an error is counted."""
    if name not in SUMS:
        return exact.abs()
    return torch.maximum(exact.abs(), torch.maximum(*xs).double().abs().nan_to_num(0.0, 0.0, 0.0)).clamp(min=1.0)


def test_every_promise_is_tested() -> None:
    assert ULPS.keys() == ROUNDED.keys()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROUNDED)
def test_functions_are_within_their_units_of_float64(name: str, backend: str) -> None:
    f, of_torch = ROUNDED[name]
    xs = inputs()
    found, exact = found_by(backend, f, xs), of_torch(*(x.double() for x in xs))
    nearest = exact.float()
    counts = usual(backend, xs) & ~((found == nearest) | (found.isnan() & nearest.isnan()))
    assert torch.equal(found[usual(backend, xs)].isnan(), nearest[usual(backend, xs)].isnan())
    counts &= ~(found.isinf() & (exact.abs() > torch.finfo(torch.float32).max * (1 - 2.0**-20)))  # exp overflows
    unit = ulp(_size(name, exact, xs).clamp(min=NORMAL), 24)
    if backend == "xla":  # flushes results to zero
        counts &= exact.abs() >= 2 * NORMAL
    most = ULPS[name] + (EXP if backend == "xla" and name in OF_EXP else 0)
    assert float(((found.double() - exact).abs() / unit)[counts].max()) <= most


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ROUNDED)
def test_the_sign_of_a_zero_is_that_of_torch(name: str, backend: str) -> None:
    f, of_torch = ROUNDED[name]
    zeros = torch.tensor([0.0, -0.0, 0.0, -0.0, 1.0, -1.0, 0.0, -0.0, torch.inf, -torch.inf])
    others = torch.tensor([0.0, 0.0, -0.0, -0.0, 0.0, -0.0, -1.0, -1.0, torch.inf, -torch.inf])
    found, wanted = found_by(backend, f, (zeros, others)), of_torch(zeros, others)
    assert not (different(found, wanted) & ((found == 0) | (wanted == 0))).any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_logarithm_to_base_2_of_a_power_of_two_is_exact(backend: str) -> None:
    powers = torch.arange(-126 if backend == "xla" else -149, 128)
    found = found_by(backend, lambda x, y: logarithms.log2(x), (torch.exp2(powers.double()).float(), powers.float()))
    assert torch.equal(found, powers.float())


def test_a_product_of_exponentials_is_the_exponential_of_a_sum_on_xla() -> None:
    """Why `erfc` multiplies by something else in between: near 80 a sum is rounded by 2**-18."""
    x, y = torch.full((2,), -79.71875), torch.full((2,), 0.0009765625 * 1.37)
    update = update_of(("x", "y"), lambda x, y: [torch.exp(x) * torch.exp(y), torch.exp(x + y)])
    product, of_sum = on_xla(update, [x, y])
    assert torch.equal(product, of_sum)
    assert float((on_reference(update, [x, y])[0] / of_sum - 1).abs().max()) > 2.0**-21


def test_the_sum_that_rounds_to_whole_numbers_is_not_one_on_xla() -> None:
    """Why `nearest` converts to integers: XLA makes x of (x + c) - c."""
    x = torch.tensor([0.25, 1.5, 2.75])
    update = update_of(("x",), lambda x: [(x + 2.0**23) - 2.0**23])
    assert on_reference(update, [x])[0].tolist() == [0.0, 2.0, 3.0]
    assert on_xla(update, [x])[0].tolist() == x.tolist()
