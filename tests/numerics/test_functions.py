"""Functions in explicit-rounding form against float64, and against torch's on special values, on each CPU backend.

And rules of special values, which have the bits of torch's operations.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx as fx
from exact import hard, on_reference, on_xla, ulp, update_of
from natively import different, results
from one_operation import ONE_OP, SLOT, captured
from torch import Tensor
from updates import rewritten

from collage_neuron.numerics import functions
from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE

NORMAL = 2.0**-126

Function = Callable[[Any, Any], Any]

ROUNDED: dict[str, tuple[Function, Callable[[Tensor, Tensor], Tensor]]] = {
    "log1p": (lambda x, y: functions.log1p(x), lambda x, y: torch.log1p(x)),
    "softplus": (
        lambda x, y: functions.softplus(x, 2.0, 20.0),
        lambda x, y: torch.nn.functional.softplus(x, 2.0, 20.0),
    ),
    "atan2": (lambda x, y: functions.atan2(x, y), lambda x, y: torch.atan2(x, y)),
}

Run = Callable[..., list[Tensor]]
BACKENDS: dict[str, Run] = {"reference": on_reference, "xla": on_xla}
if NATIVE.missing() is None:
    BACKENDS["native"] = partial(results, NATIVE)

EXP = 5
"""How far exp of XLA:CPU may be off, near its largest results; of the other backends it is within one unit."""


def inputs() -> tuple[Tensor, Tensor]:
    """Special values and numbers beside them, each with each; then numbers of many sizes, close ones where it bends."""
    generator = torch.Generator().manual_seed(3)
    x, y = hard()
    sizes = torch.randn(1 << 16, generator=generator) * 10 ** torch.linspace(-8, 3, 1 << 16)
    more = torch.cat([sizes, torch.linspace(-2, 2, 1 << 16), torch.linspace(-90, 90, 1 << 15)])
    return torch.cat([x, more]), torch.cat([y, more.flip(0) * 1.1])


def found_by(backend: str, f: Function, xs: tuple[Tensor, Tensor]) -> Tensor:
    return BACKENDS[backend](update_of(("x", "y"), lambda x, y: [f(x, y)]), list(xs))[0]


def usual(backend: str, xs: tuple[Tensor, Tensor]) -> Tensor:
    """Where no operand is subnormal, which XLA takes for zero."""
    small = [(x != 0) & (x.abs() < NORMAL) for x in xs]
    return torch.ones_like(small[0]) if backend != "xla" else ~(small[0] | small[1])


def test_every_promise_is_tested() -> None:
    assert functions.ULPS.keys() == ROUNDED.keys()


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
    unit = ulp(exact.abs().clamp(min=NORMAL), 24)
    if backend == "xla":  # flushes results to zero
        counts &= exact.abs() >= 2 * NORMAL
    most = functions.ULPS[name] + (EXP if backend == "xla" and name == "softplus" else 0)
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
@pytest.mark.parametrize("name", ["nan_to_num", "mask_nan", "mask_inf"])
def test_rules_of_special_values_are_those_of_torch(name: str, backend: str) -> None:
    formats = {"param": format_named("fp32"), "state": format_named("fp32")}
    update = rewritten(captured(ONE_OP[name]), formats, "fp32")
    x, y = hard()
    given = {"param": y.flip(0), "grad": y, "state": x}
    scalars = torch.tensor(update.scalars.run([SLOT]), dtype=torch.float32)
    found = BACKENDS[backend](update, [given[key] for key in update.inputs], scalars)[-1]
    wanted = fx.GraphModule(torch.nn.Module(), captured(ONE_OP[name]).graph)(*given.values(), SLOT)["state"]
    wrong = different(found, wanted)
    if backend == "xla":  # takes subnormal numbers for zeros
        for z in (*given.values(), wanted):
            wrong &= ~((z != 0) & (z.abs() < NORMAL))
    assert not wrong.any()
