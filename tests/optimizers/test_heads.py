"""Updates that see a parameter in another shape (Adam-mini's heads): captured, within bounds, on two backends alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import as_written
import pytest
import torch
from as_written import Written, run
from headed import Blocks, Mini
from running import as_written_too
from torch import Tensor
from torch.nn import Parameter
from torch.utils.flop_counter import FlopCounterMode

import collage_neuron
from collage_neuron.errors import TranslationError, UnsupportedUpdate
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.numerics.underflow import rounding
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.store import read_fp32, record_of

SHAPES = ((6, 10), (8, 8), (2, 6, 10), (4, 16), (1, 40), (40, 1))
"""Of the first one, heads begin and end within rows; of the second, rows and heads are of one number."""
VECTOR = (64,)

pytestmark = [pytest.mark.usefixtures("rejecting")]


def shapes_for(make: Any) -> tuple[tuple[int, ...], ...]:
    return tuple(s for s in SHAPES if math.prod(s[:-1]) % 2 == 0) if make is Blocks else (*SHAPES, VECTOR)


def compiled(
    make: Any = Mini, strategy: str = "full", shapes: Sequence[tuple[int, ...]] | None = None, **settings: Any
) -> tuple[Any, list[Parameter]]:
    return as_written.compiled(make, strategy, shapes or shapes_for(make), verbose=False, **settings)


def moment(optimizer: Any, p: Tensor) -> Tensor:
    return read_fp32(p, optimizer.state[p], "m", record_of(optimizer, p))


@pytest.mark.parametrize("strategy", ["full", "bf16"])
def test_it_is_exported_in_fp32_in_the_optimizers_shapes(strategy: str) -> None:
    model = torch.nn.Linear(10, 6, bias=False)
    model, optimizer = collage_neuron.compile(model, Mini(model.parameters()), strategy=strategy, verbose=False)
    run(optimizer, 2)
    _, exported = collage_neuron.checkpoint.get_fp32_state_dict(model, optimizer)
    found = {k: (x.dtype, tuple(x.shape)) for k, x in exported["state"][0].items() if isinstance(x, Tensor)}
    assert found == {"m": (torch.float32, (4, 15)), "vmean": (torch.float32, (4, 1))}
    assert torch.equal(exported["state"][0]["m"], moment(optimizer, model.weight))


@pytest.mark.parametrize("strategy", ["plus", "split433"])
@as_written_too()
def test_a_run_goes_on_as_written_and_back(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step as written has the values of the words, in their shape, and a captured run those that it left."""
    settings: dict[str, Any] = {"shapes": ((8, 160),)}
    captured, (p,) = compiled(Mini, strategy, **settings)
    run(captured, 2)
    saved, values = captured.state_dict(), moment(captured, p)
    written, (q,) = compiled(Mini, strategy, **settings)
    written.load_state_dict(saved)
    with torch.no_grad():
        q.copy_(p)
    with FlopCounterMode(display=False):  # beside which no values wait
        run(written, 1, first=2)
    gradient = q.grad
    assert gradient is not None
    wanted = torch.lerp(values, gradient.float().view(4, -1), 1 - 0.9)
    fmt = FORMATS[record_of(written, q)["m"]]
    assert ((moment(written, q) - wanted).abs() <= rounding(fmt, wanted.abs())).all()
    back, (r,) = compiled(Mini, strategy, **settings)
    back.load_state_dict(written.state_dict())
    with torch.no_grad():
        r.copy_(q)
    run(back, 1, first=3)
    assert not bookkeeping(back).as_written
    assert r.isfinite().all()


