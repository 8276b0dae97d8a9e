"""Sums, means and norms from kernels, beside exact ones and those of fp64 (stand-in and independent interpreter)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch
import torch.fx as fx
from nki_runs import INFINITY, bits, count_of, run, search_less
from second_reader import results
from torch import Tensor

from collage_neuron import torch_privates
from collage_neuron.numerics.eft import widen
from collage_neuron.numerics.fp32_pairs import folded
from collage_neuron.numerics.tensor_sums import mean_of, norm_of, sum_of
from collage_neuron.passes.backends.nki.chunk_totals import sums_of, terms_of
from collage_neuron.passes.backends.nki.cut import Cut
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.stage import REDUCTION, Reduced, Stage
from collage_neuron.passes.ir.update import Update

DIALECTS = ("nki", "beta1")
KINDS = (sum_of, mean_of, norm_of)
NOTHING = torch.zeros(0)
Run = Callable[[Kernel, Tensor, Cut | None], Tensor]


@cache
def kernel(dialect: str, storage: str = "fp32") -> Kernel:
    """Sum, mean and norm of x, in one reduction."""
    graph = fx.Graph()
    x: Any = widen(fx.Proxy(graph.placeholder("x"), fx.proxy.GraphAppendingTracer(graph)))
    graph.output(tuple(kind(x).node for kind in KINDS))
    stage = Stage(REDUCTION, graph, ("x",), (), tuple(Reduced(kind.__name__) for kind in KINDS))
    update = Update((stage,), ("x",), (), ScalarProgram(), {})
    with pytest.MonkeyPatch.context() as patch:
        search_less(patch)
        return lower_to_nki(update, "trn1", dialect, components={"x": storage})


def measured(k: Kernel, x: Tensor, cut: Cut | None = None, **others: Any) -> Tensor:
    return run(k, {"x": x}, NOTHING, cut=cut, **others).results["measures"]


def numbers(k: Kernel, x: Tensor, cut: Cut | None = None, **others: Any) -> Tensor:
    return sums_of(k.plan.program, KINDS, measured(k, x, cut, **others)[None], x.numel())[0]


def defined(x: Tensor) -> Tensor:
    """As fp64 gives them."""
    return torch.stack([kind(x.float()) for kind in KINDS])


def values(n: int, spread: int = 12, seed: int = 0) -> Tensor:
    """Of both signs and of many magnitudes."""
    g = torch.Generator().manual_seed(1000 * n + seed)
    return torch.randn(n, generator=g) * torch.randint(-spread, spread + 1, (n,), generator=g).float().exp2()


def check(found: Tensor, x: Tensor) -> None:
    """What `chunk_totals.py` says: 2**-37 of the sum of magnitudes, 2**-36 of a norm, and one rounding to fp32."""
    each = [Fraction(v) for v in x.tolist()]
    total, size = sum(each, Fraction()), sum((abs(v) for v in each), Fraction())
    got = [Fraction(v) for v in found.tolist()]
    for of, n in ((got[0], 1), (got[1], len(each))):
        assert abs(of - total / n) <= Fraction(1, 1 << 24) * abs(of) + Fraction(1, 1 << 37) * size / n
    square = sum(v * v for v in each)
    off = Fraction(1, 1 << 24) * (1 + Fraction(1, 1 << 12))
    assert square * (1 - off) * (1 - off) <= got[2] * got[2] <= square * (1 + off) * (1 + off)


CUTS = ((1, None), (3, Cut(3, 3)), (127, None), (300, None), (128 * 6 * 2 + 131, Cut(6, 3)), (1100, Cut(1024, 512)))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_results_are_within_their_bounds_and_almost_always_those_of_fp64(dialect: str) -> None:
    for n, cut in CUTS:
        for spread in (0, 50):
            x = values(n, spread)
            found = numbers(kernel(dialect), x, cut)
            check(found, x)
            assert torch.equal(found, defined(x))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_order_of_additions_does_not_matter(dialect: str) -> None:
    """Nor does who reads the kernel: sums of chunks are exact, also where all elements are as large as they can be."""
    k, x = kernel(dialect), torch.cat([values(128 * 512), 2 - torch.rand(128 * 512) * 2**-7])
    cut = Cut(512, 512)
    found = [measured(k, x, cut, device=replace(INFINITY, order=order)) for order in ("forward", "backward", "pairs")]
    if dialect == "beta1":
        found.append(results(k, {"x": x}, NOTHING, cut)["measures"])
    assert all(torch.equal(bits(found[0]), bits(other)) for other in found[1:])
    assert torch.equal(sums_of(k.plan.program, KINDS, found[0][None], x.numel())[0], defined(x))


def lost(k: Kernel, x: Tensor, cut: Cut | None = None, is_square: bool = True, **others: Any) -> Fraction:
    """The relative error of the sum of squares, or of positive elements, before it is rounded to fp32."""
    found = measured(k, x, cut, **others).view(1, -1, len(k.plan.program.measures))
    terms, unit = terms_of(k.plan.program.sums[2 if is_square else 0], found, is_square)
    hi, lo = (Fraction(float(v)) for v in folded(terms.flatten(1)))
    power = 2 if is_square else 1
    right = sum(Fraction(v) ** power for v in x.tolist())
    return abs((hi + lo) * Fraction(float(unit)) ** power / right - 1)


def test_what_is_lost_of_small_elements_beside_a_large_one() -> None:
    """The worst for a chunk: 511 elements whose squares all lose as much, and to the same side."""
    for low in (2**-12 + 2**-23, 2**-10 + 3 * 2**-22, 0.3):
        x = torch.cat([torch.ones(1), torch.tensor(2.0**-9 * (1 + low)).expand(511)])
        assert lost(kernel("nki"), x, Cut(512, 512)) <= Fraction(2) ** -36
        assert lost(kernel("nki"), x * x, Cut(512, 512), is_square=False) <= Fraction(2) ** -37


@pytest.mark.parametrize("k", [-100, -60, 60, 90])
def test_magnitudes_do_not_matter(k: int) -> None:
    x = values(900, 9)
    assert torch.equal(numbers(kernel("nki"), x * 2.0**k), defined(x) * 2.0**k)


EXTREMES: Mapping[str, Tensor] = {
    "zeros": torch.zeros(300),
    "minus zeros": -torch.zeros(5),
    "what cancels": torch.tensor([3e38, 3e38, -3e38, 1.0]),
    "too large": torch.tensor([3e38, 3e38]),
    "subnormal": torch.full((300,), 3e-45),
    "large and subnormal": torch.tensor([3e-45, 1e38]),
    "infinite": torch.tensor([1.0, torch.inf, 2.0]),
    "minus infinity": torch.cat([torch.ones(600), torch.tensor([-torch.inf]), torch.zeros(600)]),
    "both": torch.cat([torch.ones(600), torch.tensor([-torch.inf, torch.inf])]),
    "nan": torch.cat([torch.full((600,), torch.inf), torch.tensor([torch.nan])]),
}


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("name", EXTREMES)
def test_extremes(name: str, dialect: str) -> None:
    x = EXTREMES[name]
    found, right = numbers(kernel(dialect), x, Cut(1, 1) if len(x) < 600 else Cut(4, 2)), defined(x)
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(bits(found[~found.isnan()]), bits(right[~right.isnan()]))


@pytest.mark.parametrize("dialect", DIALECTS)
def test_bf16_elements(dialect: str) -> None:
    """Their squares are exact: fewer instructions give the same."""
    narrow, wide = kernel(dialect, "bf16"), kernel(dialect)
    assert len(narrow.plan.steps) < len(wide.plan.steps)
    for n in (5, 2000):
        x = values(n).bfloat16()
        check(found := numbers(narrow, x), x)
        assert torch.equal(found, numbers(wide, x.float()))


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("n", [127, 3 * 128 * 6 + 12])
def test_instructions_are_counted_as_they_run(n: int, dialect: str) -> None:
    trace = run(kernel(dialect), {"x": values(n)}, NOTHING).machine.trace
    assert (trace.traced, len(trace.records)) == count_of(kernel(dialect), (n,))


def test_instructions_to_compile_do_not_grow_with_a_tensor() -> None:
    small, large = (count_of(kernel("nki"), (n, 4096)).traced for n in (1 << 10, 1 << 20))
    assert small == large


def test_the_host_reads_nothing() -> None:
    """Tensors without data do, so that no step waits for the device."""
    program = kernel("nki").plan.program
    with torch_privates.fake_tensors():
        found = sums_of(program, KINDS, torch.empty(4, 7 * len(program.measures)), 3000)
    assert found.shape == (4, 3)


def test_xla_puts_them_together_as_torch_does(xla: torch.device) -> None:
    """Bit for bit: no compiler reorders the sums of pairs, and contracted products are exact."""
    k, x = kernel("nki"), values(40000, 30)
    totals = measured(k, x, Cut(100, 50))[None]
    found = sums_of(k.plan.program, KINDS, totals.to(xla), x.numel())
    assert torch.equal(found.cpu()[0], defined(x))


MUTATIONS = [
    ("operand0=1536.0, op1=nl.subtract, operand1=1536.0", "operand0=1.5, op1=nl.subtract, operand1=1.5"),
    ("op1=nl.bitwise_xor", "op1=nl.bitwise_and"), ("operand0=2.0**-126", "operand0=0.0"), ("scale=2.0", "scale=1.0"),
    ("op1=nl.minimum", "op1=nl.maximum"), ("op=nl.maximum, data=unit_1", "op=nl.add, data=unit_1"),
    ("op=nl.add, data=difference_9", "op=nl.add, data=difference_8"),
    ("nl.fori_loop(0, looped", "nl.fori_loop(PARTITIONS, looped"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), MUTATIONS)
def test_a_wrong_kernel_is_noticed(old: str, new: str) -> None:
    k = kernel("nki")
    source = k.source if old in k.source else _joined(k.source)
    assert old in source
    given = [
        (values(1024, 0), Cut(512, 512)),
        *((values(n), cut) for n, cut in CUTS),
        *((EXTREMES[name], None) for name in ("zeros", "infinite")),
    ]
    assert not all(_right(k, source.replace(old, new), x, cut) for x, cut in given)


def _joined(source: str) -> str:
    """The text with each call on one line."""
    return re.sub(r",\n +(?=op|operand)", ", ", source)


def _right(k: Kernel, source: str, x: Tensor, cut: Cut | None) -> bool:
    try:
        found = numbers(k, x, cut, source=source)
        near = not bool(x.any()) or bool(x.isinf().any()) or lost(k, x, cut, source=source) <= Fraction(2) ** -36
    except Exception:  # what the stand-in refuses is noticed too
        return False
    return near and torch.equal(found, defined(x))
