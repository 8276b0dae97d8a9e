"""The reference and the XLA backend do the same arithmetic: the same bits, but for what is named here.

Named, for XLA on the CPU:

* FMA contraction: fp32 `x + s * y` may be computed with one rounding in place of two. It needs an instruction set with
  FMA; without one (`--xla_cpu_max_isa=AVX`) this is gone: a process of its own compares all bits.
* `a / sqrt(b)` becomes `a * rsqrt(b)`, with an approximate rsqrt; exp, log and pow are each backend's own.
* `sign` of NaN is NaN, where torch says 0.
* Results below 2**-126 are flushed to 0.
"""

from __future__ import annotations

import itertools
import operator
import platform
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import instrumented
import pytest
import torch
from exact import ULPS, on_reference, on_xla, rounded, ulps_apart, update_of
from models import MODES
from one_operation import ONE_OP, SLOT, captured, op
from sampling import part
from updates import OPTIMIZERS, SPLIT, N, Tensors, random_inputs, rewritten, whole_update
from worlds import run_script

from collage_neuron.numerics.eft import (
    OPERATIONS,
    beyond,
    block_max,
    capped,
    inverse_power_of_two,
    limit_places,
    places,
    power_of_two,
    round_to,
    sqrt,
)
from collage_neuron.numerics.formats import format_named
from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.passes.backends import reference
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.ir.update import Update

pytest.importorskip("torch_xla")


def same(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Where two results are the same number, or both NaN."""
    return (x == y) | (x.isnan() & y.isnan())


def all_same(xs: Tensors, ys: Tensors) -> bool:
    return all(bool(same(x, y).all()) for x, y in zip(xs, ys, strict=True))


# Whole updates -----------------------------------------------------------------------------------------------------


CASES = [(name, s, a) for name in OPTIMIZERS for s in ("bf16", "plus", "full") for a in ("fp32", "bf16")]
CASES += [(name, "fp32", "fp32") for name in OPTIMIZERS]


def both_of(name: str, strategy: StrategyLike, arithmetic: str, *shape_and_gradient: Any) -> tuple[Tensors, Tensors]:
    """What both backends make of an update."""
    update, scalars = whole_update(name, strategy, arithmetic)
    inputs = random_inputs(update, *shape_and_gradient)
    return on_reference(update, inputs, scalars), on_xla(update, inputs, scalars)


@pytest.mark.parametrize(("name", "strategy", "arithmetic"), CASES)
def test_a_whole_update_is_as_good_as_the_same(name: str, strategy: str, arithmetic: str) -> None:
    """A contraction moves a word by a place of its own; low words, which belong to the others, are compared without."""
    update, _ = whole_update(name, strategy, arithmetic)
    for key, x, y in zip(update.outputs, *both_of(name, strategy, arithmetic), strict=True):
        if not key.endswith("_lo"):
            rtol, largest = 2**-7 if x.dtype == torch.bfloat16 else 2**-18, float(x.abs().max())
            torch.testing.assert_close(y, x, rtol=rtol, atol=2**-20 * largest)


@pytest.mark.parametrize("name", ["adamw", "amsgrad", "sgd"])
def test_in_the_papers_arithmetic_with_all_states_expansions_all_bits_are_the_same(name: str) -> None:
    """Every product is rounded to bf16 before it meets a sum: there is nothing to contract.

    And sqrt of a bf16 number is further than 2**-18 of itself from where its rounding to bf16 turns: x and the square
    of a 9-bit number differ by at least one unit of their 18 bits. torch's ulp of fp32 is too little to cross.
    """
    assert all_same(*both_of(name, "full", "bf16"))


# Rules one by one --------------------------------------------------------------------------------------------------

POWERS = {
    "power": op(torch.ops.aten.pow.Tensor_Scalar, "x", 0.75),
    "power_1": op(torch.ops.aten.pow.Tensor_Scalar, "x", 1),
    "power_half": op(torch.ops.aten.pow.Tensor_Scalar, "x", 0.5),
    "power_minus_half": op(torch.ops.aten.pow.Tensor_Scalar, "x", -0.5),
    "power_minus_1": op(torch.ops.aten.pow.Tensor_Scalar, "x", -1),
}
RULE_BODIES = {**ONE_OP, **POWERS}
FORMATS = [("fp32", "fp32"), ("bf16", "bf16x2")]  # where nothing is hidden by a store; where there are pairs


def rule_update(name: str, arithmetic: str, state: str) -> tuple[Update, torch.Tensor]:
    formats = {"param": format_named("bf16"), "state": format_named(state)}
    update = rewritten(captured(RULE_BODIES[name]), formats, arithmetic)
    return update, torch.tensor(update.scalars.run([SLOT]), dtype=torch.float32)


def wide_inputs(update: Update, largest: float = 2.0**20) -> Tensors:
    """Both signs, magnitudes over 24 binades, and no zeros: those are with the other special values, below."""
    g = torch.Generator().manual_seed(1)
    components: dict[str, torch.Tensor] = {}
    for name, fmt in {**update.formats, "grad": format_named("bf16")}.items():
        x = torch.randn(N, generator=g) * torch.exp2(torch.randint(-12, 13, (N,), generator=g).float())
        x = torch.where(x == 0, 1.0, x).clamp(-largest, largest)
        components |= dict(zip(fmt.keys(name), fmt.encode(x), strict=True))
    return [components[key] for key in update.inputs]


LARGEST = {"exp": 80.0, "sigmoid": 80.0, "softplus": 40.0}
"""Where exp, which overflows at 88, is computed of more than these."""


INEXACT = frozenset({"rsqrt", "power_minus_half", "exp", "sigmoid", "log", "power", "softplus"})
"""Rules whose results are made of functions of a backend's own: of some ulps each."""


@pytest.mark.parametrize("name", sorted(INEXACT))
def test_a_rule_of_functions_is_a_few_ulps_off(name: str) -> None:
    update, scalars = rule_update(name, "fp32", "fp32")
    inputs = wide_inputs(update, LARGEST.get(name, 2.0**20))
    for x, y in zip(on_reference(update, inputs, scalars), on_xla(update, inputs, scalars), strict=True):
        assert ulps_apart(x.float(), y.float()) <= 16


# Operations one by one ---------------------------------------------------------------------------------------------

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "lt": lambda x, y: torch.where(x < y, x, y),
    "le": lambda x, y: torch.where(x <= y, x, y),
    "gt": lambda x, y: torch.where(x > y, x, y),
    "ge": lambda x, y: torch.where(x >= y, x, y),
    "eq": lambda x, y: torch.where(x == y, x, -1.0 * y),
    "ne": lambda x, y: torch.where(x != y, x, -1.0 * y),
    "or": lambda x, y: torch.where(torch.logical_or(x > y, x > -1.0 * y), x, y),
    "and": lambda x, y: torch.where(torch.logical_and(x > y, x > -1.0 * y), x, y),
    "not": lambda x, y: torch.where(torch.logical_not(x > y), x, y),
    "neg": lambda x, y: -x,
    "abs": lambda x, y: torch.abs(x),
    "sign": lambda x, y: torch.sign(x),
    "sqrt": lambda x, y: sqrt(x),
    "exp": lambda x, y: torch.exp(x),
    "log": lambda x, y: torch.log(x),
    "pow": lambda x, y: torch.pow(x, 0.75),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "capped": lambda x, y: capped(x),
    "power_of_two": lambda x, y: power_of_two(x),
    "inverse_power_of_two": lambda x, y: inverse_power_of_two(x),
    "places": lambda x, y: places(x),
    "limit_places": lambda x, y: limit_places(x, 20000),
    "beyond": lambda x, y: beyond(round_to(x, "bf16"), places(y)),
    "block_max": lambda x, y: block_max(x, 128),
}
SPECIAL = torch.tensor([0.0, 1.0, 2.5, 2.0**126, float("inf")])
SPECIAL = torch.cat([SPECIAL, -SPECIAL, torch.tensor([float("nan")])])


