"""Random elementwise optimizers: each near its own float64 run on both backends, or refused in words."""

from __future__ import annotations

import re
import zlib
from functools import cache, partial

import pytest
import torch
from agreement import Agreement, compare
from hypothesis import HealthCheck, Phase, given, settings
from random_optimizers import Program, RandomOptimizer, programs
from sampling import WHOLE

from collage_neuron.errors import UnsupportedUpdate

pytestmark = pytest.mark.usefixtures("rejecting")

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

FARTHEST = {("bf16x2", "fp32"): 2**-8, ("bf16x2", "bf16"): 2**-6, ("bf16+fp32", "fp32"): 2**-14}
"""Errors at the median element, as fractions of the way, by format of the parameter; one word may lose all of it."""

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
    if found is not None:
        (fmt,) = found.formats["param"]
        assert found.error <= FARTHEST.get((fmt, arithmetic), 1.0), program
    return found


@pytest.mark.slow
def test_programs_agree_with_float64_or_are_refused_for_their_reason() -> None:
    refused = [program for program in drawn() if check(program) is None]
    assert len(drawn()) >= COUNT // EVERY
    assert COUNT // 40 <= len(refused) <= COUNT // 5


@pytest.mark.slow
def test_the_same_on_xla(xla: torch.device) -> None:
    """XLA compiles for seconds."""
    found = {program: check(program, xla) for program in drawn()[::ON_XLA]}
    assert sum(f is not None for f in found.values()) >= COUNT // (EVERY * ON_XLA) * 4 // 5
