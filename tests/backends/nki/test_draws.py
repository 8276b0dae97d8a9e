"""Stochastic rounding in kernels: the reference's results for the bits that were drawn, which a device's are not.

Evidence level: stand-in, whose generator is NumPy's. The reference computes its bits from the number of an element;
here it is given those of the stand-in, so that kernels are compared with it bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.fx as fx
from nki_runs import INFINITY, Run, Step, differing, run, step_of
from nki_standin.machine import Machine
from torch import Tensor
from torch_cases import CASES
from updates import random_inputs

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.eft import narrow, stochastic_round
from collage_neuron.passes.backends.nki import calls
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.backends.nki.tiling import Cut
from collage_neuron.passes.backends.nki.words import seed_of
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.usefixtures("rejecting", "short_search")

DIALECTS = ("nki", "beta1")
SHAPE = (100, 256)
NOTHING = torch.zeros(0)


class Given(fx.Interpreter):
    """Runs a graph in which some nodes are given by name."""

    def __init__(self, graph: fx.GraphModule, given: Mapping[str, Tensor]) -> None:
        super().__init__(graph)
        self.given = given

    def run_node(self, n: fx.Node) -> Any:
        return self.given[n.name] if n.name in self.given else super().run_node(n)


def as_numbers(bits: np.ndarray[Any, Any], dialect: str) -> Tensor:
    """The 16 bits that a kernel makes of 32 that were drawn."""
    if dialect == "nki":
        return torch.from_numpy((bits & 0xFFFF).astype(np.int32))
    uniform = (bits >> 8).astype(np.float32) * np.float32(2.0**-24) + np.float32(1)
    return torch.from_numpy((uniform.view(np.int32) & 0x7FFF80) >> 7)


def wanted(s: Step, kernel: Kernel, found: Run) -> dict[str, Tensor]:
    """What the reference makes of the same components with the same bits: those of one tile of one chunk, on each core.

    The reference rounds a bf16 number up where the sum of both overflows, kernels where the random number is smaller.
    """
    names = [v.name for v, i in kernel.plan.steps if i.kind == "rng"]
    of_cores = (found.machine.drawn[k :: len(names)] for k in range(len(names)))
    drawn = [as_numbers(np.concatenate(x), kernel.dialect) for x in of_cores]
    shape = next(x.shape for key, x in s.components.items() if key not in s.update.blocks)
    down = {str(n.args[1]) for n in s.update.graph.graph.nodes if n.target is stochastic_round}
    given = {n: (0xFFFF - x if n in down else x).reshape(shape) for n, x in zip(names, drawn, strict=True)}
    reference = ReferenceUpdate(s.update)
    reference._forward = Given(s.update.graph, given).run
    results = reference([s.components[key] for key in s.update.inputs], s.vector)
    return dict(zip(s.update.outputs, results, strict=True))


@cache
def step(case: str, strategy: str) -> Step:
    s = step_of(CASES[case], strategy, "fp32")
    inputs = dict(zip(s.update.inputs, random_inputs(s.update, SHAPE), strict=True))
    return s._replace(components=inputs).by_reciprocals()


def is_right(case: str, strategy: str, kernel: Kernel, source: str | None = None, cores: int = 1) -> bool:
    s = step(case, strategy)
    cut = Cut(256, 256, 256 if kernel.plan.has_blocks else 0)
    found = run(kernel, s.components, s.vector, INFINITY, source, cut, cores=cores)
    return not differing(found.results, wanted(s, kernel, found))


MACHINES = [("trn1", "nki", 1), ("trn1", "beta1", 1), ("trn3", "nki", 1), ("trn3", "nki", 2)]
STEPS = [
    ("sgd_momentum", "stochastic"), ("adamw", "stochastic_states"), ("adamw", "split422"), ("adamw", "split322"),
    ("adamw", "split412"), ("adamw", "split312"), ("adamw", "split311"),
]  # fmt: skip


@pytest.mark.parametrize(("target", "dialect", "cores"), MACHINES)
@pytest.mark.parametrize(("case", "strategy"), STEPS)
def test_with_the_drawn_bits_it_is_reference(case: str, strategy: str, target: str, dialect: str, cores: int) -> None:
    kernel = lower_to_nki(step(case, strategy).update, target, dialect)
    assert is_right(case, strategy, kernel, cores=cores)


def _proxies(graph: fx.Graph) -> list[Any]:
    tracer = fx.proxy.GraphAppendingTracer(graph)
    return [fx.Proxy(graph.placeholder(name), tracer) for name in ("x", "index")]


@cache
def rounding(dialect: str) -> Kernel:
    """y = x, rounded stochastically to bf16."""
    graph = fx.Graph()
    x, index = _proxies(graph)
    graph.output((narrow(stochastic_round(x + 0.0, (index ^ 3) & 0xFFFF), "bf16").node,))
    update = Update.elementwise(graph, ("x",), ("y",), ScalarProgram(), {}, draws=True)
    return lower_to_nki(update, "trn1", dialect, components={"x": "fp32", "y": "bf16"})


def of_bits(bits: int) -> Tensor:
    return torch.tensor([bits - (1 << 32) if bits >> 31 else bits], dtype=torch.int32).view(torch.float32)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("lower", [0, 1, 0x1234, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
@pytest.mark.parametrize("upper", [0x3F80, 0xC2FF, 0x0001, 0x7F7F])
def test_of_all_random_numbers_as_many_round_up_as_the_distance_has_places(
    upper: int, lower: int, dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probability is the distance over the gap, exactly: each of the 65 536 numbers is drawn once."""
    all_of_them = np.random.default_rng(0).permutation(1 << 16).astype(np.uint32).reshape(128, 512)
    monkeypatch.setattr(Machine, "draw", lambda self, shape: all_of_them << (16 if dialect == "beta1" else 0))
    x = of_bits(upper << 16 | lower).expand(1 << 16).contiguous()
    y = run(rounding(dialect), {"x": x}, NOTHING, cut=Cut(512, 512)).results["y"].view(torch.int16).int() & 0xFFFF
    assert set(y.tolist()) <= {upper, upper + 1}
    assert int((y == upper + 1).sum()) == lower


