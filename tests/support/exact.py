"""Exact oracles for bf16 arithmetic: rationals to be read, and float64 tensors that do the same fast.

Neither uses a cast to bf16. `rne` rounds a `Fraction` by its definition. `rounded` rounds float64 tensors; it is exact
for every number that float64 holds, so an oracle that uses it must only see sums and products that fit into 53 bits.
tests/numerics/test_eft.py checks one against the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.numerics.eft import Value, narrow, widen
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.backends.xla.lower import XlaUpdate
from collage_neuron.passes.ir.scalars import ScalarProgram
from collage_neuron.passes.ir.update import Update

BITS = 8
"""Significant bits of bf16, the leading one included."""


def rne(q: Fraction, bits: int = BITS) -> Fraction:
    """The nearest number of `bits` significant bits; of two that are as near, the one whose last bit is 0."""
    if q == 0:
        return q
    ulp = Fraction(1)
    while abs(q) >= ulp * 2**bits:
        ulp *= 2
    while abs(q) < ulp * 2 ** (bits - 1):
        ulp /= 2
    return round(q / ulp) * ulp  # Python rounds a Fraction to the nearest integer, a tie to the even one


def rounded(x: torch.Tensor, bits: int = BITS) -> torch.Tensor:
    """`rne` on a float64 tensor, exponents unbounded."""
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp(torch.round(torch.ldexp(mantissa, torch.tensor(bits))), exponent - bits)


def ulp(x: torch.Tensor, bits: int = BITS) -> torch.Tensor:
    """The unit in the last place of the binade of `x` (for 0 that of the smallest number there could be: 0)."""
    return torch.where(x == 0, 0.0, torch.ldexp(torch.ones_like(x), torch.frexp(x)[1] - bits))


def fractions(x: torch.Tensor) -> list[Fraction]:
    """The numbers of a tensor, exactly."""
    return [Fraction(v) for v in x.double().flatten().tolist()]


def from_bits(bits: torch.Tensor) -> torch.Tensor:
    """fp32 numbers from their 32 bits, given as int64."""
    return bits.to(torch.int32).view(torch.float32)


def to_bits(x: torch.Tensor) -> torch.Tensor:
    """The 32 bits of fp32 numbers, as int64 from 0 to 2**32 - 1."""
    return x.view(torch.int32).long() & 0xFFFFFFFF


def all_high_words() -> torch.Tensor:
    """All 65 536 bf16."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)


def is_normal(x: torch.Tensor) -> torch.Tensor:
    """Where `x` is zero, or no subnormal: what devices make of subnormals is their own."""
    return (x == 0) | (x.abs() >= 2.0**-126) | x.isnan()


def ordinal(x: torch.Tensor) -> torch.Tensor:
    """A place on the line of all fp32 numbers: neighbours differ by 1, and -0 is +0."""
    bits = x.contiguous().view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def ulps_apart(x: torch.Tensor, y: torch.Tensor) -> int:
    """The largest distance of two fp32 tensors in units of the last place; two NaNs are equal."""
    same = (x == y) | (x.isnan() & y.isnan())
    return int(torch.where(same, 0, (ordinal(x) - ordinal(y)).abs()).max())


def on_reference(update: Update, inputs: Sequence[torch.Tensor], *scalars: torch.Tensor) -> list[torch.Tensor]:
    """The results of the reference backend; without `scalars` for an update that has none."""
    return list(ReferenceUpdate(update)(inputs, scalars[0] if scalars else torch.zeros(0)))


def on_xla(update: Update, inputs: Sequence[torch.Tensor], *scalars: torch.Tensor) -> list[torch.Tensor]:
    """The results of the XLA backend, on the CPU again."""
    import torch_xla

    device = torch_xla.device()
    (vector,) = scalars or (torch.zeros(0),)
    results = XlaUpdate(update)([x.to(device) for x in inputs], vector.to(device))
    torch_xla.sync()  # one program for all results; fetched one by one, each would be compiled with the others left out
    return [r.cpu() for r in results]


