"""Sums and counts in native code: of every element once, in runs of fp32; and any other code is noticed."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.eft import narrow, widen
from collage_neuron.numerics.reductions import count, total
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.backends.native.kernel import RUN
from collage_neuron.passes.backends.protocol import Launch, Measure
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}")


@cache
def update() -> Update:
    """z = x + y + 1, which is not 0 beyond the end; sums of z and of x * z, counts of positive z, and of z but 0."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    x, y = (widen(fx.Proxy(graph.placeholder(name), tracer)) for name in ("x", "y"))
    z: Any = x + y + 1.0
    out: list[Any] = [narrow(z, "fp32"), total(z), total(x * z), count(z > 0.0), count(z != 0.0)]
    graph.output(tuple(o.node for o in out))
    names: dict[str, Any] = {"sums": ("z", "x*z"), "counts": ("positive", "not 0")}
    return Update.elementwise(graph, ("x", "y"), ("x",), ScalarProgram(), {}, **names)


def given(n: int) -> tuple[Tensor, Tensor]:
    """Numbers of many magnitudes; x + y is -1 for some."""
    generator = torch.Generator().manual_seed(n)
    x, y = torch.randn(2, n, generator=generator) * torch.exp2(torch.randn(2, n, generator=generator) * 4)
    y[torch.rand(n, generator=generator) < 0.2] *= 0
    return torch.where(y == 0, -1.0, x), y


def measured(n: int, of: Update) -> Measure:
    x, y = given(n)
    (found,) = NATIVE.run([Launch(of, torch.zeros(0), [[x, y]], [[x]])])
    return found


def is_right(n: int, of: Update) -> bool:
    """Returns True if counts are exact, and sums within 15 roundings of 2**-24 of the magnitudes."""
    (x, y), found = given(n), measured(n, of)
    z = x + y + 1.0
    terms = torch.stack([z, x * z]).double()
    error = (found.sums - terms.sum(1)).abs() <= 15 * 2.0**-24 * terms.abs().sum(1)
    return bool(error.all()) and found.counts.tolist() == [int((z > 0).sum()), int((z != 0).sum())]


LENGTHS = (0, 1, 31, 33, 32 * RUN - 1, 32 * RUN, 32 * RUN + 1, 32 * RUN + 33, 96 * RUN + 40, 100_003)


@pytest.mark.parametrize("n", LENGTHS)
def test_every_element_is_counted_once(n: int) -> None:
    assert is_right(n, update())
