"""What a kernel must not do: for each check of the stand-in a kernel that violates it, and the message it gets.

A body sees tiles of [128, 64]: x, y bf16, f fp32, u uint8, i int32 (all written), p fp32 in PSUM; v, a written fp32
[128, 1]; a, the input, bf16 [128, 64] in HBM; out, the result, alike.
"""

from __future__ import annotations

from textwrap import indent
from typing import NamedTuple

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
    # allocation
    "partitions": Limit("nl.ndarray((256, 64), dtype=nl.bfloat16)", "partition dimension 256 exceeds maximum 128"),
    "one dimension": Limit("nl.ndarray((64,), dtype=nl.bfloat16)", "SBUF and PSUM tensors have at least 2 dimensions"),
    "empty": Limit("nl.ndarray((128, 0), dtype=nl.bfloat16)", r"shape \(128, 0\): positive ints"),
    "dtype": Limit("nl.ndarray((128, 64), dtype='bfloat16')", "dtype must be one of nki.language, got 'bfloat16'"),
    "buffer": Limit("nl.ndarray((128, 64), dtype=nl.bfloat16, buffer='sbuf')", "buffer must be nl.sbuf, nl.psum or an"),
    "address": Limit("nl.ndarray((128, 64), dtype=nl.bfloat16, address=(0, 0))", "nl.ndarray: addresses are not in"),
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
    # views
    "assignment": Limit("x[0:1] = y", "a tensor is written by instructions of nki.isa only"),
    "reshape size": Limit("x.reshape((128, 65))", r"reshape of \(128, 64\) to \(128, 65\) changes the number"),
    "reshape of strided": Limit("x[:, 0:64:2].reshape((128, 4, 8))", "reshape of a view that is not contiguous"),
    "reshape across partitions": Limit("x.reshape((64, 128))", r"reshape of an on-chip \(128, 64\) to \(64, 128\)"),
    "dynamic access": Limit("x.ap([[64, 128], [1, 64]], vector_offset=i)", "ap with a vector_offset or a dtype"),
    "ap of a reinterpreted view": Limit("i.view(nl.uint32).ap([[64, 128], [1, 64]])", "ap of a reinterpreted view"),
    "ap dimensions": Limit("x.ap([[64, 128]] + [[1, 1]] * 5)", "an access pattern has up to 5 dimensions, got 6"),
    "ap counts": Limit("x.ap([[64, 128], [1, 0]])", r"access pattern \[\[64, 128\], \[1, 0\]\]"),
    "smaller view of strided": Limit("f[:, 0:64:2].view(nl.int16)", r"view of nl.float32 as nl.int16: .* is not dense"),
    "larger view of an odd one": Limit("x[:, 1:64].view(nl.int32)", "view of nl.bfloat16 as nl.int32: .* is not even"),
    "half of what was written": Limit(
        "t = nl.ndarray((128, 64), dtype=nl.float32)\n"
        "nisa.tensor_copy(dst=t.view(nl.int16)[:, 0::2], src=u)\nnisa.tensor_copy(dst=f, src=t)",
        "tensor_copy src is read before it was written",
    ),
    "view of wide tiles": Limit("x.view(nl.int16)", "view of bits with NKI_PRECISE_FP=0", device={"precise": False}),
    "ap of one dimension": Limit("x.ap([[64, 128]])", "an on-chip view has two dimensions or more"),
    "partition stride": Limit("x.ap([[32, 128], [1, 32]])", "the partition stride must be 64, the storage's free size"),
    "ap leaves the partition": Limit("x.ap([[64, 128], [1, 64]], offset=1)", "leaves its partition of 64 elements"),
    "ap out of bounds": Limit("a.ap([[64, 129], [1, 64]])", "is out of bounds: element 8255 of 8192"),
    "operators": Limit("x + y", "python operators on tensors are not instructions"),
    "value": Limit("if x:\n    pass", "the value of a tensor is not known while the kernel is built"),
    "indices": Limit("x[0:1, 0:1, 0:1]", "3 indices for 2 dimensions"),
    "slice of a float": Limit("x[:, 0:1.5]", "start, stop and step are ints"),
    "slice out of bounds": Limit("x[:, 0:65]", r"out of bounds on dimension 1: \[0:65\] of 64"),
    "index of an int": Limit("x[:, 63]", "index 63 on dimension 1 is not a slice"),
    # names
    "removed name": Limit("nl.mgrid", "nki.language.mgrid is not in the stand-in"),
    "unknown instruction": Limit("nisa.divide", "nki.isa.divide is not in the stand-in"),
    "divide": Limit("nisa.tensor_tensor(new, x, y, 'divide')", "'divide' is not an operator of nki.language"),
    "operator called": Limit("nl.add(x, y)", r"nl.add\(...\) on tiles is several instructions or one"),
    "jit argument": Limit("nki.jit(platform_target='trn1')", "nki.jit: argument platform_target is not documented"),
    "launch grid": Limit("kernel[2]", r"kernel\[2\]: trn1 has no such LNC"),
    "launch of three": Limit("kernel[3]", r"kernel\[3\]: trn2 has no such LNC", "trn2"),
    # two cores
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
    "nested kernel": Limit("kernel(a)", "kernel is called from a kernel: only the top function is decorated"),
    # compiled loops
    "loop step": Limit("nl.fori_loop(0, 4, print, step=0)", r"nl.fori_loop\(0, 4, step=0\): ints, and a positive step"),
    "loop register": Limit("nl.fori_loop(0, 2**32, print)", "nl.fori_loop to 4294967296: a register has 32 bits"),
    "loop returns": Limit("nl.fori_loop(0, 1, lambda i: 5)", "the body of nl.fori_loop returns a value"),
    "loop arithmetic": Limit(
        "def body(i):\n    i * 2\nnl.fori_loop(0, 1, body)", "arithmetic on, or a decision by, the register"
    ),
    "loop decides": Limit(
        "def body(i):\n    if i == 0:\n        pass\nnl.fori_loop(0, 1, body)", "a decision by, the register"
    ),
    "left a loop": Limit(
        "kept = []\ndef body(i):\n    kept.append(nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.sbuf))\n"
        "nl.fori_loop(0, 1, body)\nnisa.memset(dst=kept[0], value=0.0)",
        "was made in the body of a loop that is over",
    ),
    "offset by a tensor": Limit("a.ap([[64, 128], [1, 64]], scalar_offset=i)", "scalar_offset is a register, got"),
    "offset in a dimension": Limit(
        "def body(i):\n    a.ap([[64, 1], [1, 64]], scalar_offset=i, indirect_dim=2)\nnl.fori_loop(0, 1, body)",
        "indirect_dim 2 of",
    ),
    "offset out of bounds": Limit(
        "def body(i):\n    a.ap([[64, 128], [1, 64]], scalar_offset=i)\nnl.fori_loop(0, 2, body)", "is out of bounds"
    ),
    # operands of every instruction
    "not a tensor": Limit("nisa.tensor_copy(new, 1.0)", "tensor_copy src must be a tensor, got 1.0"),
    "operand in HBM": Limit("nisa.tensor_copy(new, a)", "tensor_copy src must be in sbuf or psum, it is shared_hbm"),
    "dma of PSUM": Limit("nisa.dma_copy(out, p)", "dma_copy src must be in private_hbm or shared_hbm or sbuf"),
    "elements an instruction": Limit(
        "t = nl.ndarray((128, 65537), dtype=nl.bfloat16)\nnisa.memset(dst=t, value=0.0)",
        "memset dst: 65537 elements a partition; an instruction takes up to 65536",
    ),
    "start partition": Limit("nisa.memset(dst=x[1:65], value=0.0)", r"64 partitions start at 1; allowed: \(0, 64\)"),
    "dimensions": Limit(
        "nisa.memset(dst=x.reshape((128, 2, 2, 2, 2, 4)), value=0.0)", "6 dimensions; an access pattern"
    ),
    "stride": Limit(
        "t = nl.ndarray((128, 65536), dtype=nl.uint8)\nnisa.memset(dst=t.ap([[65536, 128], [32768, 2]]), value=0)",
        "a stride of 32768 elements; the field has 15 bits",
    ),
    "sizes": Limit("nisa.tensor_copy(new, x[:, 0:32])", r"dst \[128, 64\], src \[128, 32\]"),
    "broadcasting": Limit("nisa.tensor_tensor(new, x, v, nl.add)", r"data2 \[128, 1\]"),
    "overlap": Limit("nisa.tensor_copy(x[:, 0:32], x[:, 1:33])", "dst overlaps tensor_copy src in part"),
    "written twice": Limit("nisa.memset(dst=x.ap([[64, 128], [0, 64]]), value=0.0)", "writes elements more than once"),
    "unwritten": Limit("nisa.tensor_copy(x, new)", "tensor_copy src is read before it was written"),
    "unwritten in part": Limit(
        "nisa.memset(dst=new[:, 0:63], value=0.0)\nnisa.tensor_copy(x, new)", "src is read before it was written"
    ),
    # engines
    "engine by number": Limit(
        "nisa.tensor_copy(new, x, engine=5)", "tensor_copy: engine must be one of nki.isa.engine"
    ),
    "engine without it": Limit(
        "nisa.memset(dst=new, value=0.0, engine=nisa.engine.scalar)", "memset does not run on engine scalar"
    ),
    "operator elsewhere": Limit(
        "nisa.tensor_tensor(new, x, y, nl.subtract, engine=nisa.engine.gpsimd)",
        "nl.subtract does not run on engine gpsimd",
    ),
    "engine too old": Limit("nisa.rng(i, engine=nisa.engine.gpsimd)", "rng on engine gpsimd needs NeuronCore-v3; trn1"),
    "sqrt of the vector engine": Limit(
        "nisa.tensor_scalar(new, x, nl.sqrt, None)", "none as an ALU operator, only in activation"
    ),
    "gpsimd and PSUM": Limit(
        "nisa.tensor_tensor(f, f, p, nl.add, engine=nisa.engine.gpsimd)", "the GpSimd Engine cannot access PSUM"
    ),
    # dma_copy
    "dma sizes": Limit("nisa.dma_copy(new, a[0:64])", "differ in the number of elements"),
    "dma descriptors": Limit("nisa.dma_copy(new, a, priority=0)", "dma_copy: priority=0 is not in the stand-in"),
    # tensor_reduce
    "reduced product": Limit(
        "nisa.tensor_reduce(v, nl.multiply, f, 1)", "nl.multiply is not in the stand-in, which has"
    ),
    "reduced axis": Limit("nisa.tensor_reduce(v, nl.maximum, f, 0)", "axis 0 of .*: the last one, which is not axis 0"),
    "reduced to": Limit("nisa.tensor_reduce(x, nl.maximum, f, 1)", "along 1 does not give"),
    # memset
    "memset kind": Limit("nisa.memset(dst=i, value=2.0)", "memset of .* needs a Python int, got 2.0"),
    "memset range": Limit("nisa.memset(dst=u, value=256)", "memset: 256 is no uint8"),
    # tensor_tensor, tensor_scalar, scalar_tensor_tensor
    "arity": Limit("nisa.tensor_tensor(new, x, y, nl.abs)", "nl.abs is not a binary operator"),
    "both in PSUM": Limit("nisa.tensor_tensor(f, p, p, nl.add)", "data1 and data2 cannot both be in PSUM"),
    "bitvec on floats": Limit("nisa.tensor_tensor(new, x, y, nl.bitwise_and)", "a bitvec operator needs integer types"),
    "bitvec cast": Limit("nisa.tensor_tensor(i, u, u, nl.bitwise_and)", "a bitvec operator does not cast"),
    "integers": Limit("nisa.tensor_tensor(i, i, i, nl.maximum)", "nl.maximum of integers on engine gpsimd"),
    "integer overflow": Limit(
        "nisa.memset(dst=i, value=2**31 - 1)\nnisa.tensor_tensor(i, i, i, nl.add)", "is beyond int32: whether it wraps"
    ),
    "shift": Limit("nisa.tensor_scalar(i, i, nl.right_shift, 32)", "a shift of 32-bit elements by 32 bits"),
    "maximum of a NaN": Limit(
        "nisa.memset(dst=f, value=float('nan'))\nnisa.tensor_tensor(f, f, f, nl.maximum)", "nl.maximum of a NaN"
    ),
    "operand1 alone": Limit("nisa.tensor_scalar(new, x, nl.add, 1.0, operand1=2.0)", "operand1 without op1"),
    "gpsimd scalars": Limit(
        "nisa.tensor_scalar(new, x, nl.add, 1.0, engine=nisa.engine.gpsimd)", "on engine gpsimd is for rsqrt alone"
    ),
    "mixed kinds": Limit(
        "nisa.tensor_scalar(i, i, nl.bitwise_and, 1, op1=nl.add, operand1=1.0)", "mixes bitvec and arithmetic operators"
    ),
    "bitvec operand": Limit("nisa.tensor_scalar(i, i, nl.bitwise_and, 1.0)", "nl.bitwise_and needs an int, got 1.0"),
    "bitvec operand size": Limit("nisa.tensor_scalar(u, u, nl.bitwise_and, 256)", "256 has more than 8 bits"),
    "unary operand": Limit("nisa.tensor_scalar(new, x, nl.abs, 1.0)", "a unary operator takes None or 0"),
    "vector operand in HBM": Limit("nisa.tensor_scalar(new, x, nl.add, a)", "operand0 must be in sbuf or psum"),
    "vector operand type": Limit("nisa.tensor_scalar(new, x, nl.add, x[:, 0:1])", "operand0 must be float32, got"),
    "vector operand shape": Limit("nisa.tensor_scalar(new, x, nl.add, v[0:1])", r"operand0 must have shape \(128, 1\)"),
    "operand": Limit("nisa.tensor_scalar(new, x, nl.add, None)", "operand0 must be a number or a tile of one element"),
    "bitvec and tiles": Limit(
        "nisa.scalar_tensor_tensor(i, i, nl.bitwise_and, 1, nl.add, i)", "scalar_tensor_tensor takes no bitvec operator"
    ),
    # activation, reciprocal
    "not an activation": Limit("nisa.activation(new, nl.add, x)", "nl.add is not an activation function"),
    "reduction": Limit(
        "nisa.activation(new, nl.copy, x, reduce_op=nl.add)", "activation: reduce_op=nl.add is not in the"
    ),
    "number as bias": Limit("nisa.activation(new, nl.copy, x, bias=1.0)", "activation: bias must be a tile, got 1.0"),
    "reciprocal bias": Limit(
        "nisa.activation(new, nl.reciprocal, x, bias=v)", "reciprocal takes no bias on NeuronCore-v2"
    ),
    "sqrt of 0": Limit(
        "nisa.activation(f, nl.sqrt, f, scale=0.0)", "nl.sqrt of 0.0 is invalid; its documented range is"
    ),
    "relu of a NaN": Limit(
        "nisa.memset(dst=f, value=float('nan'))\nnisa.activation(f, nl.relu, f)", "nl.relu of a NaN"
    ),
    "rsqrt of tiny": Limit("nisa.activation(f, nl.rsqrt, f, scale=2.0**-88)", r"nl.rsqrt .* range is \[6.46e-27"),
    "reciprocal of tiny": Limit("nisa.activation(f, nl.reciprocal, f, scale=-(2.0**-43))", r"range is \+-\[2.27e-13"),
    "reciprocal of 0": Limit(
        "nisa.memset(dst=f, value=0.0)\nnisa.reciprocal(f, f)", "reciprocal of 0, infinity or a NaN"
    ),
    "beyond its offsets": Limit("pass", "beyond 32 bits of offset", device={"addressed": 128 * 64 * 2 - 1}),
    # tensor_copy_predicated
    "predicate": Limit("nisa.tensor_copy_predicated(new, x, i)", "predicate must be uint8, uint16 or uint32"),
    "predicated types": Limit("nisa.tensor_copy_predicated(x, f, u)", "differ in type"),
    "predicated unwritten": Limit(
        "nisa.memset(dst=u, value=0)\nnisa.tensor_copy_predicated(new, x, u)", "keeps elements of .* never written"
    ),
    # what becomes of numbers
    "NaN to integer": Limit("nisa.memset(dst=f, value=float('nan'))\nnisa.tensor_copy(i, f)", "a NaN is cast to int32"),
    "overflow": Limit("nisa.memset(dst=new, value=3.4e38)", "is beyond bfloat16: whether the cast gives infinity"),
    "subnormal": Limit(
        "nisa.memset(dst=f, value=1e-39)", "a subnormal number: what becomes of it is", device={"subnormals": "refuse"}
    ),
    # random numbers
    "drawn floats": Limit("nisa.rng(f)", "rng: dst must be of an integer type"),
    "drawn by GpSimd": Limit(
        "nisa.rng(i, engine=nisa.engine.gpsimd)", "rng: the generator of the GpSimd Engine is not", "trn2"
    ),
    "drawn without a seed": Limit("nisa.rng(i)", "a random number before the generator is seeded"),
    "seeds of a tile": Limit("nisa.set_rng_seed(i)", r"set_rng_seed src_seeds must be a \[1, 1\] tile of 32 bits"),
}
"""The newer dialect: the body is followed by a store of x to out, which is returned."""

