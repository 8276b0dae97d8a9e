"""Rules of functions and of special values: where they are exact, bit for bit those of torch; and in an optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from as_written import Written
from exact import hard, on_reference, on_xla
from natively import different, results
from one_operation import ONE_OP, SLOT, captured
from torch import Tensor
from updates import rewritten

import collage_neuron
from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.usefixtures("rejecting")

EXACT = ("nan_to_num", "mask_nan", "mask_inf")
BACKENDS: dict[str, Callable[[Update, list[Tensor], Tensor], Tensor]] = {
    "reference": lambda update, xs, scalars: on_reference(update, xs, scalars)[-1],
    "xla": lambda update, xs, scalars: on_xla(update, xs, scalars)[-1],
}
if NATIVE.missing() is None:
    BACKENDS["native"] = lambda update, xs, scalars: results(NATIVE, update, xs, scalars)[-1]


def of_torch(name: str, param: Tensor, grad: Tensor, state: Tensor) -> Tensor:
    found: dict[str, Tensor] = fx.GraphModule(torch.nn.Module(), captured(ONE_OP[name]).graph)(param, grad, state, SLOT)
    return found["state"]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", EXACT)
def test_special_values_are_those_of_torch(name: str, backend: str) -> None:
    formats = {"param": format_named("fp32"), "state": format_named("fp32")}
    update = rewritten(captured(ONE_OP[name]), formats, "fp32")
    x, y = hard()
    given = {"param": y.flip(0), "grad": y, "state": x}
    inputs = [given[key] for key in update.inputs]
    found = BACKENDS[backend](update, inputs, torch.tensor(update.scalars.run([SLOT]), dtype=torch.float32))
    wanted = of_torch(name, **given)
    wrong = different(found, wanted)
    if backend == "xla":  # takes subnormal numbers for zeros
        for z in (*given.values(), wanted):
            wrong &= ~((z != 0) & (z.abs() < 2.0**-126))
    assert not wrong.any()


class Curved(Written):
    """An update of functions that have rules, as methods, with `out=` and in place."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, lr=lr)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
        m, v = state["m"], state["v"]
        g = torch.nan_to_num(g, nan=0.0, posinf=1.0, neginf=-1.0)
        m.lerp_(g.clone().sigmoid_(), 0.1)
        v.mul_(0.9).addcmul_(g, g, value=0.1)
        turned = torch.atan2(m, torch.sqrt(v))
        torch.mul(turned, torch.nn.functional.softplus(v, beta=50), out=turned)
        turned = torch.where(torch.isnan(turned) | torch.isinf(m), 0.0, turned)
        p.sub_(turned, alpha=group["lr"])


def trained(dtype: torch.dtype, *, compiled: bool) -> Tensor:
    p = torch.nn.Parameter(torch.linspace(-1, 1, 257).to(dtype))
    optimizer: Any = Curved([p])
    if compiled:
        optimizer = collage_neuron.compile(optimizer, strategy="fp32")
    g = torch.Generator().manual_seed(0)
    for _ in range(12):
        p.grad = torch.randn(257, generator=g).bfloat16().to(p.dtype)
        p.grad[3] = torch.inf
        optimizer.step()
    moment: Tensor = optimizer.state[p]["m"]
    return moment.double()


def test_an_optimizer_of_such_functions_is_captured_and_close_to_float64() -> None:
    found, wanted = trained(torch.bfloat16, compiled=True), trained(torch.float64, compiled=False)
    assert float((found - wanted).abs().max()) < 2.0**-20
