"""The stand-in for NKI computes what the documentation says: exact rationals, torch's cast, one rounding.

Operators that kernels are made of are compared with the reference wherever kernels are (test_rules.py and others).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any

import nki_standin
import numpy as np
import pytest
import torch
from exact import fractions, rne, ulps_apart
from nki_standin import Device
from nki_standin.dtypes import BFLOAT16, narrow, widen

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

BINARY = """
def kernel(a, b):
    z = tile(a, nl.{out})
    nisa.tensor_tensor(dst=z, data1=loaded(a), data2=loaded(b), op=nl.{op})
    return stored(z)
"""

FUSED = """
def kernel(a, b, s):
    z = tile(a, nl.{out})
    x, y, v = loaded(a), loaded(b), loaded(s)
    nisa.scalar_tensor_tensor(dst=z, data=x, op0=nl.multiply, operand0=v, op1=nl.{op}, operand1=y)
    return stored(z)
"""

CHAIN = """
def kernel(a, b):
    s = tile(a, nl.bfloat16)
    z = tile(a, nl.float32)
    nisa.tensor_tensor(dst=s, data1=loaded(a), data2=loaded(b), op=nl.add)
    nisa.tensor_tensor(dst=z, data1=s, data2=loaded(a), op=nl.subtract)
    return stored(z)
"""

UNARY = """
def kernel(a):
    z = tile(a, nl.{out})
    {call}
    return stored(z)
"""

OF = {"add": Fraction.__add__, "subtract": Fraction.__sub__, "multiply": Fraction.__mul__}
BITS = {"bfloat16": 8, "float32": 24}


def run(text: str, *tensors: torch.Tensor, folder: Path, on: str = "trn1", device: Device | None = None) -> Any:
    path = folder / "a_kernel.py"
    path.write_text(PREAMBLE + text.strip() + "\n")
    with nki_standin.install("nki", on, device):
        return nki_standin.load(path).kernel(*tensors)


def spread(shape: tuple[int, int] = (128, 16), dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Normal numbers over 16 binades, so that sums lose bits in every way."""
    return torch.randn(shape).mul(torch.randint(-8, 9, shape).exp2()).to(dtype)


def same(ours: Iterable[Fraction], exact: Iterable[Fraction]) -> bool:
    """Whether all are equal. Lists of long fractions would be printed in full by an assert, which takes a while."""
    return all(x == y for x, y in zip(ours, exact, strict=True))


# What the stand-in promises -------------------------------------------------------------------------------------------


def test_a_cast_is_that_of_torch() -> None:
    highs = np.arange(1 << 16, dtype=np.uint32)
    x = ((highs[:, None] << 16) | LOWS).view(np.float32)
    ours = torch.from_numpy(narrow(x, BFLOAT16, Device(overflow="infinity")).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(x).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours.nan_to_num().view(torch.int16), theirs.nan_to_num().view(torch.int16))


def test_a_cast_is_the_rounded_rational() -> None:
    rng = np.random.default_rng(0)
    highs = rng.integers(0x3000, 0x5000, 500).astype(np.uint32) | (rng.integers(0, 2, 500).astype(np.uint32) << 15)
    x = ((highs[:, None] << 16) | LOWS).view(np.float32).reshape(-1)
    ours = widen(narrow(x, BFLOAT16, Device()), BFLOAT16)
    assert same([Fraction(float(v)) for v in ours], [rne(Fraction(float(v))) for v in x])


@pytest.mark.parametrize("out", BITS)
@pytest.mark.parametrize("op", OF)
def test_tensor_tensor_is_the_rounded_rational(op: str, out: str, tmp_path: Path) -> None:
    a, b = spread(), spread()
    result = run(BINARY.format(op=op, out=out), a, b, folder=tmp_path)
    pairs = zip(fractions(a), fractions(b), strict=True)
    assert same(fractions(result), [rne(OF[op](x, y), BITS[out]) for x, y in pairs])


@pytest.mark.parametrize("out", BITS)
@pytest.mark.parametrize("op", OF)
def test_two_operators_round_in_fp32_between_and_once_at_the_end(op: str, out: str, tmp_path: Path) -> None:
    a, b, s = spread((128, 4)), spread((128, 4)), spread((128, 1), torch.float32)
    result = run(FUSED.format(op=op, out=out), a, b, s, folder=tmp_path)
    steps = zip(fractions(a), fractions(b), fractions(s.expand(a.shape)), strict=True)
    assert same(fractions(result), [rne(rne(OF[op](rne(x * z, 24), y), 24), BITS[out]) for x, y, z in steps])


def test_a_bf16_tile_between_two_instructions_holds_bf16_numbers(tmp_path: Path) -> None:
    a, b = spread(), spread()
    steps = zip(fractions(a), fractions(b), strict=True)
    assert same(fractions(run(CHAIN, a, b, folder=tmp_path)), [rne(rne(x + y) - x, 24) for x, y in steps])


