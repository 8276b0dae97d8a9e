"""Functions and pairs of fp32 numbers against exact values; words of NaN, and of states that begin as constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
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
from collage_neuron.numerics.formats import FORMATS, format_named
from collage_neuron.numerics.fp32_pairs import Pair, corrected, folded, over, square_root
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.states import word_encoding

# --- functions in explicit-rounding form against float64, and against torch's on special values, on each CPU backend --

# And rules of special values, which have the bits of torch's operations.

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


# --- pairs of fp32 numbers: sums, quotients and roots are as near to the exact ones as is said ------------------------


def numbers(size: int, spread: int) -> Tensor:
    g = torch.Generator().manual_seed(size)
    return torch.randn(size, generator=g) * torch.randint(-spread, spread + 1, (size,), generator=g).float().exp2()


def exact(x: Pair) -> Fraction:
    return Fraction(float(x.hi)) + Fraction(float(x.lo))


def test_a_fold_is_within_its_bound() -> None:
    """2 * d**2 * 2**-48 of the sum of magnitudes; what cancels is no exception."""
    for size in (1, 2, 3, 1000, 5000):
        for spread in (0, 12, 40):
            x = numbers(size, spread)
            x = torch.cat([x, -x[: size // 2]])
            d = (len(x) - 1).bit_length()
            terms = [Fraction(t) for t in x.tolist()]
            assert abs(exact(folded(x)) - sum(terms)) <= 2 * d * d * Fraction(2) ** -48 * sum(map(abs, terms))


def test_quotients() -> None:
    x = numbers(1000, 20)
    low = x * numbers(1000, 0).clamp(-1, 1) * 2.0**-25
    for n in (1, 3, 7 << 20, 2**31 - 1):
        found = over(Pair(x, low), n)
        right = (x.double() + low.double()) / n
        assert ((found.hi.double() + found.lo.double() - right).abs() <= 2.0**-44 * right.abs()).all()


def test_roots_that_a_device_approximates() -> None:
    """Off by two ulps to either side, a root is corrected to 2**-43; that of one fp32 number has its bits."""
    x = numbers(100000, 15).abs() + 1e-6
    right = x.double().sqrt()
    for toward in (0.0, torch.inf):
        near = x.sqrt()
        for _ in range(2):
            near = near.nextafter(torch.full_like(near, toward))
        found = corrected(near, Pair(x, torch.zeros_like(x)))
        assert ((found.hi.double() + found.lo.double() - right).abs() <= 2.0**-43 * right).all()
    assert torch.equal(square_root(x), right.float())


# --- what docs/development/formats.md promises of a NaN: it is stored and read as one whatever its further words hold -

NANS = torch.tensor(
    [s << 31 | 0x7F800000 | n for s in (0, 1) for n in (1, 0x8000, 0xFFFF, 0x10000, 0x400000, 0x7FFFFF)]
)
HIGH = torch.tensor([s << 15 | 0x7F80 | n for s in (0, 1) for n in range(1, 0x80)]).to(torch.int16)
"""Every NaN of bf16."""


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_is_stored_as_one(name: str) -> None:
    fmt = FORMATS[name]
    values = torch.ones(NANS.numel(), 128)
    values[:, 77] = NANS.to(torch.int32).view(torch.float32)
    stored = word_encoding.encode(fmt, "param", values)
    read = word_encoding.decode(fmt, stored)
    if fmt.is_coded:
        assert not stored[1].isfinite().any()
        assert read.isnan().all(), "the whole block is lost"
    else:
        assert stored[0][:, 77].isnan().all()
        assert read[:, 77].isnan().all()
        assert read.isnan().sum() == NANS.numel()


@pytest.mark.parametrize("name", [n for n, f in FORMATS.items() if len(f.components) > 1 and not f.is_coded])
def test_words_beside_a_nan_say_nothing(name: str) -> None:
    """Integers are added to the bits, so that their ends are enough; of floats, all of bf16 and their neighbours."""
    low = FORMATS[name].components[1].type.dtype
    if low.is_floating_point:
        every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).to(low)
    else:
        ends = torch.iinfo(low)
        every = torch.tensor([ends.min, ends.min + 1, -1, 0, 1, ends.max - 1, ends.max]).to(low)
    high = HIGH.view(torch.bfloat16)[:, None].expand(-1, every.numel())
    assert word_encoding.decode(FORMATS[name], [high, every.expand(HIGH.numel(), -1)]).isnan().all()


# --- the words of states that begin as constants, and of large tensors, are those of the values, encoded as a whole ---


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def assert_same_words(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype, one.is_contiguous()) == (other.shape, other.dtype, True)
        assert torch.equal(bits(one), bits(other))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(5,), (3, 70), (2, 3, 40), (0, 4), (4, 0), (2, 257)])
@pytest.mark.parametrize("fill", [0.0, -0.0, 1.0, 0.1, 1e-30, 3e4, -0.1])
def test_a_constant_has_the_words_of_a_full_tensor(name: str, shape: tuple[int, ...], fill: float) -> None:
    fmt = FORMATS[name]
    if fill < 0 and not fmt.signed:
        pytest.skip("it has no sign")
    wanted = word_encoding.settled(fmt, "s", torch.full(shape, fill))
    assert_same_words(word_encoding.settled_constant(fmt, "s", fill, shape), wanted)


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if not fmt.is_coded])
def test_a_large_tensor_is_encoded_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(word_encoding, "_AT_ONCE", 100)
    x = torch.randn(7, 43, generator=torch.Generator().manual_seed(0)) * 3
    for values in (x, x.T, x[:, ::2], x[:1, :1]):
        wanted = word_encoding.encode(
            FORMATS[name], "s", word_encoding.decode(FORMATS[name], word_encoding.encode(FORMATS[name], "s", values))
        )
        found = word_encoding.settled(FORMATS[name], "s", values)
        assert all(torch.equal(bits(one), bits(other)) for one, other in zip(found, wanted, strict=True))
