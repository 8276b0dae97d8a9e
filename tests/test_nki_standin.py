"""The stand-in for NKI computes what the documentation says: exact rationals, torch's cast, one rounding."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import nki_standin
import numpy as np
import pytest
import torch
from exact import fractions, rne
from nki_standin.dtypes import BFLOAT16, narrow, widen

LOWS = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF], np.uint32)
"""Low halves of an fp32: exact, just above, just below a tie, a tie, just above it, beyond, the last."""

INFINITY = nki_standin.Device(overflow="infinity")

Run = Callable[..., Any]


@pytest.fixture
def kernel(tmp_path: Path) -> Callable[[str], str]:
    """Writes a function called kernel to a file of its own and returns the path."""

    def write(body: str) -> str:
        lines = ["import nki", "import nki.isa as nisa", "import nki.language as nl", "", "@nki.jit"]
        path = tmp_path / "a_kernel.py"
        path.write_text("\n".join(lines) + "\n" + body)
        return str(path)

    return write


def test_the_cast_to_bf16_is_torchs_for_every_high_half_and_case_of_rounding() -> None:
    highs = np.arange(1 << 16, dtype=np.uint32)
    x = ((highs[:, None] << 16) | LOWS).view(np.float32)
    ours = torch.from_numpy(narrow(x, BFLOAT16, INFINITY).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(x).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num().view(torch.int16), theirs.nan_to_num().view(torch.int16))


def test_the_cast_to_bf16_is_the_rational_nearest_even() -> None:
    rng = np.random.default_rng(0)
    highs = rng.integers(0x0080, 0x7F7F, 3000).astype(np.uint32) | (rng.integers(0, 2, 3000).astype(np.uint32) << 15)
    x = ((highs[:, None] << 16) | LOWS).view(np.float32).reshape(-1)
    ours = widen(narrow(x, BFLOAT16, INFINITY), BFLOAT16)
    assert [Fraction(float(v)) for v in ours] == [rne(Fraction(float(v))) for v in x]


BINARY = """
def kernel(a, b):
    out = nl.ndarray(a.shape, dtype=nl.{out}, buffer=nl.shared_hbm)
    x = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    y = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    z = nl.ndarray(a.shape, dtype=nl.{out}, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=a)
    nisa.dma_copy(dst=y, src=b)
    nisa.tensor_tensor(dst=z, data1=x, data2=y, op=nl.{op})
    nisa.dma_copy(dst=out, src=z)
    return out
"""


@pytest.mark.parametrize("out", ["bfloat16", "float32"])
@pytest.mark.parametrize("op", ["add", "subtract", "multiply"])
def test_tensor_tensor_is_the_rounded_rational(kernel: Callable[[str], str], op: str, out: str) -> None:
    a, b = (torch.randn(128, 16).mul(torch.randint(-8, 9, (128, 16)).exp2()).bfloat16() for _ in range(2))
    with nki_standin.install():
        result = nki_standin.load(kernel(BINARY.format(op=op, out=out))).kernel(a, b)
    exact = {"add": Fraction.__add__, "subtract": Fraction.__sub__, "multiply": Fraction.__mul__}[op]
    bits = {"bfloat16": 8, "float32": 24}[out]
    assert fractions(result) == [rne(exact(x, y), bits) for x, y in zip(fractions(a), fractions(b), strict=True)]
