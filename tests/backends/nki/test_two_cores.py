"""One text of a kernel, by two readers, on logical cores of one and of two physical cores: the same bits.

Evidence level: stand-in, which runs the programs of both cores in both orders and fails where one uses what the other
writes; and an independent interpreter (`second_reader`), in which such a fault leaves wrong bits. It shares nothing
with the stand-in: a mistake in one of them would have to be in both. Roots and reciprocals are exact here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import nki_standin
import numpy as np
import pytest
import torch
from nki_runs import INFINITY, Step, count_of, differing, narrowed, run, search_less, step_of, wild
from nki_standin import StandinError
from sampling import part
from second_reader import decoded, encoded, results
from staged import Lamb
from torch import Tensor
from torch.optim import Optimizer
from torch_cases import CASES
from updates import random_inputs

import collage_neuron
from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.numerics.strategies import STRATEGIES, StrategyLike
from collage_neuron.passes.backends.nki import custom_op, target
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.backends.nki.tiling import Cut

pytestmark = pytest.mark.usefixtures("rejecting")

CORES = (1, 2)
ORDERS: dict[int, list[tuple[int, ...]]] = {1: [(0,)], 2: [(0, 1), (1, 0)]}


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch, 100)


@cache
def step(strategy: str) -> Step:
    return step_of(CASES["adamw"], strategy, "fp32").by_reciprocals()


@cache
def kernel(strategy: str, target: str, dialect: str = "nki") -> Kernel:
    return lower_to_nki(step(strategy).update, target, dialect)


TILE = 128 * 6


def cuts_of(k: Kernel) -> list[tuple[tuple[int, ...], Cut]]:
    """Shapes and cuts: loops on both cores, loops of one turn that are copies, odd lines, tiles of no core but one."""
    if k.plan.draws:  # in one tile of one chunk, in which the order of draws is known
        return [((101, 256), Cut(256, 256, 256 if k.plan.has_blocks else 0))]
    if k.plan.has_blocks:
        shapes = [(1, 5), (261, 130), (257, 256), (3, 1030)]
        return [(shape, narrowed(k, shape, 2 * BLOCK, BLOCK)) for shape in shapes]
    sizes = (1, 5 * TILE + 6 * 51 + 5, 9 * TILE + 6 * 3)
    return [((n,), Cut(6, 2, tiles=1 + n % 2)) for n in sizes]


MACHINES = [("trn1", "beta1", 1), ("trn1", "nki", 1), *((t, "nki", cores) for t in ("trn2", "trn3") for cores in CORES)]


@pytest.mark.sampled(of=6)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("target", "dialect", "cores"), MACHINES)
def test_both_readers_get_the_same_bits(target: str, dialect: str, cores: int, strategy: str) -> None:
    """Those of the reference, where nothing is drawn: `test_draws.py` has what is."""
    s, k = step(strategy), kernel(strategy, target, dialect)
    for shape, cut in part(cuts_of(k), 2, f"{target} {dialect} {cores} {strategy}"):
        components = dict(zip(s.update.inputs, random_inputs(s.update, shape), strict=True))
        found = run(k, components, s.vector, cut=cut, cores=cores)
        assert k.plan.draws or not differing(found.results, s._replace(components=components).expected())
        for order in ORDERS[cores]:
            of_core = len(found.machine.drawn) // cores
            drawn = [x for core in order for x in found.machine.drawn[core * of_core :][:of_core]]
            assert not differing(results(k, components, s.vector, cut, drawn, order=order), found.results)
        count = count_of(k, shape, cut, cores)
        once = 1 + 2 * k.plan.draws  # what loads the numbers, and the seed
        assert found.machine.traces[-1].traced == count + once


OTHERS: list[tuple[str, str, str]] = [
    *(("adamw", s, "bf16") for s in ("light", "plus", "full")),
    *((case, "plus", "fp32") for case in ("sgd_momentum", "adamax", "rprop", "radam", "nadam", "asgd")),
]


@pytest.mark.parametrize(("case", "strategy", "arithmetic"), OTHERS)
def test_the_second_reader_of_the_older_dialect_has_the_same_bits(case: str, strategy: str, arithmetic: str) -> None:
    """All magnitudes; as a device cuts it, in tiles of 4 columns and chunks of 2, and one element alone."""
    s = wild(step_of(CASES[case], strategy, arithmetic), n=900)
    k = lower_to_nki(s.update, "trn1", "beta1")
    for n, cut in ((900, None), (128 * 4 + 131, narrowed(k, (643,), 4, 2)), (1, None)):
        components = {key: x[:n] for key, x in s.components.items()}
        wanted = s.by_reciprocals()._replace(components=components).expected()
        assert not differing(results(k, components, s.vector, cut), wanted)


def test_the_second_reader_rounds_as_torch_does() -> None:
    """All upper halves of fp32's bits, with lower halves on, beside and far from ties."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | lower).reshape(-1).view(np.float32)
    wanted = torch.from_numpy(x).bfloat16()
    found = torch.from_numpy(decoded(encoded(x, "bfloat16"), "bfloat16")).bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.view(torch.int16)[~found.isnan()], wanted.view(torch.int16)[~wanted.isnan()])
    integers = np.array([0.5, 1.5, -0.5, -2.5, 40000.0, -40000.0, 32767.5], np.float32)
    assert encoded(integers, "int16").tolist() == [0, 2, 0, -2, 32767, -32768, 32767]


