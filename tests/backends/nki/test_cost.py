"""What the kernels cost by the documented figures, and that the figures are applied to what really runs."""

from __future__ import annotations

from functools import cache

import pytest
from nki_runs import Step, run, search_less, step_of
from nki_standin.tensors import MemoryRegion
from torch_cases import CASES

from collage_neuron.passes.backends.nki.hardware import COSTS, PSUM_BANK, PSUM_BANKS, TARGETS, Access, Shape, cost_of
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki

BYTES = {"bf16": 14, "light": 18, "plus": 22, "full": 26, "fp32_states": 22, "fp32": 30}
"""Of AdamW: every component once in and once out, the gradient once in."""


@cache
def step(strategy: str, arithmetic: str) -> Step:
    return step_of(CASES["adamw"], strategy, arithmetic, n=128 * 64)


@cache
def kernel(strategy: str, arithmetic: str, target: str) -> Kernel:
    return lower_to_nki(step(strategy, arithmetic).update, target)


@pytest.mark.parametrize(("target", "most"), [("trn1", 1.6), ("trn2", 1.55)])
def test_adamw_plus_is_near_the_memory_bound(target: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A literal transcription, one instruction an operation and on the vector engine where it can be, is not."""
    assert kernel("plus", "fp32", target).cost.ratio <= most
    search_less(monkeypatch, 0)
    assert lower_to_nki(step("plus", "fp32").update, target).cost.ratio > 2.5


@pytest.mark.parametrize("strategy", BYTES)
def test_no_byte_moves_twice(strategy: str) -> None:
    assert kernel(strategy, "fp32", "trn1").cost.bytes == BYTES[strategy]
    s, k = step(strategy, "fp32"), kernel(strategy, "fp32", "trn1")
    trace = run(k, s.components, s.vector).machine.trace
    n = s.components["param"].numel()
    assert trace.hbm_written == k.cost.written * n
    assert trace.hbm_read == k.cost.read * n + 128 * 4 * len(k.plan.columns)


@pytest.mark.parametrize("target", TARGETS)
def test_two_buffers_of_everything_fit(target: str) -> None:
    s, k = step("plus", "fp32"), kernel("plus", "fp32", target)
    n = k.tiling.columns * 128
    wide = {key: x.repeat(n // x.numel() + 1)[: 2 * n] for key, x in s.components.items()}
    trace = run(k, wide, s.vector).machine.trace
    assert trace.rotating_bytes(2) <= k.tiling.sbuf <= TARGETS[target].sbuf
    assert 2 * trace.live_bytes(MemoryRegion.psum) <= PSUM_BANKS * PSUM_BANK
    assert k.tiling.columns >= 2048
    assert k.tiling.chunk * 4 <= PSUM_BANK or not k.plan.in_psum


def test_every_figure_has_its_source() -> None:
    assert all(c.source.startswith(("[ISA]", "[A3]", "[A4]", "[inferred]")) for c in COSTS)


def test_costs_of_the_documentation() -> None:
    """Cycles for one column, as the tables give them."""
    fp32, bf16, psum = Access("float32", "sbuf"), Access("bfloat16", "sbuf"), Access("float32", "psum")
    sums = {(2, fp32): 2, (2, bf16): 1, (3, fp32): 2, (3, bf16): 0.5}
    for g in TARGETS.values():
        for x in (fp32, bf16):
            cycles = cost_of("tensor_tensor", "vector", Shape("add", (x, x), x), g).cycles
            assert cycles == sums[min(g.core, 3), x]
        assert cost_of("tensor_tensor", "vector", Shape("add", (psum, fp32), psum), g).cycles == 1
        assert cost_of("scalar_tensor_tensor", "vector", Shape("", (psum, fp32), psum), g).cycles == 2
        assert cost_of("activation", "scalar", Shape("sqrt", (psum,), fp32), g).cycles == 1
        assert cost_of("reciprocal", "vector", Shape("", (fp32,), fp32), g).cycles == 8


def test_on_v2_only_what_may_write_to_psum_does() -> None:
    k = kernel("plus", "fp32", "trn1")
    kinds = {i.kind for v, i in k.plan.steps if v in k.plan.in_psum}
    assert kinds <= {"tensor_tensor", "tensor_copy", "activation"}
