"""Generated NKI kernels do the arithmetic of the graph bit for bit, on the stand-in (evidence level: stand-in).

What Trainium only approximates is divided out: the stand-in's reciprocal and square root are exact here, and the
reference backend evaluates the graph with a product with a reciprocal for each quotient.
"""

from __future__ import annotations

from functools import cache

import pytest
from nki_runs import Step, differing, narrowed, run, step_of
from torch_cases import CASES

from collage_neuron.passes.backends.nki.lint import lint
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki

pytestmark = pytest.mark.usefixtures("short_search")

TARGETS = ("trn1", "trn2", "trn3")
STRATEGIES = ("bf16", "light", "plus", "full", "fp32_states", "fp32")
PAPERS = ("bf16", "light", "plus", "full")
"""Strategies that bf16 arithmetic can work on."""

PAIRS = [(s, "fp32") for s in STRATEGIES] + [(s, "bf16") for s in PAPERS]
MEASURED = [name for name, case in CASES.items() if case.measured]


@cache
def step(name: str, strategy: str, arithmetic: str) -> Step:
    return step_of(CASES[name], strategy, arithmetic)


@cache
def kernel(name: str, strategy: str, arithmetic: str, target: str) -> Kernel:
    return lower_to_nki(step(name, strategy, arithmetic).update, target)


def check(name: str, strategy: str, arithmetic: str, target: str) -> None:
    given, k = step(name, strategy, arithmetic), kernel(name, strategy, arithmetic, target)
    assert lint(k.source, k.name) == []
    found = run(k, given.components, given.vector).results
    wanted = given.by_reciprocals().expected()
    unchanged = wanted.keys() - found.keys()
    assert not differing(found, wanted)
    assert not differing({k: given.components[k] for k in unchanged}, wanted)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("strategy", "arithmetic"), PAIRS)
def test_adamw_in_every_strategy_and_arithmetic(strategy: str, arithmetic: str, target: str) -> None:
    check("adamw", strategy, arithmetic, target)


@pytest.mark.parametrize("name", [n for n in MEASURED if n != "adamw"])
def test_every_optimizer_of_torch(name: str) -> None:
    for (strategy, arithmetic), target in zip((("plus", "fp32"), ("full", "bf16")), TARGETS, strict=False):
        check(name, strategy, arithmetic, target)


SMALL = 4
"""Columns of a tile in the tests of sizes; a chunk has 3, so that chunks have a rest too."""


SIZES = [1, 127, 128, 129, 128 * SMALL - 1, 128 * SMALL, 128 * SMALL + 1, 128 * 3 * SMALL + 77]


def check_size(k: Kernel, given: Step, n: int) -> None:
    """The kernel with small tiles, on n elements."""
    components = {key: x.repeat(-(-n // x.numel()))[:n] for key, x in given.components.items()}
    found = run(k, components, given.vector, cut=narrowed(k, (n,), SMALL, SMALL - 1)).results
    assert not differing(found, given.by_reciprocals()._replace(components=components).expected())


@pytest.mark.parametrize("dialect", ["nki", "beta1"])
@pytest.mark.parametrize("n", SIZES)
def test_every_size(n: int, dialect: str) -> None:
    k = kernel("adamw", "plus", "fp32", "trn1").in_dialect(dialect)
    check_size(k, step("adamw", "plus", "fp32"), n)


@pytest.mark.parametrize("dialect", ["nki", "beta1"])
@pytest.mark.parametrize(("strategy", "arithmetic"), PAIRS)
def test_sizes_in_every_strategy_and_arithmetic(strategy: str, arithmetic: str, dialect: str) -> None:
    k = kernel("adamw", strategy, arithmetic, "trn1").in_dialect(dialect)
    assert lint(k.source, k.name, dialect) == []
    for n in (1, SIZES[-1]):
        check_size(k, step("adamw", strategy, arithmetic), n)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2047 * 128, 2048 * 128, 2049 * 128, (1 << 20) + 13])
def test_every_size_with_the_tiles_of_a_device(n: int) -> None:
    given = step("adamw", "plus", "fp32")
    components = {k: v.repeat(-(-n // v.numel()))[:n] for k, v in given.components.items()}
    found = run(kernel("adamw", "plus", "fp32", "trn1"), components, given.vector)
    assert not differing(found.results, given.by_reciprocals()._replace(components=components).expected())
    assert found.machine.trace.hbm_read == 12 * n + 4 * 128 * 9
    assert found.machine.trace.hbm_written == 10 * n
