"""A weight that several ranks hold, tied across pipeline stages or duplicated by tensor parallelism, stays one."""

from __future__ import annotations

from pathlib import Path

import torch
from tied_runs import all_of_them
from worlds import run_world

ROUNDED_TO_NEAREST = ("bf16", "plus", "full", "fp32_states", "split433", "split423")
DRAWN = ("stochastic", "split422")


def test_ranks_that_take_the_same_gradient_hold_the_same_bits(tmp_path: Path) -> None:
    """Whatever else a rank holds, and in which order; where words are drawn, if the weight's place is the same.

    Draws depend on the place of a parameter in its optimizer, so that a weight that is first on one rank and last on
    another is drawn differently: docs/neuron_libraries.md says so.
    """
    cases = [(s, False) for s in (*ROUNDED_TO_NEAREST, *DRAWN)] + [(s, True) for s in DRAWN]
    first, *others = run_world(2, tmp_path, all_of_them, cases)
    for other in others:
        for strategy, same_place in cases:
            a, b = (found[strategy, same_place] for found in (first, other))
            assert a.keys() == b.keys()
            alike = all(torch.equal(a[k], b[k]) for k in a)
            assert alike is (same_place or strategy in ROUNDED_TO_NEAREST), (strategy, same_place)
