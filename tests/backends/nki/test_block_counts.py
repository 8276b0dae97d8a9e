"""Instructions of kernels whose formats have blocks: what they grow with, and where that ends.

Evidence level: arithmetic (`bodies.py`), which test_loops.py compares with what runs on the stand-in.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
from kernel_tables import divided, llama_7b, shapes_of, size_of
from nki_runs import count_of, search_less, step_of
from torch_cases import CASES

from collage_neuron.numerics.block_formats import BLOCK
from collage_neuron.passes.backends.nki.hardware import TARGETS
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki

STRATEGIES = ("split423", "split422", "split412", "split311")
DIALECTS = ("nki", "beta1")

SHORT = (3, 100, 129, 1000)
"""Rows that end in a short block and are one strip or two: of a 3x3 convolution, of a classifier."""
LONG = (4544, 10944, 50257)
"""Rows that end in a short block and are many strips: Falcon-7B, an MLP of DeepSeek-V2-Lite, GPT-2's words."""


@pytest.fixture(autouse=True, scope="module")
def _short_search() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        search_less(patch)
        yield


@cache
def kernel(strategy: str, dialect: str) -> Kernel:
    if dialect == "beta1":
        return kernel(strategy, "nki").in_dialect(dialect)
    return lower_to_nki(step_of(CASES["adamw"], strategy, "fp32").update)


def traced(strategy: str, dialect: str, *shape: int) -> int:
    return count_of(kernel(strategy, dialect), shape)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_only_the_blocks_of_a_row_do_where_its_last_one_is_short(strategy: str) -> None:
    """At most one copy for each block of a row, twice (a loop and the lines that are left), in `import nki` alone."""
    k = kernel(strategy, "nki")
    tile = traced(strategy, "nki", 1000, 100) // 2
    for row in (*SHORT, *LONG, 1_000_001):
        assert traced(strategy, "nki", 1000, row) <= 2 * tile * (row // BLOCK + 1), row
        assert traced(strategy, "beta1", 1000, row) <= 3 * traced(strategy, "beta1", 1000, 100), row
    assert k.cut((1000, 4544)).columns < 4544


LLAMA = {
    "split423": (70_000, 30_000),
    "split422": (80_000, 50_000),
    "split412": (70_000, 70_000),
    "split311": (65_000,) * 2,
}
"""Instructions of Llama-7B, whatever share of it a core has, by dialect: about 200 for each of 291 tensors."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_blocks_take_one_chunk_or_two_of_a_tensor(strategy: str) -> None:
    """With as wide tiles as kernels have that are nearly bound by memory, `import nki` had 350,000 to 500,000."""
    for dialect, most in zip(DIALECTS, LLAMA[strategy], strict=True):
        shapes = llama_7b()
        shares = [divided(shapes, cores) for cores in (1, 8, 32)]
        counts = [size_of(kernel(strategy, dialect), share).instructions for share in shares]
        assert max(counts) <= most


@pytest.mark.parametrize(("dialect", "most"), [("nki", TARGETS["trn1"].instructions), ("beta1", 5_000)])
def test_a_model_of_awkward_shapes(dialect: str, most: int) -> None:
    shapes = shapes_of("64x3x7x7,128x64x3x3,512x512x3x3,1000x129,4096x100,100,129,1000,4544x4544")
    for strategy in STRATEGIES:
        assert size_of(kernel(strategy, dialect), shapes).instructions <= most
