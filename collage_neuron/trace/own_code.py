"""Whether a step differentiates, or asks for exact classes (`type(p) is Parameter`): placeholders have others."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from functools import cache
from inspect import isfunction, unwrap
from types import CodeType, FunctionType
from typing import Any


@cache
def asks_for_types(base: Any) -> bool:
    """Returns True if `step` of a class, or a function that it names and is not torch's, asks."""
    return any(_asks(code) for function in _reached(base) for code in _codes(function.__code__))


def _reached(base: Any) -> Iterator[FunctionType]:
    waiting, known = _named(base, {}, {"step"}), set()
    while waiting:
        function = waiting.pop()
        if function not in known and not function.__module__.startswith("torch."):
            known.add(function)
            yield function
            names = {name for code in _codes(function.__code__) for name in code.co_names}
            waiting += _named(base, function.__globals__, names)


def _named(base: Any, functions: dict[str, Any], names: set[str]) -> list[FunctionType]:
    """The methods and functions with these names."""
    found = [vars(cls).get(name) for cls in base.__mro__ for name in names] + list(map(functions.get, names))
    plain: list[Any] = [getattr(f, "fget", None) or getattr(f, "__func__", f) for f in found if f is not None]
    return [f for f in map(unwrap, plain) if isfunction(f)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def _asks(code: CodeType) -> bool:
    if not _DIFFERENTIATES.isdisjoint(code.co_names):
        return True
    named = {(x.opname, x.argval) for x in dis.get_instructions(code) if isinstance(x.argval, str)}
    return not named.isdisjoint(_OF_TYPES)


_DIFFERENTIATES = {"autograd", "backward", "FloatTensor"}
"""Autograd notes what is inside a placeholder before it has its value; and a type of old."""

_OF_TYPES = {("LOAD_GLOBAL", "type"), ("LOAD_NAME", "type"), ("LOAD_ATTR", "__class__")}
"""How code asks: not the attribute `type` of a device."""
