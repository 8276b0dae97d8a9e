"""Exact oracles for bf16 arithmetic: rationals to be read, and float64 tensors that do the same fast.

Neither uses a cast to bf16. `rne` rounds a `Fraction` by its definition. `rounded` rounds float64 tensors; it is exact
for every number that float64 holds, so an oracle that uses it must only see sums and products that fit into 53 bits.
tests/numerics/test_eft.py checks one against the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from word_intervals import ON_BITS, ON_WORDS, magnitude, on_bits

from collage_neuron.numerics.blocks import spread
from collage_neuron.numerics.eft import Value, capped, narrow, round_to, sqrt, widen
from collage_neuron.numerics.storage import storage_named
from collage_neuron.passes.backends.reference import ReferenceUpdate, numbers
from collage_neuron.passes.backends.xla.stages import XlaUpdate
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
    return list(ReferenceUpdate(update)(inputs, *(scalars or (torch.zeros(0),))))


def on_xla(update: Update, inputs: Sequence[torch.Tensor], *scalars: torch.Tensor) -> list[torch.Tensor]:
    """The results of the XLA backend, on the CPU again."""
    import torch_xla

    device = torch_xla.device()
    (vector,) = scalars or (torch.zeros(0),)
    results = XlaUpdate(update)([x.to(device) for x in inputs], vector.to(device))
    torch_xla.sync()  # one program for all results; fetched one by one, each would be compiled with the others left out
    return [r.cpu() for r in results]


def update_of(names: Sequence[str], body: Callable[..., Sequence[Value]], stored: Sequence[str] = ()) -> Update:
    """`body` on fp32 values as an update that every backend lowers: inputs are widened, outputs `stored` as fp32.

    fp32 outputs hide nothing: a word that should have been rounded to bf16 and was not shows its excess bits.
    """
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    results = body(*(widen(fx.Proxy(graph.placeholder(name), tracer)) for name in names))
    outputs = [narrow(x, fmt) for x, fmt in zip(results, stored or ["fp32"] * len(results), strict=True)]
    graph.output(tuple(o.node for o in outputs))
    outs = tuple(f"out{i}" for i in range(len(outputs)))
    return Update.elementwise(graph, tuple(names), outs, ScalarProgram(), {})


def edited(update: Update, index: int, edit: Callable[[fx.Node], None]) -> Update:
    """A copy of `update` whose `index`-th node is changed by `edit`."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(update.graph.graph, copies))
    edit(copies[list(update.graph.graph.nodes)[index]])
    return update.with_body(graph)


class Interval(NamedTuple):
    """All that fp32 implementations may make of one value; of a comparison (certainly, possibly) true."""

    low: torch.Tensor
    high: torch.Tensor
    exact: tuple[torch.Tensor, torch.Tensor] | None = None
    """Of a product its ends before rounding: a sum that contracts the product to an FMA sees those."""

    @property
    def contracted(self) -> Interval:
        """The ends with and without contraction."""
        if self.exact is None:
            return self
        return Interval(torch.minimum(self.low, self.exact[0]), torch.maximum(self.high, self.exact[1]))


ULPS = {torch.exp: 2, torch.log: 2, torch.pow: 2}
"""What fp32 functions may be off by, in torch or on XLA:CPU."""

RECIPROCAL_ROOT_ULPS = 4
"""What a / sqrt(b) may be off by on XLA:CPU, which computes a * rsqrt(b) with an approximation of its own (seen: 2)."""


class Intervals(fx.Interpreter):
    """Runs an update on float64 intervals: where both ends meet, every backend must give that very number.

    What makes an interval wide: a product inside a sum, which XLA:CPU may or may not contract to an FMA, and the
    functions named above. All else is correctly rounded, and rounding is monotone: it goes to the ends. float64 itself
    rounds sums of fp32 numbers innocuously (53 >= 2 * 24 + 2); a sum with an exact product of 48 bits it gets wrong
    once in about 2**29.
    """

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target in (widen, narrow):
            return Interval(args[0].low.double(), args[0].high.double())  # a mask, widened, is 0 or 1
        if target is round_to:
            return Interval(_stored(args[0].low, args[1]), _stored(args[0].high, args[1]))
        if target in ON_WORDS:
            return Interval(*ON_WORDS[target](*(_ends_of(x) for x in args)))
        if target in ON_BITS or any(isinstance(x, Interval) and x.low.dtype == torch.int32 for x in args):
            return Interval(*on_bits(target, *(_ends_of(x) for x in args)))
        return _ON_INTERVALS[target](*(x if isinstance(x, Interval) else _constant(x) for x in args))

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.target in ULPS:
            return _widened(result, ULPS[n.target])
        if n.target is operator.truediv and isinstance(n.args[1], fx.Node) and n.args[1].target is sqrt:
            return _widened(result, RECIPROCAL_ROOT_ULPS)
        return result


def intervals(update: Update, inputs: Sequence[torch.Tensor], scalars: torch.Tensor) -> list[Interval]:
    """What the outputs of `update` may be, element by element: a word that a block shares is that of each of them."""
    blocks = [update.blocks.get(key, 0) for key in update.inputs]
    like = inputs[blocks.index(0)]
    each = [spread(x, k, like.shape[-1]) if k else x for x, k in zip(inputs, blocks, strict=True)]
    index = [Interval(n, n) for n in [numbers(like, 0)] if update.draws]
    components, entries = ([Interval(x.double(), x.double()) for x in values] for values in (each, scalars))
    return list(Intervals(update.graph).run(*components, *index, *entries))