def special_pairs() -> Tensors:
    """Every pair of special values, and random numbers after them."""
    g = torch.Generator().manual_seed(2)
    x, y = torch.cartesian_prod(SPECIAL, SPECIAL).unbind(1)
    return [torch.cat([v, torch.randn(N, generator=g)]) for v in (x, y)]


def test_every_operation_is_exercised() -> None:
    """All but round_to, widen and narrow, which tests/numerics/test_eft.py runs over all their inputs."""
    update = update_of(("x", "y"), lambda x, y: [f(x, y) for f in BINARY.values()])
    assert {n.target for n in update.graph.graph.nodes} >= OPERATIONS - {round_to}


@cache
def results() -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Of each operation, by one program."""
    update = update_of(("x", "y"), lambda x, y: [f(x, y) for f in BINARY.values()])
    found = zip(on_reference(update, special_pairs()), on_xla(update, special_pairs()), strict=True)
    return dict(zip(BINARY, found, strict=True))


def both(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    return results()[name]


@pytest.mark.parametrize("name", sorted(BINARY.keys() - {"exp", "log", "pow", "sign"}))
def test_an_operation_gives_the_same_bits_also_for_special_values(name: str) -> None:
    expected, found = both(name)
    assert same(expected, found).all()
    if name in ("maximum", "minimum"):  # of two zeros either may be the larger
        return
    zeros = (expected == 0) & (found == 0)
    assert torch.equal(expected[zeros].signbit(), found[zeros].signbit())


def test_square_roots_are_correctly_rounded_on_both() -> None:
    x = special_pairs()[0].double()
    finite = x.isfinite() & (x >= 0)
    right = rounded(x[finite].sqrt(), 24).float()  # float64 rounds innocuously: 53 >= 2 * 24 + 2
    assert all(torch.equal(result[finite], right) for result in both("sqrt"))


@pytest.mark.parametrize("name", ["exp", "log", "pow"])
def test_a_function_is_a_few_ulps_off_on_either(name: str) -> None:
    expected, found = both(name)
    right = BINARY[name](special_pairs()[0].double(), None).float()
    ulps = ULPS[getattr(torch, name)]
    assert ulps_apart(expected, right) <= ulps
    assert ulps_apart(found, right) <= ulps


def test_sign_of_nan_is_nan_on_xla_and_zero_in_torch() -> None:
    expected, found = both("sign")
    nan = special_pairs()[0].isnan()
    assert same(expected, found)[~nan].all()
    assert found[nan].isnan().all()
    assert (expected[nan] == 0).all()


def test_xla_flushes_what_is_below_the_smallest_normal_number() -> None:
    update = update_of(("x", "y"), lambda x, y: [x * y])
    x = torch.full((4,), 2.0**-70)
    y = torch.tensor([2.0**-56, 2.0**-57, -(2.0**-60), 2.0**-90])
    assert on_xla(update, [x, y])[0].tolist() == [2.0**-126, 0.0, 0.0, 0.0]
    assert on_reference(update, [x, y])[0].tolist() == [2.0**-126, 2.0**-127, -(2.0**-130), 0.0]


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), ()])
def test_the_reference_backend_may_take_a_parameter_in_pieces(shape: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    update, scalars = whole_update("adamw", "plus", "bf16")
    g = torch.Generator().manual_seed(4)
    inputs = [
        torch.rand(shape, generator=g).bfloat16().mT if len(shape) > 1 else torch.rand(shape, generator=g)
        for _ in update.inputs
    ]
    whole = ReferenceUpdate(update)(inputs, scalars)
    monkeypatch.setattr(reference, "CHUNK", 4)
    pieces = ReferenceUpdate(update)(inputs, scalars)
    assert [p.shape for p in pieces] == [inputs[0].shape] * len(whole)
    assert all(map(torch.equal, pieces, whole))


# Without FMA -------------------------------------------------------------------------------------------------------


KINDS = list(itertools.product([(), (1,), (3, 5, 7)], ["bf16", "fp32"]))
"""Shapes, and formats of the gradient."""


def different_without_contraction() -> Iterator[str]:
    """Names of the updates and rules for which the backends differ in a bit."""
    updates: list[tuple[Any, ...]] = [*part(CASES, 8), *(("adamw", "plus", "fp32", *kind) for kind in part(KINDS, 2))]
    blocks = (23, 300)  # whole ones, and a shorter one in each row
    updates += [(name, s, "fp32", blocks) for name, s in part(itertools.product(OPTIMIZERS, SPLIT), 20)]
    yield from (" ".join(map(str, case)) for case in updates if not all_same(*both_of(*case)))
    for name in part(sorted(RULE_BODIES.keys() - INEXACT), 3):
        for arithmetic, state in part(FORMATS, 2, name):
            update, scalars = rule_update(name, arithmetic, state)
            inputs = wide_inputs(update)
            if not all_same(on_reference(update, inputs, scalars), on_xla(update, inputs, scalars)):
                yield name
    yield from measured_otherwise()


def measured_otherwise() -> Iterator[str]:
    """Those of which XLA counts something else than the reference, or adds it up to another sum."""
    for name, (strategy, arithmetic) in [*part(itertools.product(OPTIMIZERS, MODES), 24), ("adamw", ("plus", "fp32"))]:
        u = instrumented.updates(name, strategy, arithmetic)
        for shape in ((64, 192), (0,), (), (2 * 50257,)) if strategy == "plus" else ((64, 192),):
            inputs = random_inputs(u.measured, shape)
            wanted = instrumented.check_on_reference(u, inputs)
            sums, counts = on_xla(u.measured, inputs, u.scalars)[len(u.measured.outputs) :]
            off = [abs(x - wanted.sums[key]) for key, x in zip(u.measured.sums, sums.tolist(), strict=True)]
            near = [x <= 2**-18 * wanted.magnitudes[key] + 2**-120 for key, x in zip(u.measured.sums, off, strict=True)]
            if counts.tolist() != [wanted.counts[key] for key in u.measured.counts] or not all(near):
                yield f"measured {name} {strategy} {arithmetic} {shape}"


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="AVX is an instruction set of x86")
def test_without_fma_every_update_and_rule_gives_the_same_bits(tmp_path: Path) -> None:
    flags = {"XLA_FLAGS": "--xla_cpu_max_isa=AVX"}
    assert run_script(tmp_path, Path(__file__).read_text(), environ=flags) == "different: []\n"


if __name__ == "__main__":
    print(f"different: {list(different_without_contraction())}")
