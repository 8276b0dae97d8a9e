"""The older dialect `neuronxcc.nki` (SDK 2.27 to 2.29): instructions return a new tile in SBUF.

Source: its API reference in SDK 2.26. Without masks, implicit broadcasting and arithmetic on tiles, all of which the
newer dialect dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from nki_standin import enums
from nki_standin.beta1_instructions import Language, instructions
from nki_standin.dtypes import DTYPES
from nki_standin.errors import fail, require
from nki_standin.host import run
from nki_standin.legality import check_distinct, check_gpsimd, check_overlap, check_tile
from nki_standin.loops import Index, Loops, arange
from nki_standin.machine import Machine
from nki_standin.modules import module
from nki_standin.operators import OPERATORS
from nki_standin.tensors import MemoryRegion, NkiTensor


class Beta1Tensor(NkiTensor):
    """A tensor that indices of `nl.arange` select from; `t[...] = instruction(...)` makes it the destination."""

    machine: Machine
    """That of the subclass which `modules` makes."""

    def __getitem__(self, key: Any) -> Beta1Tensor:
        keys = key if isinstance(key, tuple) else (key,)
        if not any(isinstance(k, Index) for k in keys):
            return super().__getitem__(key)
        require(len(keys) == self.ndim, f"{len(keys)} indices for {self.ndim} dimensions")
        where = Index(self.offset, (), ())
        for i, (k, n, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            require(isinstance(k, (Index, int)), "slices and nl.arange do not mix in one index")
            index = k if isinstance(k, Index) else Index(int(k), (), ())
            require(
                index.first >= 0 and index.last < n,
                f"out of bounds on dimension {i}: index range [{index.first}, {index.last}] of {n}",
            )
            where = where + index * stride
        require(len(where.shape) >= 2, "nl.arange needs two dimensions or more: write i[:, None] and j[None, :]")
        return self._same(where.shape, where.strides, where.offset)._checked()

    def __setitem__(self, key: Any, value: Any) -> None:
        """What the last instruction returned goes here instead: no further instruction."""
        dst = self[key]
        same = isinstance(value, NkiTensor) and value.dtype is dst.dtype and value.elements == dst.elements
        require(
            same and dst.on_chip, f"assignment of {value!r} to {dst!r}: needs an on-chip tile of equal type and size"
        )
        check_tile(dst, "assignment to")
        check_distinct(dst)
        trace = self.machine.trace
        made = trace.redirect(dst, value)
        require(made, f"assignment of {value!r}: only what the last instruction made, else it is one more instruction")
        for src in trace.last[1:]:
            check_overlap(dst, src, "a source")
        if trace.records[-1].engine == "gpsimd":
            check_gpsimd([dst], trace.records[-1].instruction)
        dst.bits()[...] = value.bits().reshape(dst.shape)
        dst.written[...] = True

    def ap(self, *_: Any, **__: Any) -> Any:
        """Not in this dialect."""
        fail("tensor.ap is not in neuronxcc.nki; index with nl.arange")


class mutable_tensor:
    """Annotation of an input that the kernel stores into."""


class Kernel:
    """What `nki.jit` returns."""

    def __init__(self, machine: Machine, function: Callable[..., Any]) -> None:
        self._machine, self._function = machine, function
        self.__name__, self.__doc__, self.__wrapped__ = function.__name__, function.__doc__, function

    def __getitem__(self, grid: Any) -> Kernel:
        fail(f"{self.__name__}[{grid}]: launch grids are not in the stand-in")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the kernel; a device would compile it and run it there."""
        parameters = inspect.signature(self._function, eval_str=True).parameters
        mutable = [name for name, p in parameters.items() if p.annotation is mutable_tensor]
        return run(self._machine, self._function, args, kwargs, mutable)


def modules(machine: Machine) -> dict[str, ModuleType]:
    """The dialect's modules by name. ValueError for a target it never had."""
    if machine.target.generation > 3:
        raise ValueError(f"neuronxcc.nki has no target {machine.target.name}; it has trn1 and trn2")
    machine.tensor = type("Beta1Tensor", (Beta1Tensor,), {"machine": machine})

    def jit(func: Any = None, mode: str = "auto", **kwargs: Any) -> Any:
        require(not kwargs, f"nki.jit: argument {next(iter(kwargs), '')} is not in the stand-in")
        return Kernel(machine, func) if func is not None else lambda f: Kernel(machine, f)

    isa, language = _isa(machine), _language(machine)
    typing = module("neuronxcc.nki.typing", {"mutable_tensor": mutable_tensor})
    members = {"jit": jit, "isa": isa, "language": language, "typing": typing}
    top = module("neuronxcc.nki", members)
    package = module("neuronxcc", {"nki": top})
    return {m.__name__: m for m in (package, top, isa, language, typing)}


def _isa(machine: Machine) -> ModuleType:
    members: dict[str, Any] = instructions(machine)
    for enum in (enums.engine, enums.reduce_cmd, enums.oob_mode, enums.dge_mode):
        members[enum.__name__] = enum
    for name in ("vector", "scalar", "gpsimd", "unknown"):
        members[f"{name}_engine"] = enums.engine[name]
    return module("neuronxcc.nki.isa", members)


def _language(machine: Machine) -> ModuleType:
    instructions, loops = Language(machine), Loops(machine)

    def ndarray(shape: Sequence[int], dtype: Any, *, buffer: Any = None, name: str = "", **kwargs: Any) -> NkiTensor:
        require(not kwargs, f"nl.ndarray: argument {next(iter(kwargs), '')} is not in the stand-in")
        t = machine.allocate(shape, dtype, buffer or MemoryRegion.sbuf, name)
        top = len(t.storage.sites) == 1 and loops.depth == 0
        require(top or buffer is not MemoryRegion.shared_hbm, "shared_hbm tensors are made at the kernel's top level")
        return t

    members: dict[str, Any] = {**DTYPES, **OPERATORS, **{m.name: m for m in MemoryRegion}}
    members.update(
        par_dim=int, ndarray=ndarray, arange=arange, load=instructions.load, store=instructions.store,
        rand=instructions.rand, random_seed=instructions.random_seed, affine_range=loops.affine,
    )  # fmt: skip
    return module("neuronxcc.nki.language", members)