# Other operators, types and functions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["bitwise_and", "bitwise_xor", "add", "subtract", "multiply"])
def test_integers_are_exact(op: str, tmp_path: Path) -> None:
    a, b = (torch.randint(-(2**15), 2**15, (128, 8), dtype=torch.int32) for _ in range(2))
    expected = getattr(torch, op)(a, b)
    assert torch.equal(run(BINARY.format(op=op, out="int32"), a, b, folder=tmp_path), expected)


def test_right_shift_is_logical(tmp_path: Path) -> None:
    a = torch.randint(-(2**31), 2**31, (128, 8)).int()
    call = "nisa.tensor_scalar(dst=z, data=loaded(a), op0=nl.right_shift, operand0=16, op1=nl.bitwise_and, operand1=1)"
    result = run(UNARY.format(call=call, out="int32"), a, folder=tmp_path)
    assert torch.equal(result, ((a.long() & 0xFFFFFFFF) >> 16 & 1).int())


@pytest.mark.parametrize("engine", ["vector", "gpsimd"])
def test_a_copy_of_one_type_keeps_every_bit(engine: str, tmp_path: Path) -> None:
    a = torch.arange(1 << 16).to(torch.int16).view(torch.bfloat16).view(128, -1)
    call = f"nisa.tensor_copy(dst=z, src=loaded(a), engine=nisa.engine.{engine})"
    result = run(UNARY.format(call=call, out="bfloat16"), a, folder=tmp_path)
    assert torch.equal(result.view(torch.int16), a.view(torch.int16))


def test_activation_scales_and_shifts_in_fp32(tmp_path: Path) -> None:
    a = spread()
    call = (
        "v = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)\n"
        "    nisa.memset(dst=v, value=0.1)\n"
        "    nisa.activation(dst=z, op=nl.copy, data=loaded(a), scale=v, bias=v)"
    )
    result = run(UNARY.format(call=call, out="bfloat16"), a, folder=tmp_path)
    tenth = Fraction(float(np.float32(0.1)))
    assert same(fractions(result), [rne(rne(rne(x * tenth, 24) + tenth, 24)) for x in fractions(a)])


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


# Counters, and what is registered when --------------------------------------------------------------------------------

LOOP = """
def kernel(a):
    out = nl.ndarray(a.shape, dtype=a.dtype, buffer=nl.shared_hbm)
    for i in range(4):
        x = nl.ndarray((128, 256), dtype=a.dtype, buffer=nl.sbuf)
        y = nl.ndarray((128, 256), dtype=nl.float32, buffer=nl.sbuf)
        nisa.dma_copy(dst=x, src=a.ap([[256, 128], [1, 256]], offset=i * 128 * 256))
        nisa.activation(dst=y, op=nl.copy, data=x, scale=2.0)
        nisa.tensor_tensor(dst=x, data1=x, data2=y, op=nl.add)
        nisa.dma_copy(dst=out.ap([[256, 128], [1, 256]], offset=i * 128 * 256), src=x)
    return out
"""


def test_counters(tmp_path: Path) -> None:
    path = tmp_path / "a_kernel.py"
    path.write_text(PREAMBLE + LOOP.strip())
    a = spread((1, 4 * 128 * 256)).view(-1)
    with nki_standin.install("nki", "trn1") as machine:
        nki_standin.load(path).kernel(a)
    trace = machine.trace
    assert trace.instructions() == {"dma": 8, "scalar": 4, "vector": 4}
    assert trace.columns() == {"dma": 2048, "scalar": 1024, "vector": 1024}
    assert (trace.hbm_read, trace.hbm_written) == (2 * a.numel(), 2 * a.numel())
    assert trace.live_bytes() == 256 * (2 + 4)
    assert trace.rotating_bytes(2) == 2 * 256 * (2 + 4)
    record = trace.records[2]
    assert (record.instruction, record.engine, record.operators) == ("tensor_tensor", "vector", ("add",))
    assert (record.partitions, record.elements, record.contiguous) == (128, 256, True)
    assert record.dtypes == ("bfloat16", "bfloat16", "float32")


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


def test_settings_that_do_not_exist() -> None:
    with pytest.raises(ValueError, match="choose"):
        Device(overflow="wrap")
    with pytest.raises(ValueError, match="unknown target 'trn9'"), nki_standin.install("nki", "trn9"):
        pass


def test_the_package_never_imports_it() -> None:
    root = Path(__file__).parents[3]
    for folder in ("collage_neuron", "passes", "kernels_nki", "examples", "benchmarks"):
        for path in (root / folder).rglob("*.py"):
            imported = re.search(r"^\s*(from|import) (nki_standin|nki_backend)", path.read_text(), re.MULTILINE)
            assert not imported, f"{path} has {imported}"