def test_validation_notices_a_view_of_other_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a launch had the elements in another order, the means would be those of other heads."""
    optimizer, _ = compiled(backend="reference", shapes=((6, 10),), validate="on")

    def turned(t: Tensor, key: str, update: Any) -> Tensor:
        return t.detach().reshape(-1).flip(0).view(update.seen_as) if key == "grad" else t.detach().view(update.seen_as)

    monkeypatch.setattr("collage_neuron.optimizer.launches._seen", turned)
    with pytest.raises(TranslationError, match="rounding explains"):
        run(optimizer, 1)


# --- what is rejected -------------------------------------------------------------------------------------------------


class Reshaped(Written):
    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_((g.reshape(4, -1) / g.reshape(4, -1).norm(dim=1, keepdim=True)).reshape(p.shape), alpha=group["lr"])


def test_parameters_in_another_order_are_rejected() -> None:
    turned = Parameter(torch.randn(16, 24).bfloat16().mT)
    with pytest.raises(UnsupportedUpdate, match=r"turns the parameter's shape \[24, 16\] into \[4, 96\]|do not lie in"):
        run(collage_neuron.compile(Reshaped([turned]), verbose=False), 1)


class Row(Written):
    """Scales each row by the root of an average of its squares, and does something with that state in step 3."""

    def __init__(self, params: Any, change: Any) -> None:
        super().__init__(params)
        self.change = change

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        rows = g.view(16, -1)
        q = (rows * rows).mean(1, keepdim=True)
        state["n"] = state.get("n", 0) + 1
        if "v" not in state:
            state["v"] = torch.zeros_like(q)
        if state["n"] == 3:
            state["v"] = self.change(state["v"])
        state["v"].lerp_(q.view(state["v"].shape).to(state["v"].dtype), 0.1)
        p.add_((rows / (state["v"].view(16, 1).sqrt() + 0.01)).view_as(p), alpha=-0.01)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "fewer dimensions": lambda v: v.view(16),
    "transposed": lambda v: v.view(1, 16),
    "double": lambda v: v.double(),
    "half": lambda v: v.half(),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("is_inside", [True, False], ids=["by the step", "between steps"])
@as_written_too()
def test_a_state_that_gets_another_shape_or_dtype_is_not_made_anew(name: str, is_inside: bool) -> None:
    """Not even where validation has no sample: what captured steps cannot follow runs as written."""
    change = CHANGES[name]
    start = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    params, wanted = (torch.nn.Parameter(start.clone()) for _ in range(2))
    inside = change if is_inside else (lambda v: v)
    settings: dict[str, Any] = {"strategy": "fp32", "validate": "off"}
    optimizer, plain = collage_neuron.compile(Row([params], inside), **settings), Row([wanted], inside)
    for step in range(5):
        g = torch.randn(64, 32, generator=torch.Generator().manual_seed(step + 1)).bfloat16()
        for o, p in ((optimizer, params), (plain, wanted)):
            p.grad = g.to(p.dtype)
            if step == 2 and not is_inside:
                o.state[p]["v"] = change(o.state[p]["v"])
            o.step()
    found = collage_neuron.exact_value(optimizer, params)
    assert (found - wanted).norm() <= 2.0**-10 * (wanted - start).norm()


NAMED = {
    "view(12, -1)": ((12, 64), lambda g: g.view(12, -1)),
    "view(1, -1)": ((1, 8), lambda g: g.view(1, -1)),
    "flatten()": ((3,), lambda g: g.flatten()),
}


class Shown(Written):
    """Keeps an average of the gradient in a shape that is written into the code, and is the parameter's."""

    def __init__(self, params: Any, view: Any) -> None:
        super().__init__(params)
        self.view = view

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        g = self.view(g)
        if not state:
            state["m"] = torch.zeros_like(g)
        state["m"].lerp_(g, 0.1)
        p.add_(state["m"].view_as(p), alpha=-0.01)


@pytest.mark.parametrize("name", NAMED)
def test_sizes_that_the_code_names_need_not_be_those_of_a_sample(name: str) -> None:
    shape, view = NAMED[name]
    params, wanted = (torch.nn.Parameter(torch.ones(shape)) for _ in range(2))
    optimizer, plain = collage_neuron.compile(Shown([params], view), strategy="fp32"), Shown([wanted], view)
    for step in range(4):
        g = torch.randn(shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        for o, p in ((optimizer, params), (plain, wanted)):
            p.grad = g.to(p.dtype)
            o.step()
    assert torch.allclose(collage_neuron.exact_value(optimizer, params), wanted, rtol=2.0**-20)
