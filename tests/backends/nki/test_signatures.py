"""The stand-in's functions have the documented parameters: names, order, defaults, and which are keyword-only.

Source: the API reference of SDK 2.32 (`nki`, 0.6.0) and of SDK 2.26 (`neuronxcc.nki`, whose functions also take
undocumented keyword arguments, which the stand-in refuses).
"""

from __future__ import annotations

import importlib
import inspect
from enum import Enum
from typing import Any

import nki_standin
import pytest
from nki_standin.tensors import MemoryRegion

NKI = {
    "nki.jit": "fn=None, **kwargs",
    "nki.simulate": "kernel",
    "nki.isa.dma_copy": "dst, src, priority=None, oob_mode=oob_mode.error, dge_mode=dge_mode.unknown, "
    "engine=engine.unknown, name=None",
    "nki.isa.tensor_copy": "dst, src, engine=engine.unknown, name=None",
    "nki.isa.memset": "dst, value, engine=engine.unknown, name=None",
    "nki.isa.tensor_tensor": "dst, data1, data2, op, engine=engine.unknown, name=None",
    "nki.isa.tensor_scalar": "dst, data, op0, operand0, reverse0=False, op1=None, operand1=None, reverse1=False, "
    "engine=engine.unknown, name=None",
    "nki.isa.scalar_tensor_tensor": "dst, data, op0, operand0, op1, operand1, reverse0=False, reverse1=False, "
    "name=None",
    "nki.isa.activation": "dst, op, data, bias=None, scale=1.0, reduce_op=None, reduce_res=None, "
    "reduce_cmd=reduce_cmd.idle, name=None",
    "nki.isa.reciprocal": "dst, data, name=None",
    "nki.isa.tensor_copy_predicated": "dst, src, predicate, reverse_pred=False, name=None",
    "nki.isa.tensor_reduce": "dst, op, data, axis, negate=False, keepdims=False, name=None",
    "nki.isa.rng": "dst, engine=engine.vector, name=None",
    "nki.isa.set_rng_seed": "src_seeds, name=None",
    "nki.language.ndarray": "shape, dtype, buffer=sbuf, name='', address=None",
    "nki.language.fori_loop": "lower, upper, body_fun, step=1",
    "nki.language.program_id": "axis=0",
    "nki.language.num_programs": "axes=0",
    "nki.language.NkiTensor.reshape": "self, shape",
    "nki.language.NkiTensor.view": "self, dtype",
    "nki.language.NkiTensor.is_contiguous": "self",
    "nki.language.NkiTensor.get_pattern": "self",
    "nki.language.NkiTensor.ap": "self, pattern, offset=None, scalar_offset=None, vector_offset=None, indirect_dim=0, "
    "dtype=None",
}

BETA1 = {
    "nki.jit": "func=None, mode='auto', **kwargs",
    "nki.language.ndarray": "shape, dtype, *, buffer=None, name='', **kwargs",
    "nki.language.load": "src, *, mask=None, dtype=None, **kwargs",
    "nki.language.random_seed": "seed, *, mask=None, **kwargs",
    "nki.language.store": "dst, value, *, mask=None, **kwargs",
    "nki.language.arange": "*args",
    "nki.language.affine_range": "*args, **kwargs",
}
"""Without the instructions: `nki_standin.beta1_instructions` makes these from their documented parameters."""


def rendered(function: Any) -> str:
    """The parameters of a function as the reference writes them, without annotations."""
    parts: list[str] = []
    starred = False
    for p in inspect.signature(function).parameters.values():
        if p.kind is p.KEYWORD_ONLY and not starred:
            parts.append("*")
        starred = starred or p.kind in (p.KEYWORD_ONLY, p.VAR_POSITIONAL)
        prefix = "*" if p.kind is p.VAR_POSITIONAL else "**" if p.kind is p.VAR_KEYWORD else ""
        parts.append(prefix + p.name + ("" if p.default is p.empty else f"={_text(p.default)}"))
    return ", ".join(parts)


def _text(default: object) -> str:
    if isinstance(default, MemoryRegion):
        return default.name
    return str(default) if isinstance(default, Enum) else repr(default)


@pytest.mark.parametrize("name", NKI)
def test_signature(name: str) -> None:
    with nki_standin.install("nki"):
        assert rendered(_found(name)) == NKI[name]


@pytest.mark.parametrize("name", BETA1)
def test_signature_of_the_older_dialect(name: str) -> None:
    with nki_standin.install("beta1"):
        assert rendered(_found(f"neuronxcc.{name}")) == BETA1[name]


def test_every_instruction_is_compared() -> None:
    with nki_standin.install("nki"):
        isa = importlib.import_module("nki.isa")
        ours = {key for key, x in vars(isa).items() if inspect.isroutine(x) and not key.startswith("_")}
    assert ours == {key.rpartition(".")[2] for key in NKI if key.startswith("nki.isa.")}


def _found(name: str) -> Any:
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:i]))
        except ImportError:
            continue
        for attribute in parts[i:]:
            found = getattr(found, attribute)
        return found
    raise AssertionError(name)
