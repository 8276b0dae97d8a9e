"""What each instruction does, in the form of the current API: dst first, every operand checked, one rounding.

Names, parameters and defaults are those of `nki.isa` (SDK 2.32), in the words of its page (`DOCUMENTED`). Both
dialects run these.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from nki_standin import enums
from nki_standin.alu import WORDS, activate, arithmetic, bitvec, bitvec_scalar, check_bitvec, extreme, step, total
from nki_standin.dtypes import BFLOAT16, FLOAT32, Array
from nki_standin.enums import engine
from nki_standin.errors import fail, require
from nki_standin.legality import (
    ENGINES,
    check_distinct,
    check_engine,
    check_gpsimd,
    check_not_both_psum,
    check_operator,
    check_overlap,
    check_sizes,
    check_tile,
)
from nki_standin.machine import Machine
from nki_standin.operators import OPERATORS, Operator, operator
from nki_standin.tensors import HBM, MemoryRegion, NkiTensor

Function = Callable[..., Any]

DOCUMENTED = {
    "dma_copy": "dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown, engine=engine.unknown, "
    "name=None",
    "tensor_copy": "dst, src, engine=engine.unknown, name=None",
    "memset": "dst, value, engine=engine.unknown, name=None",
    "tensor_tensor": "dst, data1, data2, op, engine=engine.unknown, name=None",
    "tensor_scalar": "dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, "
    "engine=engine.unknown, name=None",
    "scalar_tensor_tensor": "dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, name=None",
    "activation": "dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=reduce_cmd.idle, "
    "name=None",
    "reciprocal": "dst, data, name=None",
    "tensor_copy_predicated": "dst, src, predicate, reverse_pred=False, name=None",
    "tensor_reduce": "dst, op, data, axis, negate=False, keepdims=False, name=None",
    "rng": "dst, engine=engine.vector, name=None",
    "set_rng_seed": "src_seeds, name=None",
}
"""The parameters of each instruction of `nki.isa` (SDK 2.32), in the words of its page."""


def signature_of(words: str) -> inspect.Signature:
    """The signature that has these documented parameters."""
    scope: dict[str, Any] = {}
    exec(f"def documented({words}): ...", dict(vars(enums)), scope)
    return inspect.signature(scope["documented"])


def taken(
    name: str, operands: Mapping[str, Any], documented: inspect.Signature, known: Collection[str]
) -> dict[str, Any]:
    """The operands that an implementation knows; of the others only the defaults are in the stand-in."""
    for key, x in operands.items():
        if not (key in known or key == "name" or x == documented.parameters[key].default):
            fail(f"{name}: {key}={x!r} is not in the stand-in")
    return {key: x for key, x in operands.items() if key in known}


def functions(machine: Machine) -> dict[str, Function]:
    """The functions of `nki.isa` on a machine, by name, with their documented parameters."""
    return {name: _function(name, signature_of(words), Instructions(machine)) for name, words in DOCUMENTED.items()}


def _function(name: str, documented: inspect.Signature, instructions: Instructions) -> Function:
    implementation = getattr(instructions, name)
    known = inspect.signature(implementation).parameters

    def run(*args: Any, **kwargs: Any) -> None:
        given = documented.bind(*args, **kwargs)
        given.apply_defaults()
        implementation(**taken(name, given.arguments, documented, known))

    run.__signature__ = documented  # type: ignore[attr-defined]
    return run


class Instructions:
    """The instructions of one machine."""

    def __init__(self, machine: Machine) -> None:
        self._m = machine

    def dma_copy(self, dst: NkiTensor, src: NkiTensor) -> None:
        """Between HBM and SBUF: bytes where the types are equal, else through fp32."""
        for t, what in ((dst, "dma_copy dst"), (src, "dma_copy src")):
            check_tile(t, what, (*HBM, MemoryRegion.sbuf), dma=True)
        if dst.size != src.size:
            fail(f"dma_copy: {src!r} and {dst!r} differ in the number of elements")
        check_distinct(dst)
        check_overlap(dst, src, "dma_copy src")
        for t in (x for x in (dst, src) if x.buffer in HBM):
            last = t.offset + sum((n - 1) * stride for n, stride in zip(t.shape, t.strides, strict=True))
            reached = (last + 1) * t.dtype.size
            if reached > self._m.device.addressed:
                fail(f"dma_copy reaches byte {reached} of {t!r}, beyond 32 bits of offset")
        if dst.dtype is src.dtype and dst.bits().dtype == src.bits().dtype:
            self._m.write_bits(dst, self._m.read_bits(src, "dma_copy src"))
        else:
            self._m.write(dst, self._m.read(src, "dma_copy src"))
        self._m.trace.add("dma_copy", "dma", (), [dst, src])

    def tensor_copy(self, dst: NkiTensor, src: NkiTensor, engine: Any) -> None:
        """dst = src: bits where the types are equal, else through fp32."""
        where = self._engine("tensor_copy", engine)
        self._check(where, "tensor_copy", dst, src=src)
        if dst.dtype is src.dtype:
            self._m.write_bits(dst, self._m.read_bits(src, "tensor_copy src"))
        else:
            self._m.write(dst, self._m.read(src, "tensor_copy src"))
        self._m.trace.add("tensor_copy", where, (), [dst, src])

    def memset(self, dst: NkiTensor, value: Any, engine: Any) -> None:
        """Every element of dst = value, a Python number of dst's kind."""
        where = self._engine("memset", engine)
        self._check(where, "memset", dst)
        kind = float if dst.dtype.is_float else int
        same = isinstance(value, (kind, np.floating if kind is float else np.integer)) and not isinstance(value, bool)
        require(same, f"memset of {dst!r} needs a Python {kind.__name__}, got {value!r}")
        if dst.dtype.is_float:
            self._m.write(dst, np.full(dst.elements, value, np.float32))
        else:
            limits = np.iinfo(dst.dtype.storage)
            require(limits.min <= value <= limits.max, f"memset: {value} is no {dst.dtype.name}")
            self._m.write_bits(dst, np.full(dst.shape, value, dst.dtype.storage))
        self._m.trace.add("memset", where, (), [dst])

    def tensor_tensor(self, dst: NkiTensor, data1: NkiTensor, data2: NkiTensor, op: Any, engine: Any) -> None:
        """dst = data1 op data2."""
        op = self._binary(op, "tensor_tensor")
        tiles = (dst, data1, data2)
        integer = all(getattr(t, "dtype", None) in WORDS for t in tiles) and not op.bitvec
        in_psum = any(getattr(t, "buffer", None) is MemoryRegion.psum for t in tiles)
        preferred = "gpsimd" if op.name == "power" or (integer and not in_psum) else "vector"
        where = self._engine("tensor_tensor", engine, preferred)
        self._check(where, "tensor_tensor", dst, data1=data1, data2=data2)
        check_not_both_psum(data1, data2, "tensor_tensor: data1 and data2")
        if integer and where == "gpsimd":
            a, b = self._bits(data1, "tensor_tensor data1"), self._bits(data2, "tensor_tensor data2")
            self._m.write_bits(dst, arithmetic(op, dst, a, b))
        else:
            check_operator(op, "tensor_tensor", where, self._m.target)
            if op.bitvec:
                check_bitvec("tensor_tensor", tiles)
                a, b = self._bits(data1, "tensor_tensor data1"), self._bits(data2, "tensor_tensor data2")
                self._m.write_bits(dst, bitvec(op, a, b).view(dst.dtype.storage))
            else:
                a, b = self._m.read(data1, "tensor_tensor data1"), self._m.read(data2, "tensor_tensor data2")
                self._m.write(dst, step(op, self._m.device, a, b))
        self._m.trace.add("tensor_tensor", where, [op.name], tiles)

    def tensor_scalar(
        self, dst: NkiTensor, data: NkiTensor, op0: Any, operand0: Any, reverse0: bool,
        op1: Any, operand1: Any, reverse1: bool, engine: Any,
    ) -> None:  # fmt: skip
        """dst = (data op0 operand0) op1 operand1, with one rounding at the end."""
        ops = [operator(op, "tensor_scalar") for op in (op0, op1) if op is not None]
        require(op1 is not None or operand1 is None, "tensor_scalar: operand1 without op1")
        preferred = "gpsimd" if any(op.name == "rsqrt" for op in ops) else "vector"
        where = self._engine("tensor_scalar", engine, preferred)
        self._check(where, "tensor_scalar", dst, data=data)
        names = tuple(op.name for op in ops)
        if where == "gpsimd":
            require(names == ("rsqrt",), f"tensor_scalar on engine gpsimd is for rsqrt alone, got {ops}")
        for op in ops:
            check_operator(op, "tensor_scalar", where, self._m.target)
        require(len({op.bitvec for op in ops}) == 1, f"tensor_scalar: {ops} mixes bitvec and arithmetic operators")
        pairs = [(ops[0], operand0, reverse0), *([(ops[1], operand1, reverse1)] if op1 is not None else [])]
        if ops[0].bitvec:
            check_bitvec("tensor_scalar", (dst, data))
            bits = self._bits(data, "tensor_scalar data")
            for op, operand, reverse in pairs:
                bits = bitvec_scalar(op, bits, operand, reverse)
            self._m.write_bits(dst, bits.view(dst.dtype.storage))
        else:
            x = self._m.read(data, "tensor_scalar data")
            for i, (op, operand, reverse) in enumerate(pairs):
                x = self._scalar_step(op, x, operand, reverse, data, f"tensor_scalar operand{i}")
            self._m.write(dst, x)
        vectors = [x for x in (operand0, operand1) if isinstance(x, NkiTensor)]
        self._m.trace.add("tensor_scalar", where, names, [dst, data], vectors)

    def scalar_tensor_tensor(
        self, dst: NkiTensor, data: NkiTensor, op0: Any, operand0: Any, op1: Any,
        operand1: NkiTensor, reverse0: bool, reverse1: bool,
    ) -> None:  # fmt: skip
        """dst = (data op0 operand0) op1 operand1: operand0 a number or vector, operand1 a tile; one rounding."""
        op0, op1 = (self._binary(op, "scalar_tensor_tensor") for op in (op0, op1))
        self._check("vector", "scalar_tensor_tensor", dst, data=data, operand1=operand1)
        check_not_both_psum(data, operand1, "scalar_tensor_tensor: data and operand1")
        require(not (op0.bitvec or op1.bitvec), "scalar_tensor_tensor takes no bitvec operator")
        for op in (op0, op1):
            check_operator(op, "scalar_tensor_tensor", "vector", self._m.target)
        x = self._m.read(data, "scalar_tensor_tensor data")
        x = self._scalar_step(op0, x, operand0, reverse0, data, "scalar_tensor_tensor operand0")
        y = self._m.read(operand1, "scalar_tensor_tensor operand1")
        self._m.write(dst, step(op1, self._m.device, *((y, x) if reverse1 else (x, y))))
        vectors = [operand0] if isinstance(operand0, NkiTensor) else []
        self._m.trace.add("scalar_tensor_tensor", "vector", [op0.name, op1.name], [dst, data, operand1], vectors)

    def activation(self, dst: NkiTensor, op: Any, data: NkiTensor, bias: Any, scale: Any) -> None:
        """dst = op(data * scale + bias), with one rounding at the end."""
        op = operator(op, "activation")
        require(op.domain is not None, f"activation: {op} is not an activation function")
        self._check("scalar", "activation", dst, data=data)
        # From NeuronCore-v3 on there are both, which no kernel of ours needs.
        require(bias is None or isinstance(bias, NkiTensor), f"activation: bias must be a tile, got {bias!r}")
        require(bias is None or op.name != "reciprocal", "activation: reciprocal takes no bias on NeuronCore-v2")
        device, x = self._m.device, self._m.read(data, "activation data")
        if not (isinstance(scale, (int, float)) and scale == 1):
            x = step(OPERATORS["multiply"], device, x, self._m.vector(scale, data, "activation scale"))
        if bias is not None and op.name not in device.drops_bias:
            types = (FLOAT32, BFLOAT16)
            x = step(OPERATORS["add"], device, x, self._m.vector(bias, data, "activation bias", types))
        self._m.write(dst, activate(op, device, x, "activation"))
        vectors = [x for x in (scale, bias) if isinstance(x, NkiTensor)]
        self._m.trace.add("activation", "scalar", [op.name], [dst, data], vectors)

    def reciprocal(self, dst: NkiTensor, data: NkiTensor) -> None:
        """dst = 1 / data on the Vector Engine."""
        self._check("vector", "reciprocal", dst, data=data)
        x = self._m.read(data, "reciprocal data")
        require(
            np.isfinite(x).all() and (x != 0).all(), "reciprocal of 0, infinity or a NaN: the result is undocumented"
        )
        self._m.write(dst, step(OPERATORS["reciprocal"], self._m.device, x))
        self._m.trace.add("reciprocal", "vector", ["reciprocal"], [dst, data])

    def tensor_copy_predicated(self, dst: NkiTensor, src: NkiTensor, predicate: NkiTensor) -> None:
        """dst = src where predicate; dst stays as it is elsewhere."""
        self._check("vector", "tensor_copy_predicated", dst, predicate=predicate, src=src)
        allowed = predicate.dtype.name in ("uint8", "uint16", "uint32")
        require(allowed, f"tensor_copy_predicated: predicate must be uint8, uint16 or uint32, it is {predicate!r}")
        chosen = (self._bits(predicate, "predicate") != 0).reshape(dst.shape)
        require(src.dtype is dst.dtype, f"tensor_copy_predicated: src {src!r} and dst {dst!r} differ in type")
        check_not_both_psum(src, predicate, "tensor_copy_predicated: src and predicate")
        require(
            (dst.written.all(-1) | chosen).all(),
            f"tensor_copy_predicated keeps elements of {dst!r} that were never written",
        )
        self._m.write_bits(dst, np.where(chosen, self._bits(src, "src").reshape(dst.shape), dst.bits()))
        self._m.trace.add("tensor_copy_predicated", "vector", (), [dst, predicate, src])

    def tensor_reduce(self, dst: NkiTensor, op: Any, data: NkiTensor, axis: Any) -> None:
        """dst = the largest element along the last dimension of data, or the sum, in `device.order`."""
        op = self._binary(op, "tensor_reduce")
        for t, what in ((dst, "tensor_reduce dst"), (data, "tensor_reduce data")):
            check_tile(t, what)
        check_operator(op, "tensor_reduce", "vector", self._m.target)
        known = ("maximum", "add")
        require(op.name in known, f"tensor_reduce: {op} is not in the stand-in, which has {', '.join(known)}")
        require(axis == data.ndim - 1 > 0, f"tensor_reduce: axis {axis} of {data!r}: the last one, which is not axis 0")
        x = self._m.read(data, "tensor_reduce data").reshape(data.shape[0], -1, data.shape[-1])
        require(dst.elements == x.shape[:2], f"tensor_reduce of {data!r} along {axis} does not give {dst!r}")
        check_distinct(dst)
        check_overlap(dst, data, "tensor_reduce data")
        x = total(self._m.device, x) if op.name == "add" else extreme(op, self._m.device, x)
        self._m.write(dst, x)
        self._m.trace.add("tensor_reduce", "vector", [op.name], [dst, data])

    def rng(self, dst: NkiTensor, engine: Any) -> None:
        """dst = random bits: of 32 for each element those that fit, the least significant ones."""
        where = self._engine("rng", engine)
        check_tile(dst, "rng dst")
        require(not dst.dtype.is_float, f"rng: dst must be of an integer type, got {dst!r}")
        require(where == "vector", "rng: the generator of the GpSimd Engine is not in the stand-in")
        bits = self._m.draw(dst.shape)
        self._m.write_bits(dst, bits.astype(f"u{dst.dtype.size}").view(dst.dtype.storage))
        self._m.trace.add("rng", where, (), [dst])

    def set_rng_seed(self, src_seeds: NkiTensor) -> None:
        """Seeds the generator of the Vector Engine."""
        check_tile(src_seeds, "set_rng_seed src_seeds")
        self._m.seed(src_seeds, "set_rng_seed src_seeds")
        self._m.trace.add("set_rng_seed", "vector", (), [src_seeds])

    def _engine(self, instruction: str, chosen: object, preferred: str = "") -> str:
        """The engine an instruction runs on: the chosen one, else the preferred, else the first of the table."""
        require(isinstance(chosen, engine), f"{instruction}: engine must be one of nki.isa.engine, got {chosen!r}")
        assert isinstance(chosen, engine)
        name = chosen.name if chosen is not engine.unknown else preferred or next(iter(ENGINES[instruction]))
        check_engine(instruction, name, self._m.target)
        return name

    def _check(self, where: str, instruction: str, dst: NkiTensor, **sources: NkiTensor) -> None:
        """What holds for all instructions that go element by element."""
        tiles = {"dst": dst, **sources}
        for name, t in tiles.items():
            check_tile(t, f"{instruction} {name}")
        check_sizes(tiles)
        check_distinct(dst)
        for name, t in sources.items():
            check_overlap(dst, t, f"{instruction} {name}")
        if where == "gpsimd":
            check_gpsimd(list(tiles.values()), instruction)

    def _binary(self, op: object, instruction: str) -> Operator:
        token = operator(op, instruction)
        require(token.arity == 2, f"{instruction}: {token} is not a binary operator")
        return token

    def _bits(self, t: NkiTensor, what: str) -> Array:
        return np.ascontiguousarray(self._m.read_bits(t, what)).reshape(t.elements)

    def _scalar_step(self, op: Operator, x: Array, operand: Any, reverse: bool, data: NkiTensor, what: str) -> Array:
        if op.arity == 1:
            require(operand is None or operand == 0, f"{what}: a unary operator takes None or 0")
            return step(op, self._m.device, x)
        y = self._m.vector(operand, data, what)
        return step(op, self._m.device, *((y, x) if reverse else (x, y)))
