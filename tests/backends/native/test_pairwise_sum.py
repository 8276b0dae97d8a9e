"""Kernels of reductions: for every width of vectors they have the bits of the definition."""

from __future__ import annotations

import platform

import pytest
import torch
from as_written import compiled, run
from planned import plan
from staged import Chained, Lamb

from collage_neuron.optimizer import launches
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.passes.backends.native.backend import Engine, Native
from collage_neuron.passes.backends.native.machine import Target
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.backends.reference import GroupSums

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=str(NATIVE.missing()))

SHAPES = ((300, 129), (16,), (), (0, 3), (128,))


def launches_of(make: type[Lamb] | type[Chained], strategy: str) -> list[Launch]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES]
    optimizer = compiled(lambda _: make(params), strategy)[0]
    run(optimizer, 1)
    return [launches.launch(optimizer, job) for job in plan(make, optimizer, optimizer.param_groups[0], 0)]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="narrower vectors of x86")
@pytest.mark.parametrize("width", [4, 8, None])
@pytest.mark.parametrize("make", [Lamb, Chained])
def test_sums_have_the_bits_of_the_definition(make: type[Lamb] | type[Chained], width: int | None) -> None:
    backend = Native()
    if width is not None:
        vars(backend)["engine"] = Engine(Target("x86_64-unknown-linux-gnu", "x86-64-v3", "", width))
    for launch in launches_of(make, "plus"):
        part = launch.update.parts[0]
        reads = [[row[launch.update.inputs.index(key)] for key in part.inputs] for row in launch.reads]
        rows = launch.vector.expand(len(reads), -1)
        assert backend.engine.runs(part, tuple(t.dtype for t in reads[0])) is not None
        found = backend._sum_groups(launch._replace(update=part, reads=reads), rows)
        for of_param, row in zip(found, reads, strict=True):
            for sums, wanted in zip(of_param, GroupSums(part)(row, launch.vector), strict=True):
                assert torch.equal(sums, wanted)
