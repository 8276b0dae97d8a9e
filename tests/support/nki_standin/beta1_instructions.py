"""The instructions of the older dialect: each returns a new SBUF tile of `dtype`, computed by the newer one's.

`DOCUMENTED` has the parameters of SDK 2.26. Without `dtype` the tile has the type of its input, as documented;
`tensor_tensor` then needs inputs of one type.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_standin.dtypes import FLOAT32, DType
from nki_standin.errors import fail, require
from nki_standin.instructions import Instructions, signature_of, taken
from nki_standin.legality import check_tile
from nki_standin.machine import Machine
from nki_standin.tensors import HBM, MemoryRegion, NkiTensor

Tile = NkiTensor
SBUF = MemoryRegion.sbuf

DOCUMENTED = {
    "dma_copy": "*, dst, src, mask=None, dst_rmw_op=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown",
    "tensor_copy": "src, *, mask=None, dtype=None, engine=engine.unknown, **kwargs",
    "memset": "shape, value, dtype, *, mask=None, engine=engine.unknown, **kwargs",
    "tensor_tensor": "data1, data2, op, *, dtype=None, mask=None, engine=engine.unknown, **kwargs",
    "tensor_scalar": "data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, *, dtype=None, "
    "mask=None, engine=engine.unknown, **kwargs",
    "scalar_tensor_tensor": "*, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, dtype=None, "
    "mask=None, **kwargs",
    "activation": "op, data, *, bias=None, scale=1.0, reduce_op=None, reduce_res=None, reduce_cmd=reduce_cmd.idle, "
    "mask=None, dtype=None, **kwargs",
    "reciprocal": "data, *, dtype=None, mask=None, **kwargs",
    "tensor_copy_predicated": "*, src, dst, predicate, reverse_pred=False, mask=None, dtype=None, **kwargs",
    "tensor_reduce": "op, data, axis, *, mask=None, dtype=None, negate=False, keepdims=False, **kwargs",
}
"""The parameters of each instruction of `nki.isa`, in the words of its page."""


def instructions(machine: Machine) -> dict[str, Callable[..., Any]]:
    """The functions of `nki.isa` on a machine, by name."""
    return {name: _instruction(machine, name) for name in DOCUMENTED}


def _instruction(machine: Machine, name: str) -> Callable[..., Any]:
    documented, newer = signature_of(DOCUMENTED[name]), getattr(Instructions(machine), name)
    known = inspect.signature(newer).parameters

    def run(*args: Any, **kwargs: Any) -> Tile | None:
        given = documented.bind(*args, **kwargs)
        given.apply_defaults()
        operands = dict(given.arguments)
        plain(name, operands.pop("mask"), operands.pop("kwargs", {}))
        made = None if "dst" in operands else _made(machine, name, operands)
        if name == "tensor_copy_predicated":
            dtype, dst = operands.pop("dtype"), operands["dst"]
            require(dtype is None or dtype is dst.dtype, f"{name}: dtype {dtype} and dst {dst!r} differ")
        newer(**taken(name, operands, documented, known), **({} if made is None else {"dst": made}))
        return made

    run.__signature__ = documented  # type: ignore[attr-defined]
    return run


def _made(machine: Machine, name: str, operands: dict[str, Any]) -> Tile:
    """The tile that an instruction returns; what says its shape and type is taken out of the operands."""
    dtype = operands.pop("dtype")
    if name == "memset":
        return machine.allocate(operands.pop("shape"), dtype, SBUF)
    like = next(operands[key] for key in ("src", "data1", "data") if key in operands)
    if not isinstance(like, NkiTensor):
        fail(f"an instruction needs a tile, got {like!r}")
    if name == "tensor_tensor":
        other = operands["data2"]
        check_tile(other, "tensor_tensor data2")
        same = dtype is not None or like.dtype is other.dtype
        require(same, f"tensor_tensor of {like!r} and {other!r} needs dtype=: inputs of two types are promoted")
    return machine.allocate(_shape(name, like), dtype or like.dtype, SBUF)


def _shape(name: str, like: Tile) -> Sequence[int]:
    if name != "tensor_reduce":
        return like.shape
    return like.shape[:-1] if like.ndim > 2 else (like.shape[0], 1)


def plain(instruction: str, mask: Any, kwargs: dict[str, Any]) -> None:
    """Fails where a mask is given, or an argument that is not documented."""
    require(mask is None, f"{instruction}: masks are not in the stand-in")
    require(not kwargs, f"{instruction} has no documented argument {next(iter(kwargs), '')}")


class Language:
    """The functions of `nki.language` that are instructions."""

    def __init__(self, machine: Machine) -> None:
        self._m, self._i = machine, Instructions(machine)

    def load(self, src: Tile, *, mask: Any = None, dtype: DType | None = None, **kwargs: Any) -> Tile:
        """A new SBUF tile with what `src`, in HBM, holds."""
        plain("nl.load", mask, kwargs)
        check_tile(src, "nl.load src", HBM)
        dst = self._m.allocate(src.shape, dtype or src.dtype, SBUF)
        self._i.dma_copy(dst, src)
        return dst

    def store(self, dst: Tile, value: Tile, *, mask: Any = None, **kwargs: Any) -> None:
        """The tile `value` into `dst`, in HBM."""
        plain("nl.store", mask, kwargs)
        check_tile(dst, "nl.store dst", HBM)
        check_tile(value, "nl.store value", (SBUF,))
        require(dst.shape == value.shape, f"nl.store of {value!r} into {dst!r}: the shapes differ")
        self._i.dma_copy(dst, value)

    def rand(self, shape: Sequence[int], dtype: DType = FLOAT32, **kwargs: Any) -> Tile:
        """A tile of random numbers, uniform between 0 and 1: multiples of 2**-24, which is not documented."""
        plain("nl.rand", None, kwargs)
        dst = self._m.allocate(shape, dtype, SBUF)
        require(dtype is FLOAT32, f"nl.rand of {dtype}: its rounding is not in the stand-in")
        self._m.write(dst, (self._m.draw(dst.shape) >> 8).astype(np.float32) * np.float32(2.0**-24))
        self._m.trace.add("rand", "vector", (), [dst])
        return dst

    def random_seed(self, seed: Tile, *, mask: Any = None, **kwargs: Any) -> None:
        """Seeds the generator with a 32-bit scalar."""
        plain("nl.random_seed", mask, kwargs)
        check_tile(seed, "nl.random_seed seed")
        self._m.seed(seed, "nl.random_seed seed")
        self._m.trace.add("random_seed", "vector", (), [seed])
