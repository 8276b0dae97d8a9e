"""Limits of the hardware that a kernel may come to violate: the stand-in notices, and names the kernel's line.

A body sees tiles of [128, 64]: x, y bf16, f fp32, u uint8, i int32 (all written), p fp32 in PSUM; v, a written fp32
[128, 1]; a, the input, bf16 [128, 64] in HBM; out, the result, alike. It is followed by a store of x to out.
"""

from __future__ import annotations

from pathlib import Path
from textwrap import indent
from typing import Any, NamedTuple

import nki_standin
import pytest
import torch
from nki_standin import Device, StandinError
from nki_standin.tensors import MemoryRegion

A = torch.ones(128, 64, dtype=torch.bfloat16)

HEAD = """
import nki
import nki.isa as nisa
import nki.language as nl


@nki.jit
def kernel(a):
    out = nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    x = nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.sbuf)
    y = nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.sbuf)
    f = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf)
    u = nl.ndarray((128, 64), dtype=nl.uint8, buffer=nl.sbuf)
    i = nl.ndarray((128, 64), dtype=nl.int32, buffer=nl.sbuf)
    p = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)
    v = nl.ndarray((128, 1), dtype=nl.float32, buffer=nl.sbuf)
    new = nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=a)
    nisa.tensor_copy(dst=y, src=x)
    nisa.memset(dst=f, value=1.0)
    nisa.memset(dst=u, value=1)
    nisa.memset(dst=i, value=1)
    nisa.tensor_copy(dst=p, src=f)
    nisa.memset(dst=v, value=2.0)
"""
TAIL = """
    nisa.dma_copy(dst=out, src=x)
    return out
"""

BETA1 = """
import neuronxcc.nki as nki
import neuronxcc.nki.isa as nisa
import neuronxcc.nki.language as nl
import neuronxcc.nki.typing as nt


@nki.jit
def kernel(a):
    out = nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    flat = nl.ndarray((8192,), dtype=nl.bfloat16, buffer=nl.private_hbm)
    x = nl.load(a)
    f = nisa.memset((128, 64), 1.0, nl.float32)
    v = nisa.memset((128, 1), 2.0, nl.float32)
    u = nisa.memset((128, 64), 1, nl.uint8)
    i_p, i_f = nl.arange(128)[:, None], nl.arange(64)[None, :]
"""
BETA1_TAIL = """
    nl.store(out, value=x)
    return out
"""


class Limit(NamedTuple):
    """A body that violates a check on a target, and how the message goes on after `file:line: `."""

    body: str
    message: str
    on: str = "trn1"
    device: dict[str, str | bool | int] = {}  # noqa: RUF012
    cores: int = 1