def _stored(x: torch.Tensor, fmt: str) -> torch.Tensor:
    """`round_to`, on float64: to an integer it saturates."""
    storage = storage_named(fmt)
    if storage.precision is None:
        return torch.round(x).clamp(*storage.limits)
    if storage.largest is not None:  # subnormal numbers, and an end
        return storage.round(x.float()).double()
    return rounded(x, storage.precision[1] + 1)


def _ends_of(x: Any) -> Any:
    return x[:2] if isinstance(x, Interval) else x


def _constant(x: float) -> Interval:
    value = torch.tensor(x, dtype=torch.float64)
    return Interval(value, value)


def _widened(x: Interval, ulps: int) -> Interval:
    return Interval(x.low - ulps * ulp(x.low, 24), x.high + ulps * ulp(x.high, 24))


def _ends(f: Callable[..., torch.Tensor], x: Interval, y: Interval) -> tuple[torch.Tensor, torch.Tensor]:
    corners = torch.stack(torch.broadcast_tensors(*(f(a, b) for a in x[:2] for b in y[:2])))
    return corners.amin(0), corners.amax(0)


def _product(x: Interval, y: Interval) -> Interval:
    low, high = _ends(torch.mul, x, y)
    return Interval(rounded(low, 24), rounded(high, 24), (low, high))


def _sum(x: Interval, y: Interval) -> Interval:
    x, y = x.contracted, y.contracted
    return Interval(rounded(x.low + y.low, 24), rounded(x.high + y.high, 24))


def _negative(x: Interval) -> Interval:
    return Interval(-x.high, -x.low, x.exact and (-x.exact[1], -x.exact[0]))


def _both(f: Callable[..., torch.Tensor]) -> Callable[..., Interval]:
    """An exact operation that is monotone in each operand."""
    return lambda *x: Interval(f(*(v.low for v in x)), f(*(v.high for v in x)))


def _rising(f: Callable[..., torch.Tensor]) -> Callable[[Interval], Interval]:
    return lambda x: Interval(rounded(f(x.low), 24), rounded(f(x.high), 24))


def _rounded_ends(f: Callable[..., torch.Tensor]) -> Callable[[Interval, Interval], Interval]:
    def on_ends(x: Interval, y: Interval) -> Interval:
        low, high = _ends(f, x, y)
        return Interval(rounded(low, 24), rounded(high, 24))

    return on_ends


def _equal(x: Interval, y: Interval) -> Interval:
    point = (x.low == x.high) & (y.low == y.high) & (x.low == y.low)
    return Interval(point, (x.low <= y.high) & (y.low <= x.high))


def _choice(c: Interval, x: Interval, y: Interval) -> Interval:
    certainly, possibly = c[:2]
    low = torch.where(possibly, torch.minimum(x.low, y.low), y.low)
    high = torch.where(possibly, torch.maximum(x.high, y.high), y.high)
    return Interval(torch.where(certainly, x.low, low), torch.where(certainly, x.high, high))


_ON_INTERVALS: dict[Any, Callable[..., Interval]] = {
    operator.add: _sum,
    operator.sub: lambda x, y: _sum(x, _negative(y)),
    operator.mul: _product,
    operator.truediv: _rounded_ends(torch.div),
    torch.pow: _rounded_ends(torch.pow),
    operator.neg: _negative,
    sqrt: _rising(torch.sqrt),
    torch.exp: _rising(torch.exp),
    torch.log: _rising(torch.log),
    torch.abs: lambda x: Interval(*magnitude(x[:2])),
    torch.sign: _both(torch.sign),
    capped: _both(capped),
    torch.maximum: _both(torch.maximum),
    torch.minimum: _both(torch.minimum),
    torch.logical_or: _both(torch.logical_or),
    torch.logical_and: _both(torch.logical_and),
    torch.logical_not: lambda x: Interval(~x.high, ~x.low),
    torch.where: _choice,
    operator.eq: _equal,
    operator.ne: lambda x, y: Interval(~_equal(x, y).high, ~_equal(x, y).low),
    operator.gt: lambda x, y: Interval(x.low > y.high, x.high > y.low),
    operator.ge: lambda x, y: Interval(x.low >= y.high, x.high >= y.low),
    operator.lt: lambda x, y: Interval(x.high < y.low, x.low < y.high),
    operator.le: lambda x, y: Interval(x.high <= y.low, x.low <= y.high),
}


def _drop(node: fx.Node) -> None:
    (value, _) = node.args
    assert isinstance(value, fx.Node)
    node.replace_all_uses_with(value)
    node.graph.erase_node(node)


def _swap(node: fx.Node) -> None:
    node.args = node.args[::-1]


def without_rounding(update: Update) -> Iterator[tuple[str, Update]]:
    """For each `round_to`: what the node is called, and the update without it."""
    for i, node in enumerate(update.graph.graph.nodes):
        if node.target is round_to:
            yield node.name, edited(update, i, _drop)


def with_swapped_operands(update: Update) -> Iterator[tuple[str, Update]]:
    """For each subtraction: what the node is called, and the update with its operands swapped."""
    for i, node in enumerate(update.graph.graph.nodes):
        if node.target is operator.sub:
            yield node.name, edited(update, i, _swap)


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