def graph_of(names: Sequence[str], body: Callable[..., Sequence[Any]]) -> fx.Graph:
    """The graph of what `body` returns, given placeholders of these names."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    results = body(*(fx.Proxy(graph.placeholder(name), tracer) for name in names))
    graph.output(tuple(x.node for x in results))
    return graph


def update_of(names: Sequence[str], body: Callable[..., Sequence[Value]], stored: Sequence[str] = ()) -> Update:
    """`body` on fp32 values as an update that every backend lowers: inputs are widened, outputs `stored` as fp32.

    fp32 outputs hide nothing: a word that should have been rounded to bf16 and was not shows its excess bits.
    """

    def whole(*words: Value) -> list[Value]:
        results = body(*map(widen, words))
        return [narrow(x, fmt) for x, fmt in zip(results, stored or ["fp32"] * len(results), strict=True)]

    graph = graph_of(names, whole)
    outs = tuple(f"out{i}" for i in range(len(graph.find_nodes(op="output")[0].args[0])))
    return Update.elementwise(graph, tuple(names), outs, ScalarProgram(), {})


def edited(update: Update, index: int, edit: Callable[[fx.Node], None]) -> Update:
    """A copy of `update` whose `index`-th node is changed by `edit`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(update.graph.graph, copies))
    edit(copies[list(update.graph.graph.nodes)[index]])
    return update.with_body(graph)


ULPS = {torch.exp: 2, torch.log: 2, torch.pow: 2}
"""What fp32 functions may be off by, in torch or on XLA:CPU."""


@cache
def hard() -> tuple[torch.Tensor, torch.Tensor]:
    """Two fp32 vectors: special values and numbers around them, each with each; then random bits, then halves."""
    generator = torch.Generator().manual_seed(0)
    powers = torch.exp2(
        torch.tensor([-149.0, -140, -133, -127, -126, -60, -16, -8, -1, 0, 1, 6, 7, 14, 15, 23, 24, 127])
    )
    around = [
        powers * (1 + k * 2.0**-23)
        for k in (0, 1, 2**14, 2**15 - 1, 2**15, 2**15 + 1, 2**16, 3 * 2**15, 3 * 2**15 - 1, -1)
    ]
    largest = torch.tensor([torch.finfo(torch.bfloat16).max, torch.finfo(torch.float32).max, 3.3961e38, 127.5, 32767.5])
    special = torch.tensor([0.0, float("inf"), 0.1, 3.0, 2.5, 1.5])
    values = torch.cat([*around, largest, special])
    values = torch.cat([values, -values, torch.tensor([float("nan")])]).unique()
    values = torch.cat([values, torch.tensor([-0.0, float("nan")])])
    pairs = torch.cartesian_prod(values, values).unbind(1)
    bits = [
        torch.randint(-(2**31), 2**31, (1 << 15,), generator=generator).to(torch.int32).view(torch.float32)
        for _ in "xy"
    ]
    near = torch.randn(1 << 14, generator=generator)
    halves = (torch.arange(-300, 300) / 2 * 2.0**0).repeat(2)
    ties = (torch.arange(0, 1 << 14) << 15).to(torch.int32).view(torch.float32)
    # Random bits that are added to this NaN make it a zero.
    all_ones = torch.tensor([0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)
    x = torch.cat([all_ones, pairs[0], bits[0], near, halves, ties, ties])
    y = torch.cat(
        [
            torch.tensor([100.0, 7.0]),
            pairs[1],
            bits[1],
            near * (1 + 2.0**-20),
            halves.flip(0),
            ties.roll(1),
            ties.roll(7),
        ]
    )
    return x, y


def patterns() -> torch.Tensor:
    """fp32 numbers with every sign, exponent and upper seven bits of the mantissa, and lower ones of several kinds."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    return torch.cat([upper | lower for lower in (0, 1, 0x7FFF, 0x8000, 0xFFFF)]).view(torch.float32)
