"""Kernels of the older dialect, read a second time: by `beta1_reading`, which shares nothing with the stand-in.

`test_two_cores.py` has AdamW under every strategy in fp32 arithmetic, what is drawn and words of blocks.

Both readers were written from the documentation; where they and the reference backend agree bit for bit, a mistake in
one of them would have to be in all. Evidence level: independent interpreter. Roots and reciprocals are exact here.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from beta1_reading import decoded, encoded
from nki_runs import Step, differing, narrowed, run, step_of, wild
from second_reader import results
from torch_cases import CASES

from collage_neuron.numerics.strategies import StrategyLike
from collage_neuron.passes.backends.nki.chunk_totals import measure_of
from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki

pytestmark = pytest.mark.usefixtures("short_search")


@cache
def kernel(s: Step) -> Kernel:
    return lower_to_nki(s.update, "trn1", "beta1")


class _Step(Step):
    """A step that is a key: updates are compared by identity."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@cache
def step(case: str, strategy: str, arithmetic: str = "fp32", measured: bool = False) -> Step:
    return _Step(*wild(step_of(CASES[case], strategy, arithmetic, measured=measured), n=900))


KERNELS: list[tuple[str, StrategyLike, str]] = [
    *(("adamw", s, "bf16") for s in ("light", "plus", "full")),
    *((case, "plus", "fp32") for case in ("sgd_momentum", "adamax", "rprop", "radam", "nadam", "asgd")),
]


@pytest.mark.parametrize(("case", "strategy", "arithmetic"), KERNELS)
def test_the_second_reader_gets_the_bits_of_the_reference(case: str, strategy: str, arithmetic: str) -> None:
    """All magnitudes; as a device cuts it, in tiles of 4 columns and chunks of 2, and one element alone."""
    s, k = step(case, strategy, arithmetic), kernel(step(case, strategy, arithmetic))
    for n, cut in ((900, None), (128 * 4 + 131, narrowed(k, (643,), 4, 2)), (1, None)):
        components = {key: x[:n] for key, x in s.components.items()}
        wanted = s.by_reciprocals()._replace(components=components).expected()
        assert not differing(results(k, components, s.vector, cut), wanted)


def test_what_is_measured() -> None:
    """Counts are exact and what is stored has the bits; sums of 900 terms in fp32 are within their roundings."""
    s = step("sgd_momentum", "plus", measured=True)
    k = kernel(s)
    first, second = (f(k, s.components, s.vector) for f in (lambda *a: run(*a).results, results))
    a, b = (measure_of(s.update, x.pop(MEASURES)) for x in (first, second))
    assert not differing(first, second)
    assert torch.equal(a.counts, b.counts)
    assert torch.allclose(a.sums, b.sums, rtol=900 * 2.0**-24, atol=0)


# The reader itself


def test_every_number_is_rounded_as_torch_rounds_it() -> None:
    """All upper halves of fp32's bits, with lower halves on, beside and far from ties."""
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
    x = (np.arange(1 << 16, dtype=np.uint32)[:, None] << 16 | lower).reshape(-1).view(np.float32)
    wanted = torch.from_numpy(x).bfloat16()
    found = torch.from_numpy(decoded(encoded(x, "bfloat16"), "bfloat16")).bfloat16()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.view(torch.int16)[~found.isnan()], wanted.view(torch.int16)[~wanted.isnan()])


def test_integers_round_to_even_and_saturate() -> None:
    x = np.array([0.5, 1.5, -0.5, -2.5, 40000.0, -40000.0, 32767.5], np.float32)
    assert encoded(x, "int16").tolist() == [0, 2, 0, -2, 32767, -32768, 32767]
