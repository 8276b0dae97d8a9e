"""Generated NKI kernels do the arithmetic of the graph bit for bit, on the stand-in (evidence level: stand-in).

What Trainium only approximates is divided out: the stand-in's reciprocal and square root are exact here, and the
reference backend evaluates the graph with a product with a reciprocal for each quotient.
"""

from __future__ import annotations

from functools import cache

import pytest
from nki_runs import Step, differing, run, step_of, wild
from sampling import part
from torch_cases import CASES

from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki

pytestmark = pytest.mark.usefixtures("short_search")

TARGETS = ("trn1", "trn2", "trn3")
PAIRS = [("plus", "fp32"), *((s, "bf16") for s in ("bf16", "light", "plus", "full"))]
"""Strategies that bf16 arithmetic can work on; `test_two_cores.py` has all of them in fp32 arithmetic."""

MEASURED = [name for name, case in CASES.items() if case.measured]


@cache
def step(name: str, strategy: str, arithmetic: str) -> Step:
    return step_of(CASES[name], strategy, arithmetic)


@cache
def kernel(name: str, strategy: str, arithmetic: str, target: str) -> Kernel:
    return lower_to_nki(step(name, strategy, arithmetic).update, target)


def check(name: str, strategy: str, arithmetic: str, target: str) -> None:
    given, k = step(name, strategy, arithmetic), kernel(name, strategy, arithmetic, target)
    found = run(k, given.components, given.vector).results
    wanted = given.by_reciprocals().expected()
    unchanged = wanted.keys() - found.keys()
    assert not differing(found, wanted)
    assert not differing({k: given.components[k] for k in unchanged}, wanted)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("strategy", "arithmetic"), PAIRS)
def test_adamw_in_both_arithmetics(strategy: str, arithmetic: str, target: str) -> None:
    check("adamw", strategy, arithmetic, target)


@pytest.mark.parametrize("name", part((n for n in MEASURED if n != "adamw"), 4))
def test_every_optimizer_of_torch(name: str) -> None:
    for strategy, arithmetic, target in part([("plus", "fp32", "trn1"), ("full", "bf16", "trn2")], 2, name):
        check(name, strategy, arithmetic, target)


@pytest.mark.parametrize(("strategy", "arithmetic"), [("plus", "fp32"), ("plus", "bf16")])
def test_numbers_of_all_magnitudes(strategy: str, arithmetic: str) -> None:
    """No precondition of an error-free transform holds everywhere, so that next to no rounding changes nothing."""
    given = wild(step("adamw", strategy, arithmetic))
    found = run(kernel("adamw", strategy, arithmetic, "trn1"), given.components, given.vector).results
    assert not differing(found, given.by_reciprocals().expected())


@pytest.mark.slow
@pytest.mark.parametrize("n", [2049 * 128, (1 << 20) + 13])
def test_every_size_with_the_tiles_of_a_device(n: int) -> None:
    given = step("adamw", "plus", "fp32").of_size(n)
    found = run(kernel("adamw", "plus", "fp32", "trn1"), given.components, given.vector)
    assert not differing(found.results, given.by_reciprocals().expected())
    assert found.machine.trace.hbm_read == 12 * n + 4 * 128 * 9
    assert found.machine.trace.hbm_written == 10 * n