SHARING = """
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def kernel(x, y):
    core = nl.program_id(0)
    tile = nl.ndarray((2, 8), dtype=nl.float32, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src={src})
    nisa.dma_copy(dst={dst}, src=tile)
    return y
"""
SHARED = [
    ("x", "y[2 * core : 2 * core + 2]", ""),
    ("y[2 * core : 2 * core + 2]", "y[2 * core : 2 * core + 2]", ""),
    ("x", "y[core : core + 2]", "would have written what core . has written"),
    ("y[core : core + 2]", "y[2 * core : 2 * core + 2]", "would have (read|written) what core . has (written|read)"),
    ("y[0:2]", "y[2 * core : 2 * core + 2]", "would have (read|written) what core . has (written|read)"),
    ("x", "y[0:2].ap(pattern=[[16, 2], [1, 8]], offset=4 * core)", "would have written what core . has written"),
]


@pytest.mark.parametrize(("src", "dst", "said"), SHARED)
def test_what_two_cores_share_is_found(src: str, dst: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "kernel.py"
    path.write_text(SHARING.format(src=src, dst=dst))
    with nki_standin.install("nki", "trn2"), pytest.raises(StandinError, match=said) if said else nullcontext():
        nki_standin.load(path).kernel[2](torch.zeros(2, 8), torch.zeros(4, 8))


# Whole steps


def trained(cores: int, make: Callable[..., Optimizer], folder: Path, **options: Any) -> list[Tensor]:
    """Parameters and states after two steps of a simulated trn2 with so many physical cores in a logical one."""
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(n, generator=g)) for n in ((131, 40), (7,), (1,), (130, 256))]
    with pytest.MonkeyPatch.context() as patch, nki_standin.install("nki", "trn2", INFINITY) as machine:
        patch.setenv(custom_op.FOLDER, str(folder))
        patch.setenv(target.TARGET, "trn2")
        patch.setenv(target.VARIABLE, str(cores))
        optimizer = collage_neuron.compile(make(params), backend="nki", verbose=False, validate="off", **options)
        for _ in range(2):
            for p in params:
                p.grad = torch.randn(p.shape, generator=g).to(p.dtype)
            optimizer.step()
        assert machine.cores == cores
    custom_op.function.cache_clear()  # a kernel belongs to the NKI it was loaded under
    states = (x for p in params for x in optimizer.state[p].values() if isinstance(x, Tensor))
    return [*(p.detach() for p in params), *states]


MAKERS: dict[str, tuple[Callable[..., Optimizer], StrategyLike]] = {
    "blocks": (torch.optim.AdamW, {"param": "bf16", "exp_avg": "i16q4", "exp_avg_sq": "bf16x2"}),
    "Lamb": (Lamb, "full"),
    "Adafactor": (torch.optim.Adafactor, "full"),
}


@pytest.mark.parametrize("name", MAKERS)
def test_a_step_on_two_cores_has_the_bits_of_one(name: str, tmp_path: Path) -> None:
    """With reductions too: a kernel leaves the sums of chunks, which are put together after it."""
    make, strategy = MAKERS[name]
    one, two = (trained(cores, make, tmp_path, strategy=strategy) for cores in CORES)
    assert [a.dtype for a in one] == [b.dtype for b in two]
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_each_core_draws_with_a_seed_of_its_own() -> None:
    """The same bits with the same seeds; that both cores have one seed is noticed."""
    s, k = step("stochastic"), kernel("stochastic", "trn2")
    ((shape, cut),) = cuts_of(k)
    components = dict(zip(s.update.inputs, random_inputs(s.update, shape), strict=True))
    both = k.source.replace("seed[0:1, core : core + 1]", "seed[0:1, 0:1]")
    assert both != k.source
    for source, alike in ((k.source, False), (both, True)):
        (first, second), again = (
            run(k, components, s.vector, source=source, cut=cut, cores=2).machine.drawn for _ in range(2)
        )
        assert np.array_equal(first, again[0])
        assert np.array_equal(second, again[1])
        assert np.array_equal(first, second[: len(first)]) is alike