ENDS: dict[str, tuple[str, str]] = {
    "returns a tile": ("return x", "kernel returns .* as result 0; a kernel returns tensors in nl.shared_hbm"),
    "returns nothing": ("return None", "kernel returns None as result 0"),
    "never written": ("return out", "kernel never wrote all of result 0"),
    "input not returned": (
        "nisa.dma_copy(a, x)\nnisa.dma_copy(out, x)\nreturn out",
        "input a is written but not returned",
    ),
}
"""How a kernel ends."""

BETA1_LIMITS: dict[str, Limit] = {
    "drawn type": Limit("nl.rand((128, 64), nl.bfloat16)", "nl.rand of nl.bfloat16: its rounding is not in the st"),
    "mask": Limit("nl.load(a, mask=1)", "nl.load: masks are not in the stand-in"),
    "argument": Limit("nisa.reciprocal(f, buffer=nl.psum)", "reciprocal has no documented argument buffer"),
    "store shape": Limit("nl.store(out[0:64], value=x)", "nl.store of .* the shapes differ"),
    "read-modify-write": Limit(
        "nisa.dma_copy(dst=out, src=x, dst_rmw_op=nl.add)", "dma_copy: dst_rmw_op=nl.add is not in the"
    ),
    "promotion": Limit("nisa.tensor_tensor(x, f, nl.add)", "needs dtype=: inputs of two types are promoted"),
    "predicated dtype": Limit(
        "nisa.tensor_copy_predicated(src=f, dst=f, predicate=u, dtype=nl.bfloat16)",
        "dtype nl.bfloat16 and dst .* differ",
    ),
    "no tile": Limit("nisa.reciprocal(1.0)", "an instruction needs a tile, got 1.0"),
    "mask from an index": Limit("i_p * 64 + i_f < 5", "an index is compared: masks"),
    "loop variable decides": Limit(
        "for k in nl.affine_range(2):\n    if k == 0:\n        pass", "control flow that depends on an index"
    ),
    "index of an index": Limit("i_p[0]", r"an index is indexed with None and `:`, got \(0,\)"),
    "index dimensions": Limit("nl.arange(5)[:, :]", r"for an index of shape \(5,\)"),
    "sum of an index": Limit("i_p + 0.5", "an index plus 0.5 is not affine"),
    "index shapes": Limit("i_p + nl.arange(3)[:, None]", "do not broadcast"),
    "product of indices": Limit("i_p * i_f", "is not affine"),
    "empty arange": Limit("nl.arange(5, 5)", r"nl.arange\(5, 5\) is empty"),
    "loop variable modulo": Limit("for k in nl.affine_range(2):\n    k % 2", "expression that is not affine"),
    "index count": Limit("flat[i_p, i_f]", "2 indices for 1 dimensions"),
    "mixed indexing": Limit("a[i_p, 0:64]", "slices and nl.arange do not mix in one index"),
    "index range": Limit("flat[i_p * 64 + i_f + 1]", r"index range \[1, 8192\] of 8192"),
    "flat index": Limit("flat[nl.arange(128)]", r"write i\[:, None\] and j\[None, :\]"),
    "assignment": Limit("f[...] = x", "needs an on-chip tile of equal type and size"),
    "assignment of nothing": Limit(
        "f[...] = nl.ndarray((128, 64), dtype=nl.float32)", "only what the last instruction made"
    ),
    "assignment of a tile": Limit("x[...] = x", "only what the last instruction made, else it is one more"),
    "assignment to what is read": Limit(
        "x[:, 0:32] = nisa.tensor_copy(x[:, 1:33])", "dst overlaps a source in part: the order of access"
    ),
    "assignment across memories": Limit(
        "p = nl.ndarray((128, 64), dtype=nl.float32, buffer=nl.psum)\n"
        "p[...] = nisa.tensor_copy(f, engine=nisa.gpsimd_engine)",
        "tensor_copy: the GpSimd Engine cannot access PSUM",
    ),
    "ap": Limit("a.ap([[64, 128], [1, 64]])", "tensor.ap is not in neuronxcc.nki"),
    "grid": Limit("kernel[2, 2]", "launch grids are not in the stand-in"),
    "jit argument": Limit("nki.jit(kernel, debug=True)", "nki.jit: argument debug is not in the stand-in"),
    "ndarray argument": Limit(
        "nl.ndarray((128, 64), dtype=nl.bfloat16, init=0)", "argument init is not in the stand-in"
    ),
    "result made in a loop": Limit(
        "for k in nl.affine_range(2):\n    nl.ndarray((128, 64), dtype=nl.bfloat16, buffer=nl.shared_hbm)",
        "shared_hbm tensors are made at the kernel's top level",
    ),
    "affine_range argument": Limit("nl.affine_range(4, step=2)", "nl.affine_range has no documented argument by name"),
    "immutable input": Limit("nl.store(a, value=x)", "is an input that is not mutable; annotate it nt.mutable_tensor"),
}
"""The older dialect: the body is followed by a store of x to out, which is returned."""


MUTABLE: dict[str, tuple[str, str]] = {
    "never written": ("nl.store(out, value=x)\nreturn out, a", "input a is a mutable_tensor that is never written"),
    "not returned": ("nl.store(out, value=x)\nnl.store(a, value=x)\nreturn out", "a is written but not returned"),
}
"""The older dialect, with a as nt.mutable_tensor."""


def source(limit: Limit) -> str:
    """The kernel file of a limit of the newer dialect."""
    return HEAD + indent(limit.body, "    ") + TAIL


def ending(body: str) -> str:
    """The kernel file with another end."""
    return HEAD + indent(body, "    ")


def beta1_source(limit: Limit) -> str:
    """The kernel file of a limit of the older dialect."""
    return BETA1 + indent(limit.body, "    ") + BETA1_TAIL


def mutable(body: str) -> str:
    """The kernel file of the older dialect with another end, and a mutable input."""
    return BETA1.replace("(a)", "(a: nt.mutable_tensor)", 1) + indent(body, "    ")
