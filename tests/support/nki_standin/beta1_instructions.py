"""The instructions of the older dialect: each returns a new SBUF tile of `dtype`, computed by the newer one's.

Names, parameters and defaults are those of SDK 2.26. Without `dtype` the tile has the type of its input, as documented;
`tensor_tensor` then needs inputs of one type.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_standin.dtypes import FLOAT32, DType
from nki_standin.enums import dge_mode, engine, oob_mode, reduce_cmd
from nki_standin.errors import fail, require
from nki_standin.index import Index
from nki_standin.instructions import Instructions
from nki_standin.legality import check_tile
from nki_standin.machine import Machine
from nki_standin.tensors import HBM, MemoryRegion, NkiTensor

Tile = NkiTensor
SBUF = MemoryRegion.sbuf


class Beta1Instructions:
    """The instructions of one machine, returning tiles."""

    def __init__(self, machine: Machine) -> None:
        self._m, self._i = machine, Instructions(machine)

    def load(self, src: Tile, *, mask: Any = None, dtype: DType | None = None, **kwargs: Any) -> Tile:
        """A new SBUF tile with what `src`, in HBM, holds."""
        _plain("nl.load", mask, kwargs)
        check_tile(src, "nl.load src", HBM)
        dst = self._like(src, dtype)
        self._i.dma_copy(dst, src)
        return dst

    def store(self, dst: Tile, value: Tile, *, mask: Any = None, **kwargs: Any) -> None:
        """The tile `value` into `dst`, in HBM."""
        _plain("nl.store", mask, kwargs)
        check_tile(dst, "nl.store dst", HBM)
        check_tile(value, "nl.store value", (MemoryRegion.sbuf,))
        require(dst.shape == value.shape, f"nl.store of {value!r} into {dst!r}: the shapes differ")
        self._i.dma_copy(dst, value)

    def dma_copy(
        self,
        *,
        dst: Tile,
        src: Tile,
        mask: Any = None,
        dst_rmw_op: Any = None,
        oob_mode: Any = oob_mode.error,
        dge_mode: Any = dge_mode.unknown,
    ) -> None:
        """dst = src between HBM and SBUF."""
        _plain("dma_copy", mask, {})
        require(dst_rmw_op is None, "dma_copy: dst_rmw_op is not in the stand-in")
        self._i.dma_copy(dst, src, oob_mode=oob_mode, dge_mode=dge_mode)

    def tensor_copy(
        self, src: Tile, *, mask: Any = None, dtype: DType | None = None, engine: Any = engine.unknown, **kwargs: Any
    ) -> Tile:
        """A copy of `src`."""
        _plain("tensor_copy", mask, kwargs)
        dst = self._like(src, dtype)
        self._i.tensor_copy(dst, src, engine)
        return dst

    def memset(
        self,
        shape: Sequence[int],
        value: Any,
        dtype: DType,
        *,
        mask: Any = None,
        engine: Any = engine.unknown,
        **kwargs: Any,
    ) -> Tile:
        """A tile of `value`."""
        _plain("memset", mask, kwargs)
        dst = self._m.allocate(shape, dtype, MemoryRegion.sbuf)
        self._i.memset(dst, value, engine)
        return dst

    def tensor_tensor(
        self,
        data1: Tile,
        data2: Tile,
        op: Any,
        *,
        dtype: DType | None = None,
        mask: Any = None,
        engine: Any = engine.unknown,
        **kwargs: Any,
    ) -> Tile:
        """data1 op data2."""
        _plain("tensor_tensor", mask, kwargs)
        check_tile(data1, "tensor_tensor data1")
        check_tile(data2, "tensor_tensor data2")
        same = dtype is not None or data1.dtype is data2.dtype
        require(same, f"tensor_tensor of {data1!r} and {data2!r} needs dtype=: inputs of two types are promoted")
        dst = self._like(data1, dtype)
        self._i.tensor_tensor(dst, data1, data2, op, engine)
        return dst

    def tensor_scalar(
        self,
        data: Tile,
        op0: Any,
        operand0: Any,
        reverse0: bool = False,
        op1: Any = None,
        operand1: Any = None,
        reverse1: bool = False,
        *,
        dtype: DType | None = None,
        mask: Any = None,
        engine: Any = engine.unknown,
        **kwargs: Any,
    ) -> Tile:
        """(data op0 operand0) op1 operand1."""
        _plain("tensor_scalar", mask, kwargs)
        dst = self._like(data, dtype)
        self._i.tensor_scalar(dst, data, op0, operand0, reverse0, op1, operand1, reverse1, engine)
        return dst

    def scalar_tensor_tensor(
        self,
        *,
        data: Tile,
        op0: Any,
        operand0: Any,
        op1: Any,
        operand1: Tile,
        reverse0: bool = False,
        reverse1: bool = False,
        dtype: DType | None = None,
        mask: Any = None,
        **kwargs: Any,
    ) -> Tile:
        """(data op0 operand0) op1 operand1, operand1 a tile."""
        _plain("scalar_tensor_tensor", mask, kwargs)
        dst = self._like(data, dtype)
        self._i.scalar_tensor_tensor(dst, data, op0, operand0, op1, operand1, reverse0, reverse1)
        return dst

    def activation(
        self,
        op: Any,
        data: Tile,
        *,
        bias: Any = None,
        scale: Any = 1.0,
        reduce_op: Any = None,
        reduce_res: Any = None,
        reduce_cmd: Any = reduce_cmd.idle,
        mask: Any = None,
        dtype: DType | None = None,
        **kwargs: Any,
    ) -> Tile:
        """op(data * scale + bias); bias is a vector in this dialect."""
        _plain("activation", mask, kwargs)
        require(bias is None or isinstance(bias, NkiTensor), f"activation: bias must be a tile, got {bias!r}")
        dst = self._like(data, dtype)
        self._i.activation(dst, op, data, bias, scale, reduce_op, reduce_res, reduce_cmd)
        return dst

    def reciprocal(self, data: Tile, *, dtype: DType | None = None, mask: Any = None, **kwargs: Any) -> Tile:
        """1 / data."""
        _plain("reciprocal", mask, kwargs)
        dst = self._like(data, dtype)
        self._i.reciprocal(dst, data)
        return dst

    def tensor_copy_predicated(
        self,
        *,
        src: Any,
        dst: Tile,
        predicate: Tile,
        reverse_pred: bool = False,
        mask: Any = None,
        dtype: DType | None = None,
        **kwargs: Any,
    ) -> None:
        """dst = src where predicate; the only instruction that changes a tile."""
        _plain("tensor_copy_predicated", mask, kwargs)
        require(dtype is None or dtype is dst.dtype, f"tensor_copy_predicated: dtype {dtype} and dst {dst!r} differ")
        self._i.tensor_copy_predicated(dst, src, predicate, reverse_pred)

    def tensor_reduce(
        self,
        op: Any,
        data: Tile,
        axis: Any,
        *,
        mask: Any = None,
        dtype: DType | None = None,
        negate: bool = False,
        keepdims: bool = False,
        **kwargs: Any,
    ) -> Tile:
        """The reduction of `data` along its last dimension or dimensions."""
        _plain("tensor_reduce", mask, kwargs)
        check_tile(data, "tensor_reduce data")
        kept = data.ndim - (1 if isinstance(axis, int) else len(axis))
        dst = self._m.allocate(data.shape[:kept] if kept > 1 else (data.shape[0], 1), dtype or data.dtype, SBUF)
        self._i.tensor_reduce(dst, op, data, axis, negate, keepdims)
        return dst

    def iota(self, expr: Any, dtype: DType, *, mask: Any = None, **kwargs: Any) -> Tile:
        """The values of an affine expression of nl.arange, [partition, free]."""
        _plain("iota", mask, kwargs)
        require(
            isinstance(expr, Index) and len(expr.shape) == 2, f"iota needs an index of two dimensions, got {expr!r}"
        )
        dst = self._m.allocate(expr.shape, dtype, MemoryRegion.sbuf)
        self._i.iota(dst, [[expr.strides[1], expr.shape[1]]], expr.offset, expr.strides[0])
        return dst

    def rand(self, shape: Sequence[int], dtype: DType = FLOAT32, **kwargs: Any) -> Tile:
        """A tile of random numbers, uniform between 0 and 1: multiples of 2**-24, which is not documented."""
        _plain("nl.rand", None, kwargs)
        dst = self._m.allocate(shape, dtype, MemoryRegion.sbuf)
        require(dtype is FLOAT32, f"nl.rand of {dtype}: its rounding is not in the stand-in")
        self._m.write(dst, (self._m.draw(dst.shape) >> 8).astype(np.float32) * np.float32(2.0**-24))
        self._m.trace.add("rand", "vector", (), [dst])
        return dst

    def random_seed(self, seed: Tile, *, mask: Any = None, **kwargs: Any) -> None:
        """Seeds the generator with a 32-bit scalar."""
        _plain("nl.random_seed", mask, kwargs)
        check_tile(seed, "nl.random_seed seed")
        self._m.seed(seed, "nl.random_seed seed")
        self._m.trace.add("random_seed", "vector", (), [seed])

    def _like(self, t: object, dtype: DType | None) -> Tile:
        if not isinstance(t, NkiTensor):
            fail(f"an instruction needs a tile, got {t!r}")
        return self._m.allocate(t.shape, dtype or t.dtype, MemoryRegion.sbuf)


def _plain(instruction: str, mask: Any, kwargs: dict[str, Any]) -> None:
    require(mask is None, f"{instruction}: masks are not in the stand-in")
    require(not kwargs, f"{instruction} has no documented argument {next(iter(kwargs), '')}")
