"""The stand-in's functions have the documented parameters: names, order, defaults, and which are keyword-only.

Source: the API reference of SDK 2.32 (`nki`, 0.6.0) and of SDK 2.26 (`neuronxcc.nki`, whose functions also take
undocumented keyword arguments, which the stand-in refuses). Instructions are not here: `DOCUMENTED` of the stand-in has
their parameters, of which it makes them.
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