LIMITS: dict[str, Limit] = {
    "partitions": Limit("nl.ndarray((256, 64), dtype=nl.bfloat16)", "partition dimension 256 exceeds maximum 128"),
    "tile beyond SBUF": Limit(
        "nl.ndarray((128, 98305), dtype=nl.bfloat16)", "a tile of 196610 bytes a partition exceeds the 196608 of sbuf"
    ),
    "tile beyond PSUM": Limit(
        "nl.ndarray((128, 513), dtype=nl.bfloat16, buffer=nl.psum)", "a tile in PSUM has up to 512 elements a partition"
    ),
    "live tiles beyond PSUM": Limit(
        "t = [nl.ndarray((128, 512), dtype=nl.float32, buffer=nl.psum) for _ in range(9)]\n"
        "[nisa.memset(dst=s, value=0.0) for s in t + t]",
        "18432 bytes a partition of psum are live at once; trn1 has 16384",
    ),
    "live tiles beyond SBUF": Limit(
        "t = [nl.ndarray((128, 32768), dtype=nl.bfloat16) for _ in range(4)]\n"
        "[nisa.memset(dst=s, value=0.0) for s in t + t]",
        "262.* bytes a partition of sbuf are live at once; trn1 has 196608",
    ),
    "half of what was written": Limit(
        "t = nl.ndarray((128, 64), dtype=nl.float32)\n"
        "nisa.tensor_copy(dst=t.view(nl.int16)[:, 0::2], src=u)\nnisa.tensor_copy(dst=f, src=t)",
        "tensor_copy src is read before it was written",
    ),
    "ap leaves the partition": Limit("x.ap([[64, 128], [1, 64]], offset=1)", "leaves its partition of 64 elements"),
    "ap out of bounds": Limit("a.ap([[64, 129], [1, 64]])", "is out of bounds: element 8255 of 8192"),
    "slice out of bounds": Limit("x[:, 0:65]", r"out of bounds on dimension 1: \[0:65\] of 64"),
    "unknown instruction": Limit("nisa.divide", "nki.isa.divide is not in the stand-in"),
    "both store": Limit("nisa.dma_copy(a, x)", "core 0 would have read what core 1 has written", "trn2", cores=2),
    "other turns": Limit(
        "nl.fori_loop(0, 2 + nl.program_id(0), lambda i: None)",
        r"loops have other turns on other cores: \[\[2\], \[3\]\]",
        "trn2",
        cores=2,
    ),
    "order of cores": Limit(
        "nl.ran = nl.__dict__.get('ran', 0) + 1\nnisa.memset(dst=x, value=float(nl.ran))",
        "a result depends on the order in which cores run",
        "trn2",
        cores=2,
    ),
    "loop decides": Limit(
        "def body(i):\n    if i == 0:\n        pass\nnl.fori_loop(0, 1, body)", "a decision by, the register"
    ),
    "left a loop": Limit(
        "kept = []\ndef body(i):\n    kept.append(nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf))\n"
        "nl.fori_loop(0, 1, body)\nnisa.memset(dst=kept[0], value=0.0)",
        "was made in the body of a loop that is over",
    ),
    "offset out of bounds": Limit(
        "def body(i):\n    a.ap([[64, 128], [1, 64]], scalar_offset=i)\nnl.fori_loop(0, 2, body)", "is out of bounds"
    ),
    "operand in HBM": Limit("nisa.tensor_copy(new, a)", "tensor_copy src must be in sbuf or psum, it is shared_hbm"),
    "elements an instruction": Limit(
        "t = nl.ndarray((128, 65537), dtype=nl.bfloat16)\nnisa.memset(dst=t, value=0.0)",
        "memset dst: 65537 elements a partition; an instruction takes up to 65536",
    ),
    "start partition": Limit("nisa.memset(dst=x[1:65], value=0.0)", r"64 partitions start at 1; allowed: \(0, 64\)"),
    "stride": Limit(
        "t = nl.ndarray((128, 65536), dtype=nl.uint8)\nnisa.memset(dst=t.ap([[65536, 128], [32768, 2]]), value=0)",
        "a stride of 32768 elements; the field has 15 bits",
    ),
    "sizes": Limit("nisa.tensor_copy(new, x[:, 0:32])", r"dst \[128, 64\], src \[128, 32\]"),
    "overlap": Limit("nisa.tensor_copy(x[:, 0:32], x[:, 1:33])", "dst overlaps tensor_copy src in part"),
    "written twice": Limit("nisa.memset(dst=x.ap([[64, 128], [0, 64]]), value=0.0)", "writes elements more than once"),
    "unwritten in part": Limit(
        "nisa.memset(dst=new[:, 0:63], value=0.0)\nnisa.tensor_copy(x, new)", "src is read before it was written"
    ),
    "operator elsewhere": Limit(
        "nisa.tensor_tensor(new, x, y, nl.subtract, engine=nisa.engine.gpsimd)",
        "nl.subtract does not run on engine gpsimd",
    ),
    "tile beyond the SBUF of trn2": Limit(
        "nl.ndarray((128, 128000), dtype=nl.bfloat16)", "exceeds the 229376 of sbuf", "trn2"
    ),
    "engine too old": Limit("nisa.rng(i, engine=nisa.engine.gpsimd)", "rng on engine gpsimd needs NeuronCore-v3; trn1"),
    "gpsimd and PSUM": Limit(
        "nisa.tensor_tensor(f, f, p, nl.add, engine=nisa.engine.gpsimd)", "the GpSimd Engine cannot access PSUM"
    ),
    "reduced product": Limit(
        "nisa.tensor_reduce(v, nl.multiply, f, 1)", "nl.multiply is not in the stand-in, which has"
    ),
    "both in PSUM": Limit("nisa.tensor_tensor(f, p, p, nl.add)", "data1 and data2 cannot both be in PSUM"),
    "bitvec cast": Limit("nisa.tensor_tensor(i, u, u, nl.bitwise_and)", "a bitvec operator does not cast"),
    "integer overflow": Limit(
        "nisa.memset(dst=i, value=2**31 - 1)\nnisa.tensor_tensor(i, i, i, nl.add)", "is beyond int32: whether it wraps"
    ),
    "maximum of a NaN": Limit(
        "nisa.memset(dst=f, value=float('nan'))\nnisa.tensor_tensor(f, f, f, nl.maximum)", "nl.maximum of a NaN"
    ),
    "mixed kinds": Limit(
        "nisa.tensor_scalar(i, i, nl.bitwise_and, 1, op1=nl.add, operand1=1.0)", "mixes bitvec and arithmetic operators"
    ),
    "vector operand type": Limit("nisa.tensor_scalar(new, x, nl.add, x[:, 0:1])", "operand0 must be float32, got"),
    "not an activation": Limit("nisa.activation(new, nl.add, x)", "nl.add is not an activation function"),
    "sqrt of 0": Limit(
        "nisa.activation(f, nl.sqrt, f, scale=0.0)", "nl.sqrt of 0.0 is invalid; its documented range is"
    ),
    "reciprocal of tiny": Limit("nisa.activation(f, nl.reciprocal, f, scale=-(2.0**-43))", r"range is \+-\[2.27e-13"),
    "beyond its offsets": Limit("pass", "beyond 32 bits of offset", device={"addressed": 128 * 64 * 2 - 1}),
    "predicated unwritten": Limit(
        "nisa.memset(dst=u, value=0)\nnisa.tensor_copy_predicated(new, x, u)", "keeps elements of .* never written"
    ),
    "NaN to integer": Limit("nisa.memset(dst=f, value=float('nan'))\nnisa.tensor_copy(i, f)", "a NaN is cast to int32"),
    "overflow": Limit("nisa.memset(dst=new, value=3.4e38)", "is beyond bfloat16: whether the cast gives infinity"),
    "drawn without a seed": Limit("nisa.rng(i)", "a random number before the generator is seeded"),
}
BETA1_LIMITS: dict[str, Limit] = {
    "argument": Limit("nisa.reciprocal(f, buffer=nl.psum)", "reciprocal has no documented argument buffer"),
    "promotion": Limit("nisa.tensor_tensor(x, f, nl.add)", "needs dtype=: inputs of two types are promoted"),
    "loop variable decides": Limit(
        "for k in nl.affine_range(2):\n    if k == 0:\n        pass", "control flow that depends on an index"
    ),
    "index range": Limit("flat[i_p * 64 + i_f + 1]", r"index range \[1, 8192\] of 8192"),
    "assignment of a tile": Limit("x[...] = x", "only what the last instruction made, else it is one more"),
    "assignment to what is read": Limit(
        "x[:, 0:32] = nisa.tensor_copy(x[:, 1:33])", "dst overlaps a source in part: the order of access"
    ),
    "immutable input": Limit("nl.store(a, value=x)", "is an input that is not mutable; annotate it nt.mutable_tensor"),
}


