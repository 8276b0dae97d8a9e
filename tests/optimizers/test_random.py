"""Random elementwise optimizers: each within its derived bound on both backends, or refused in words.

The bound of each element is derived operation by operation while the optimizer itself runs in float64
(tests/support/bounds.py), so that it follows the program: what it divides by, where a mask is undecided, which state is
stored in which format.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from functools import cache, partial
from statistics import median
from typing import Any

import pytest
import torch
from agreement import Agreement, compare
from hypothesis import HealthCheck, Phase, given, settings
from random_optimizers import Program, RandomOptimizer, programs
from sampling import WHOLE

from collage_neuron.errors import UnsupportedUpdate

pytestmark = pytest.mark.usefixtures("rejecting")

aten = torch.ops.aten

COUNT = 200 if WHOLE else 100
EVERY = 1 if WHOLE else 2
"""Of the programs that can be rewritten so many are left out: every second one is run."""
ON_XLA = 4 if WHOLE else 10  # each tenth
STEPS = 3

SETTINGS = [
    ("full", "fp32"), ("plus", "fp32"), ("light", "fp32"), ("fp32", "fp32"), ("fp32_states", "fp32"), ("bf16", "fp32"),
    ("full", "bf16"), ("plus", "bf16"), ("bf16", "bf16"),
]  # fmt: skip
"""Strategy and arithmetic; an example takes the one that its program hashes to."""

REFUSALS = {
    "erfinv": r"aten\.erfinv\.default \(node \w+\), which has no rule",
    "std": r"not elementwise: aten\.std\.correction",
    "norm": r"not elementwise: aten\.linalg_vector_norm\.default",
    "item": r"reads a tensor's value back into Python",
    "cumsum": r"aten\.cumsum\.default \(node \w+\), which has no rule",
    "randn": r"aten\.randn_like\.default \(node \w+\), which has no rule",
    "sort": r"aten\.sort\.default \(node \w+\), which has no rule",
    "slice": r"not elementwise: aten\.slice\.Tensor",
    "int": r"makes a tensor of torch\.int32",
}
"""What the refusal of an operation says that no elementwise rule can have, or that has none."""


@cache
def drawn() -> tuple[Program, ...]:
    """Of COUNT different programs, the same each time, those that are refused and one of EVERY other."""
    found: dict[Program, None] = {}

    @settings(
        max_examples=2 * COUNT, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(programs())
    def collect(program: Program) -> None:
        found[program] = None

    collect()
    assert len(found) >= COUNT
    return tuple(p for i, p in enumerate(list(found)[:COUNT]) if i % EVERY == 0 or refusal_of(p))


def setting_of(program: Program) -> tuple[str, str]:
    return SETTINGS[zlib.crc32(repr(program).encode()) % len(SETTINGS)]


def refusal_of(program: Program) -> str | None:
    """What the message must say if the program cannot be rewritten."""
    return REFUSALS.get(program.update[0]) if isinstance(program.update, tuple) else None


def check(program: Program, device: str | torch.device = "cpu") -> Agreement | None:
    """The agreement of the compiled optimizer with itself in float64; None if it is refused, as it must be."""
    strategy, arithmetic = setting_of(program)
    expected = refusal_of(program)
    found, refusal = None, ""
    try:
        found = compare(partial(RandomOptimizer, program=program), strategy, arithmetic, device, STEPS)
    except UnsupportedUpdate as error:
        refusal = str(error)
    except AssertionError as error:
        raise AssertionError(f"{program}, {strategy} in {arithmetic} arithmetic: {error}") from error
    assert bool(refusal) == (expected is not None), f"{program}: {refusal or 'was accepted'}"
    assert re.search(expected or "", refusal), f"{program} was refused for another reason: {refusal}"
    return found


@cache
def on_reference() -> dict[Program, Agreement | None]:
    return {program: check(program) for program in drawn()}


@pytest.mark.slow
def test_programs_agree_with_float64_or_are_refused_for_their_reason() -> None:
    refused = [program for program, found in on_reference().items() if found is None]
    assert len(on_reference()) >= COUNT // EVERY
    assert COUNT // 40 <= len(refused) <= COUNT // 5


def test_they_are_of_many_kinds() -> None:
    accepted = [program for program, found in on_reference().items() if found is not None]
    assert {setting_of(program) for program in accepted} == set(SETTINGS)
    for kinds, least in (
        (Counter(p.apply for p in accepted), 8),
        (Counter(p.rate for p in accepted), 5),
        (Counter(p.weight_decay[0] for p in accepted), 5),
        (Counter(kind for p in accepted for kind, *_ in p.states), 9),
        (Counter(spelling for p in accepted for _, spelling, *_ in p.states), 4),
        (Counter(str(len(p.states)) for p in accepted), 4),
        (Counter(o for p in accepted for o in operations(p)), 20),
    ):
        assert len([kind for kind, n in kinds.items() if n >= COUNT // (100 * EVERY)]) >= least - (EVERY > 1), kinds


def operations(program: Program) -> list[str]:
    """The operations of a program's expressions."""

    def of(e: Any) -> list[str]:
        return [e[0], *(name for x in e[1:] for name in of(x))] if isinstance(e, tuple) else []

    return [*of(program.direction), *of(program.update)]


@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
def test_the_bounds_say_something(arithmetic: str) -> None:
    """Where parameters are pairs, a bound is a small part of what the parameter moved in STEPS steps."""
    found = [f for p, f in on_reference().items()
             if f is not None and setting_of(p)[1] == arithmetic and f.formats["param"] == {"bf16x2"}]  # fmt: skip
    assert len(found) >= COUNT // (7 * EVERY)
    assert median(f.looseness for f in found) < {"fp32": 0.01, "bf16": 0.2}[arithmetic]
    assert sum(f.looseness < 1 for f in found) >= 0.9 * len(found)
    assert sum(f.unbounded > 0.01 for f in found) <= max(1, 0.03 * len(found))


@pytest.mark.slow
def test_the_same_on_xla(xla: torch.device) -> None:
    """The same bounds: they leave room for XLA's own division, square root and functions. XLA compiles for seconds."""
    found = {program: check(program, xla) for program in drawn()[::ON_XLA]}
    assert sum(f is not None for f in found.values()) >= COUNT // (EVERY * ON_XLA) * 4 // 5
