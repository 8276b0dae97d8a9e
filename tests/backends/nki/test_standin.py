"""The stand-in for NKI computes what the documentation says: exact rationals, torch's cast, one rounding.

Operators that kernels are made of are compared with the reference wherever kernels are (test_rules.py and others).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nki_standin
import numpy as np
import pytest
import torch
from exact import ulps_apart
from nki_standin import Device
from nki_standin.dtypes import BFLOAT16, narrow

LOWS = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xC000, 0xFFFF], np.uint32)
"""Low halves of an fp32: exact, just above, just below a tie, a tie, just above it, beyond, the last."""

PREAMBLE = """
import nki
import nki.isa as nisa
import nki.language as nl


def loaded(a):
    tile = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=tile, src=a)
    return tile


def stored(tile):
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def tile(a, dtype):
    return nl.ndarray(a.shape, dtype=dtype, buffer=nl.sbuf)


@nki.jit
"""


UNARY = """
def kernel(a):
    z = tile(a, nl.{out})
    {call}
    return stored(z)
"""


def run(text: str, *tensors: torch.Tensor, folder: Path, on: str = "trn1", device: Device | None = None) -> Any:
    path = folder / "a_kernel.py"
    path.write_text(PREAMBLE + text.strip() + "\n")
    with nki_standin.install("nki", on, device):
        return nki_standin.load(path).kernel(*tensors)


# What the stand-in promises -------------------------------------------------------------------------------------------


def test_a_cast_is_that_of_torch() -> None:
    highs = np.arange(1 << 16, dtype=np.uint32)
    x = ((highs[:, None] << 16) | LOWS).view(np.float32)
    ours = torch.from_numpy(narrow(x, BFLOAT16, Device(overflow="infinity")).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(x).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num().view(torch.int16), theirs.nan_to_num().view(torch.int16))


# Other operators, types and functions ---------------------------------------------------------------------------------


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "exp": torch.exp, "log": torch.log,
}  # fmt: skip


@pytest.mark.parametrize("ulps", [0, 1, 2])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_approximated_functions_are_off_by_the_ulps_that_a_test_sets(name: str, ulps: int, tmp_path: Path) -> None:
    a = torch.rand(128, 256) + 0.5
    call = f"nisa.activation(dst=z, op=nl.{name}, data=loaded(a))"
    text = UNARY.format(call=call, out="float32")
    result, again = (run(text, a, folder=tmp_path, device=Device(ulps=ulps)) for _ in range(2))
    nearest = FUNCTIONS[name](a.double()).float()  # 53 bits, rounded to 24: the nearest but for exp once in 2**29
    assert ulps_apart(result, nearest) == ulps
    assert torch.equal(result, again)


def test_the_vector_engines_reciprocal_and_the_gpsimds_rsqrt_are_approximated_too(tmp_path: Path) -> None:
    a = torch.rand(128, 256) + 0.5
    for call in (
        "nisa.reciprocal(dst=z, data=loaded(a))",
        "nisa.tensor_scalar(dst=z, data=loaded(a), op0=nl.rsqrt, operand0=0.0)",
    ):
        text = UNARY.format(call=call, out="float32")
        exact = run(text, a, folder=tmp_path)
        assert ulps_apart(run(text, a, folder=tmp_path, device=Device(ulps=3)), exact) == 3


# What the documentation leaves open -----------------------------------------------------------------------------------


def test_a_device_that_rounds_stochastically_goes_to_either_neighbour(tmp_path: Path) -> None:
    a = torch.full((128, 512), 1 + 2.0**-9)  # a quarter of the way from 1 to the next bf16
    text = UNARY.format(call="nisa.tensor_copy(dst=z, src=loaded(a))", out="bfloat16")
    result = run(text, a, folder=tmp_path, device=Device(stochastic=True)).double()
    assert set(result.flatten().tolist()) == {1.0, 1 + 2.0**-7}
    # 65536 draws of probability 1/4: the mean is off by 6 standard deviations of 0.0017 * 2**-7 once in 5e8
    assert abs(result.mean().item() - (1 + 2.0**-9)) < 6 * 0.0017 * 2.0**-7


# What is registered when ----------------------------------------------------------------------------------------------


def test_nothing_is_registered_outside(tmp_path: Path) -> None:
    with nki_standin.install():
        import nki

        assert "standin" in nki.__version__
        with pytest.raises(RuntimeError, match="already installed"), nki_standin.install():
            pass
    with nki_standin.install("beta1"):
        with pytest.raises(ImportError):
            import nki.isa
        import neuronxcc.nki

        assert "standin" in neuronxcc.nki.__version__
    for name in ("nki", "neuronxcc"):
        loaded = sys.modules.get(name)
        assert loaded is None or "standin" not in getattr(loaded, "__version__", "")
