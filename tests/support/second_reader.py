"""A second reading of both dialects, written from their documentation and not from the stand-in.

It runs the text of a generated kernel with names that mean what SDK 2.26 documents of `neuronxcc.nki` (aws-neuron-sdk
at 49ee15c5, under general/nki: the stubs in api/nki/isa and api/nki/language, programming_model.rst), and SDK 2.32 of
`import nki` (at 81ce03ae, nki/api/nki/isa and nki/api/nki/language, and nki/get-started/about/lnc.rst). It has nothing
in common with `nki_standin`: tensors are NumPy arrays of raw words, a choice of elements is NumPy's own indexing, bf16
is rounded by `rint` in fp64 instead of on bits, and a tile that nothing has written is NaN. It checks no rule of the
language; what it shows is that two readers of the documentation get the same bits. Evidence level: independent
interpreter.

In the newer dialect destinations are arguments, HBM is addressed by access patterns, a compiled loop is a function of
its register, and a kernel may run on several cores.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from typing_extensions import Self

from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.lower import Kernel
from collage_neuron.passes.backends.nki.tiling import Cut

Array = np.ndarray[Any, Any]
F32 = np.float32
WORDS = {
    "float32": "<u4", "bfloat16": "<u2", "int32": "<i4", "int16": "<i2", "int8": "i1", "uint16": "<u2", "uint8": "u1",
}  # fmt: skip
"""How the elements of each type lie in memory, little-endian."""


def decoded(raw: Array, dtype: str) -> Array:
    """Elements as fp32, to which engines cast what they read; 32-bit integers to nearest even."""
    if dtype == "float32":
        return raw.view(F32)
    return (raw.astype("<u4") * np.uint32(65536)).view(F32) if dtype == "bfloat16" else raw.astype(F32)


def encoded(x: Array, dtype: str) -> Array:
    """fp32 numbers as elements, rounded once, to nearest even; integers saturate."""
    x = np.asarray(x, F32)
    if dtype == "float32":
        bits: Array = np.ascontiguousarray(x).view("<u4")
        return bits
    if dtype != "bfloat16":
        limits = np.iinfo(WORDS[dtype])
        whole: Array = np.clip(np.rint(x.astype(float)), limits.min, limits.max).astype(WORDS[dtype])
        return whole
    finite = np.where(np.isfinite(x), x, 0).astype(float)
    place = np.ldexp(1.0, np.maximum(np.frexp(finite)[1], -125) - 8)  # that of the last of 8 bits, or of a subnormal
    rounded = np.where(np.isfinite(x), np.rint(finite / place) * place, x)
    rounded = np.where(np.abs(rounded) >= 2.0**128, np.copysign(np.inf, rounded), rounded)
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        signed = np.copysign(rounded, x).astype(F32)
    words: Array = (signed.view("<u4") >> 16).astype("<u2")
    return words


class Tensor:
    """The part of an array of words that `key` chooses: to be read, or to be written to."""

    def __init__(self, words: Array, dtype: str, key: Any = ...) -> None:
        self.words, self.dtype, self.key = words, dtype, key

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.raw.shape)

    @property
    def raw(self) -> Array:
        part: Array = self.words[self.key]
        return part

    @property
    def numbers(self) -> Array:
        return decoded(self.raw, self.dtype)

    def __getitem__(self, key: Any) -> Self:
        return type(self)(self.raw, self.dtype, key)

    def __setitem__(self, key: Any, value: Tensor) -> None:
        """`tile[key] = instruction`: what it made lies here (nki.isa, tensor_copy: "assigned to a pre-declared")."""
        assert value.dtype == self.dtype
        self.words[key] = value.raw.reshape(self.words[key].shape)

    def reshape(self, shape: Sequence[int]) -> Self:
        part = self.raw.reshape(shape)
        assert np.shares_memory(part, self.words)
        return type(self)(part, self.dtype)

    def view(self, dtype: str) -> Tensor:
        """The same bytes as elements of another type, along the last dimension."""
        return Tensor(self.raw.view(WORDS[dtype]), dtype)


def _made(x: Array, dtype: str) -> Tensor:
    return Tensor(encoded(x, dtype), dtype)


def _empty(shape: Sequence[int], dtype: str, **_: Any) -> Tensor:
    return Tensor(np.full(shape, -1, WORDS[dtype].replace("u", "i")).view(WORDS[dtype]), dtype)  # all ones: NaN


ALU: dict[str, Callable[..., Any]] = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "less": np.less, "less_equal": np.less_equal, "greater": np.greater, "greater_equal": np.greater_equal,
    "equal": np.equal, "not_equal": np.not_equal, "logical_and": np.logical_and, "logical_or": np.logical_or,
    "power": np.power, "abs": lambda x, *_: np.abs(x), "copy": lambda x: x, "sqrt": np.sqrt, "square": np.square,
    "relu": lambda x: np.maximum(x, F32(0)),
    "reciprocal": lambda x: F32(1) / x, "exp": np.exp, "log": np.log, "sign": np.sign,
    "bitwise_and": np.bitwise_and, "bitwise_xor": np.bitwise_xor, "right_shift": lambda x, n: x.view("<u4") >> n,
}  # fmt: skip
"""Operators; all but those on bits take and give fp32."""


def _on_bits(op: str) -> bool:
    return op.startswith("bitwise") or op == "right_shift"


def _stepped(x: Array, op: str | None, y: Any, reverse: bool, dtype: str) -> Array:
    """One operator of an instruction: in fp32, or on words as they are."""
    if op is None:
        return x
    if _on_bits(op):
        return ALU[op](x, y).astype(WORDS[dtype])  # type: ignore[no-any-return]
    y = y.numbers if isinstance(y, Tensor) else F32(y)
    return ALU[op](*((y, x) if reverse else (x, y))).astype(F32)  # type: ignore[no-any-return]


def _scalars(
    data: Tensor, op0: str, operand0: Any, reverse0: bool = False, op1: str | None = None, operand1: Any = None,
    reverse1: bool = False, *, dtype: str, engine: str = "",
) -> Tensor:  # fmt: skip
    """tensor_scalar and scalar_tensor_tensor: (data op0 operand0) op1 operand1."""
    x = _stepped(data.raw if _on_bits(op0) else data.numbers, op0, operand0, reverse0, data.dtype)
    x = _stepped(x, op1, operand1, reverse1, data.dtype)
    return Tensor(x.view(WORDS[dtype]), dtype) if _on_bits(op0) else _made(x, dtype)


def _activation(op: str, data: Tensor, bias: Any = None, scale: Any = 1.0, *, dtype: str) -> Tensor:
    """Copies do not add their bias: so it was reported of trn1, which alone runs this dialect (aws-neuron-sdk#1296)."""
    x = data.numbers * (scale.numbers if isinstance(scale, Tensor) else F32(scale))
    return _made(ALU[op](x if bias is None or op == "copy" else x + bias.numbers), dtype)


def _copied(src: Tensor, dtype: str, engine: str = "") -> Tensor:
    """Bit-accurate between equal types, else through fp32."""
    return Tensor(src.raw.copy(), dtype) if dtype == src.dtype else _made(src.numbers, dtype)


def _chosen(*, dst: Tensor, src: Any, predicate: Tensor) -> None:
    source = src.raw if isinstance(src, Tensor) else encoded(np.full((), src, F32), dst.dtype)
    dst.words[dst.key] = np.where(predicate.raw != 0, source, dst.raw)


def _reduced(op: str, data: Tensor, axis: int, *, dtype: str) -> Tensor:
    return _made(ALU[op].reduce(data.numbers, axis=axis, keepdims=True, dtype=F32), dtype)  # type: ignore[attr-defined]


def _filled(shape: Sequence[int], value: Any, dtype: str, engine: str = "") -> Tensor:
    bits = isinstance(value, int)
    return Tensor(np.full(shape, value, WORDS[dtype]), dtype) if bits else _made(np.full(shape, value, F32), dtype)


def _stored(dst: Tensor, value: Tensor) -> None:
    assert dst.dtype == value.dtype
    dst.words[dst.key] = value.raw


def _in_any_order(n: int) -> Iterator[int]:
    """`affine_range`: iterations do not depend on each other."""
    return iter(random.Random(n).sample(range(n), n))


ISA: dict[str, Any] = {
    "tensor_tensor": lambda data1, data2, op, dtype, engine="": _made(ALU[op](data1.numbers, data2.numbers), dtype),
    "tensor_scalar": _scalars, "scalar_tensor_tensor": _scalars, "activation": _activation, "tensor_copy": _copied,
    "reciprocal": lambda data, dtype: _made(F32(1) / data.numbers, dtype), "tensor_copy_predicated": _chosen,
    "tensor_reduce": _reduced, "memset": _filled, **{f"{e}_engine": e for e in ("vector", "scalar", "gpsimd")},
}  # fmt: skip
LANGUAGE: dict[str, Any] = {
    **{name: name for name in (*ALU, *WORDS)}, "sbuf": "sbuf", "psum": "psum", "par_dim": int, "arange": np.arange,
    "affine_range": _in_any_order, "ndarray": _empty, "store": _stored,
    "load": lambda src: Tensor(src.raw.copy(), src.dtype), "random_seed": lambda seed: None,
}  # fmt: skip


class Reading(NamedTuple):
    """What a text defines, and the random numbers that are drawn, in order: 32 bits, of which the first 24 count."""

    module: dict[str, Any]
    drawn: list[Array]


def _executed(text: str, nki: Any, modules: Mapping[str, Any], drawn: list[Array]) -> Reading:
    """What a kernel's text defines where these modules can be imported."""
    vars(nki).update(jit=lambda f: f, **{name.rpartition(".")[2]: part for name, part in modules.items()})
    module: dict[str, Any] = {}
    package = {"neuronxcc": SimpleNamespace(nki=nki)}
    with mock.patch.dict(sys.modules, {nki.__name__: nki, **package, **modules}), np.errstate(all="ignore"):
        exec(compile(text, "kernel", "exec"), module)
    return Reading(module, drawn)


def read_older(text: str, drawn: Sequence[Array] = ()) -> Reading:
    """Runs a kernel's text of the older dialect; its functions take and return `Tensor`."""
    left = list(drawn)
    uniform = lambda shape, dtype: _made((left.pop(0) >> 8).astype(F32).reshape(shape) * F32(2.0**-24), dtype)  # noqa: E731
    parts: dict[str, Any] = {"isa": ISA, "language": {**LANGUAGE, "rand": uniform}, "typing": {"mutable_tensor": None}}
    modules = {f"neuronxcc.nki.{name}": SimpleNamespace(**members) for name, members in parts.items()}
    return _executed(text, ModuleType("neuronxcc.nki"), modules, left)


class InHbm(Tensor):
    """A tensor in HBM, or a part of one."""

    def ap(
        self, pattern: Sequence[Sequence[int]], offset: int = 0, scalar_offset: int | None = None, indirect_dim: int = 0
    ) -> InHbm:
        """[[step, number], ...] elements from an offset on; a register counts along one dimension of the tensor."""
        flat = self.raw.reshape(-1)
        assert np.shares_memory(flat, self.words)
        start = offset + (scalar_offset or 0) * prod(self.shape[indirect_dim + 1 :])
        assert start + sum(step * (n - 1) for step, n in pattern) < flat.size, "out of bounds"
        strides = tuple(step * flat.itemsize for step, _ in pattern)
        shape = tuple(n for _, n in pattern)
        return InHbm(np.lib.stride_tricks.as_strided(flat[start:], shape, strides), self.dtype)


def _put(dst: Tensor, made: Tensor) -> None:
    dst.words[dst.key] = made.raw.reshape(dst.shape)


def _into(function: Callable[..., Any]) -> Callable[..., Any]:
    """An instruction that returns its result, as one that writes it to `dst`."""
    return lambda dst, **given: _put(dst, function(**given, dtype=dst.dtype))


def _adding(op: str, data: Tensor, bias: Any = None, scale: Any = 1.0, *, dtype: str) -> Tensor:
    """func(data * scale + bias): of every function, but on trn1."""
    x = data.numbers * (scale.numbers if isinstance(scale, Tensor) else F32(scale))
    return Tensor(encoded(ALU[op](x if bias is None else x + bias.numbers), dtype), dtype)


def _fori_loop(lower: int, upper: int, body: Callable[[int], None], step: int = 1) -> None:
    """Turns depend on nothing of each other: here in any order."""
    turns = range(lower, upper, step)
    for i in random.Random(len(turns)).sample(turns, len(turns)):
        body(i)


def read(text: str, target: str, drawn: Sequence[Array] = (), core: int = 0, cores: int = 1) -> Reading:
    """Runs a kernel's text for one of so many cores; its functions take and return `Tensor`."""
    left = list(drawn)

    def rng(dst: Tensor, engine: str) -> None:
        """The least significant bits of 32."""
        _put(dst, Tensor(left.pop(0).astype(WORDS[dst.dtype]), dst.dtype))

    both = ("tensor_tensor", "tensor_scalar", "scalar_tensor_tensor", "tensor_copy", "reciprocal", "tensor_reduce")
    activation = ISA["activation"] if target == "trn1" else _adding
    isa = {
        **{name: _into(ISA[name]) for name in both}, "activation": _into(activation), "rng": rng,
        "memset": lambda dst, value, engine: _put(dst, ISA["memset"](dst.shape, value, dst.dtype)),
        "dma_copy": _into(ISA["tensor_copy"]), "tensor_copy_predicated": ISA["tensor_copy_predicated"],
        "set_rng_seed": lambda src_seeds: None, "engine": SimpleNamespace(vector="", scalar="", gpsimd=""),
    }  # fmt: skip
    language = LANGUAGE | {
        "fori_loop": _fori_loop, "program_id": lambda axis=0: core, "num_programs": lambda axes=0: cores,
    }  # fmt: skip
    modules = {"nki.isa": SimpleNamespace(**isa), "nki.language": SimpleNamespace(**language)}
    return _executed(text, ModuleType("nki"), modules, left)


def tensor(x: torch.Tensor) -> Tensor:
    """A copy of a torch tensor, in HBM."""
    dtype = str(x.dtype).removeprefix("torch.")
    words = x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]).numpy().copy()
    return InHbm(words.view(WORDS[dtype]), dtype)


