"""A second reading of the newer dialect (`import nki`), written from its documentation and not from the stand-in.

Source: the stubs of SDK 2.32 (aws-neuron-sdk at 81ce03ae, nki/api/nki/isa and nki/api/nki/language) and
nki/get-started/about/lnc.rst. Numbers are those of `beta1_reading`, which also has what instructions of both dialects
do; here is what differs: destinations are arguments, HBM is addressed by access patterns, a compiled loop is a function
of its register, and a kernel may run on several cores. Evidence level: independent interpreter.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from math import prod
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import beta1_reading
import numpy as np
import torch
from beta1_reading import ALU, F32, ISA, LANGUAGE, WORDS, Array, Reading, Tensor, encoded

from collage_neuron.passes.backends.nki.docstring import MEASURES
from collage_neuron.passes.backends.nki.lower import Kernel
from collage_neuron.passes.backends.nki.tiling import Cut

Function = Callable[..., Any]


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


def _into(function: Function) -> Function:
    """An instruction that returns its result, as one that writes it to `dst`."""
    return lambda dst, **given: _put(dst, function(**given, dtype=dst.dtype))


def _activation(op: str, data: Tensor, bias: Any = None, scale: Any = 1.0, *, dtype: str) -> Tensor:
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
    activation = ISA["activation"] if target == "trn1" else _activation
    isa = {
        **{name: _into(ISA[name]) for name in both}, "activation": _into(activation), "rng": rng,
        "memset": lambda dst, value, engine: _put(dst, ISA["memset"](dst.shape, value, dst.dtype)),
        "dma_copy": _into(ISA["tensor_copy"]), "tensor_copy_predicated": ISA["tensor_copy_predicated"],
        "set_rng_seed": lambda src_seeds: None, "engine": SimpleNamespace(vector="", scalar="", gpsimd=""),
    }  # fmt: skip
    language = LANGUAGE | {
        "fori_loop": _fori_loop, "program_id": lambda axis=0: core, "num_programs": lambda axes=0: cores,
    }  # fmt: skip
    nki: Any = ModuleType("nki")
    parts = {"nki.isa": SimpleNamespace(**isa), "nki.language": SimpleNamespace(**language)}
    vars(nki).update({"jit": lambda f: f, "isa": parts["nki.isa"], "language": parts["nki.language"]})
    module: dict[str, Any] = {}
    with mock.patch.dict(sys.modules, {"nki": nki, **parts}), np.errstate(all="ignore"):
        exec(compile(text, "kernel", "exec"), module)
    return Reading(module, left)


def tensor(x: torch.Tensor) -> Tensor:
    """A copy of a torch tensor, in HBM."""
    dtype = str(x.dtype).removeprefix("torch.")
    words = x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]).numpy().copy()
    return InHbm(words.view(WORDS[dtype]), dtype)


def back(x: Tensor, shape: Sequence[int]) -> torch.Tensor:
    signed = x.raw.view(f"i{x.raw.itemsize}").copy()
    return torch.from_numpy(signed).view(getattr(torch, x.dtype)).view(tuple(shape))


def _read(k: Kernel, source: str, drawn: Sequence[np.ndarray], core: int, cores: int) -> Reading:
    if k.dialect == "nki":
        return read(source, k.target, drawn, core, cores)
    return beta1_reading.read(source, drawn)


def results(
    k: Kernel, components: Mapping[str, torch.Tensor], vector: torch.Tensor, cut: Cut | None = None,
    drawn: Sequence[np.ndarray] = (), source: str = "", order: Sequence[int] = (0,),
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