@pytest.mark.parametrize("dialect", DIALECTS)
def test_draws_of_one_seed_are_the_same_and_those_of_another_are_not(dialect: str) -> None:
    """Half of the numbers halfway between two go up; of two seeds, and of two tiles, every other one alike."""
    x = torch.full((4 * 128 * 64,), 1 + 2.0**-8)
    a, b, c = (run(rounding(dialect), {"x": x}, NOTHING, cut=Cut(64, 32), seed=s).results["y"] > 1 for s in (1, 1, 3))
    assert torch.equal(a, b)
    half = 6 / 2 / len(x) ** 0.5  # six standard deviations
    assert abs(a.double().mean() - 0.5) < half
    assert abs((a == c).double().mean() - 0.5) < half
    assert abs((a[: len(x) // 2] == a[len(x) // 2 :]).double().mean() - 0.5) < 2**0.5 * half


def seeds() -> Iterator[int]:
    s = step("adamw", "split422")
    base = (5, 7, 0, 0)
    slots = [0.5] * 12
    for drawing in (base, (6, 7, 0, 0), (5, 8, 0, 0), (5, 7, 1, 0), (5, 7, 0, 4096), (5 + (1 << 16), 7, 0, 0)):
        yield from seed_of([(s.update, torch.tensor(s.update.scalars.run(slots, drawing)))], cores=2).flatten().tolist()


def test_each_step_parameter_shard_core_and_seed_has_a_seed_of_its_own() -> None:
    found = list(seeds())
    assert len(set(found)) == len(found)
    assert found == list(seeds())
    assert all(seed % 2 for seed in found)
    s = step("adamw", "split422")
    one, two = (seed_of([(s.update, s.vector)], cores).tolist()[0] for cores in (1, 2))
    assert one == two[:1]


def trained(seed: int, steps: int = 3) -> Tensor:
    params = [torch.nn.Parameter(torch.ones(n).bfloat16()) for n in (300, 40)]
    sgd = torch.optim.SGD(params, lr=2.0**-9)
    optimizer = collage_neuron.compile(sgd, strategy="stochastic", backend="nki", seed=seed)
    seen = []
    for _ in range(steps):
        for p in params:
            p.data.fill_(1.0)
            p.grad = torch.ones_like(p)
        optimizer.step()
        seen.append(torch.cat([p.detach() != 1 for p in params]))
    return torch.stack(seen)


def test_training_draws_anew_each_step_and_the_same_by_seed(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first, again, other = map(trained, (1, 1, 2))
    monkeypatch.setattr(calls, "seed_of", lambda steps, cores: torch.tensor([[1]], dtype=torch.int32))
    stuck = trained(1)
    assert torch.equal(first, again)
    assert all(_alike(a, b) for a, b in ((first[0], first[1]), (first[1], first[2]), (first[0], other[0])))
    assert torch.equal(stuck[0], stuck[1])  # and a seed that does not advance is noticed


def _alike(a: Tensor, b: Tensor) -> bool:
    """Returns True if two draws agree as often as independent ones do, within six standard deviations."""
    return bool(abs(float((a == b).double().mean()) - 0.5) < 6 / 2 / len(a) ** 0.5)


def test_bits_read_in_another_way_are_rejected() -> None:
    graph = fx.Graph()
    x, index = _proxies(graph)
    graph.output((narrow(stochastic_round(x, (index ^ 3) & 0xFF), "bf16").node,))
    update = Update.elementwise(graph, ("x",), ("y",), ScalarProgram(), {}, draws=True)
    with pytest.raises(UnsupportedUpdate, match=r"reads random bits in a way that no kernel does \(node and_\)"):
        lower_to_nki(replace(update), components={"x": "fp32", "y": "bf16"})