def source(body: str, dialect: str = "nki") -> str:
    """The text of a kernel file."""
    return HEAD + indent(body, "    ") + TAIL if dialect == "nki" else BETA1 + indent(body, "    ") + BETA1_TAIL


def run(path: Path, limit: Limit, dialect: str = "nki") -> Any:
    path.write_text(source(limit.body, dialect))
    with nki_standin.install(dialect, limit.on, Device(**limit.device)):  # type: ignore[arg-type]
        kernel = nki_standin.load(path).kernel
        return (kernel[limit.cores] if limit.cores > 1 else kernel)(A.clone())


CASES = [
    (limit, dialect) for dialect, limits in (("nki", LIMITS), ("beta1", BETA1_LIMITS)) for limit in limits.values()
]


@pytest.mark.parametrize(("limit", "dialect"), CASES, ids=[*LIMITS, *(f"beta1, {name}" for name in BETA1_LIMITS)])
def test_limit(limit: Limit, dialect: str, tmp_path: Path) -> None:
    with pytest.raises(StandinError, match=limit.message):
        run(tmp_path / "kernel_file.py", limit, dialect)


def test_a_message_names_the_line_of_the_kernel(tmp_path: Path) -> None:
    limit = LIMITS["sizes"]
    line = source(limit.body).splitlines().index(f"    {limit.body}") + 1
    with pytest.raises(StandinError, match=f"^kernel_file.py:{line}: "):
        run(tmp_path / "kernel_file.py", limit)


@pytest.mark.parametrize("on", ["trn1", "trn2", "trn3"])
def test_the_kernel_without_a_violation_runs(on: str, tmp_path: Path) -> None:
    assert torch.equal(run(tmp_path / "kernel_file.py", Limit("pass", "", on)), A)
    if on != "trn3":
        assert torch.equal(run(tmp_path / "kernel_file.py", Limit("pass", "", on), "beta1"), A)


def test_an_assigned_result_is_the_destination_of_its_instruction(tmp_path: Path) -> None:
    body = "p = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)\np[:, 0:32] = nisa.tensor_copy(f[:, 0:32])"
    (tmp_path / "kernel_file.py").write_text(source(body, "beta1"))
    with nki_standin.install("beta1", "trn1") as machine:
        nki_standin.load(tmp_path / "kernel_file.py").kernel(A)
    copies = [r.buffers for r in machine.trace.records if r.instruction == "tensor_copy"]
    assert copies == [("psum", "sbuf")]
    assert machine.trace.live_bytes(MemoryRegion.psum) == 256