def back(x: Tensor, shape: Sequence[int]) -> torch.Tensor:
    signed = x.raw.view(f"i{x.raw.itemsize}").copy()
    return torch.from_numpy(signed).view(getattr(torch, x.dtype)).view(tuple(shape))


def _read(k: Kernel, source: str, drawn: Sequence[Array], core: int, cores: int) -> Reading:
    if k.dialect == "nki":
        return read(source, k.target, drawn, core, cores)
    return read_older(source, drawn)


def results(
    k: Kernel, components: Mapping[str, torch.Tensor], vector: torch.Tensor, cut: Cut | None = None,
    drawn: Sequence[Array] = (), source: str = "", order: Sequence[int] = (0,),
) -> dict[str, torch.Tensor]:  # fmt: skip
    """What the text of a kernel makes of copies of the components, by key, as the second reader takes it.

    `order` are the cores that run it, one after the other; what they draw is in the same order.
    """
    like = next(components[a.key] for a in k.arguments if not a.block and a.key in components)
    cut = cut or k.cut(like.shape)
    room = {a.key: torch.zeros(like.shape, dtype=getattr(torch, a.dtype)) for a in k.arguments}
    room |= {MEASURES: torch.zeros(k.totals(like.shape, cut))} if MEASURES in room else {}
    given = room | {key: components[key] for key in components if key in room}
    arguments = [tensor(given[a.key]) for a in k.arguments]
    numbers = [tensor(k.scalar_input(vector))] if k.plan.columns else []
    numbers += [tensor(torch.ones(1, len(order), dtype=torch.int32))] if k.plan.draws else []
    for core in order:
        reading = _read(k, source or k.source, drawn, core, len(order))
        with np.errstate(all="ignore"):
            returned = reading.module[k.name](*arguments, *numbers, *k.cut_arguments(like.numel(), cut))
        drawn = reading.drawn
    returned = returned if isinstance(returned, tuple) else (returned,)
    assert not drawn
    return {key: back(x, given[key].shape) for key, x in zip(k.outputs, returned, strict=True)}
