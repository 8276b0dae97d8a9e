"""Which code is Python's or torch's own, and hides nothing: what someone has put in its place may."""

from __future__ import annotations

import sys
from types import FunctionType, MethodType
from typing import Any


def is_of_library(x: Any) -> bool:
    """Returns True for what Python or torch defines, and not for other code that is wrapped by theirs.

    `torch.no_grad()(f)` is a function of torch around `f`, `functools.partial(f)` an object of Python.
    """
    return _is_of_library(x, set())


def _is_of_library(x: Any, seen: set[int]) -> bool:
    if id(x) in seen:
        return True
    seen.add(id(x))
    parts = _parts(x)
    if parts is not None:
        return all(_is_of_library(part, seen) for part in parts) and _is_named_so(x)
    if isinstance(x, type) or not callable(x):
        return _is_named_so(x)
    return _root(type(x).__module__) in _OF_OBJECTS


def _parts(x: Any) -> list[Any] | None:
    """What a wrapper holds; None of what is no wrapper."""
    if isinstance(x, FunctionType):
        return [cell.cell_contents for cell in x.__closure__ or () if _is_filled(cell)]
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, (staticmethod, classmethod)):
        return [x.__func__]
    if isinstance(x, property):
        return [f for f in (x.fget, x.fset, x.fdel) if f is not None]
    return None


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


def _is_named_so(x: Any) -> bool:
    module = getattr(x, "__globals__", {}).get("__name__") or getattr(x, "__module__", None) or type(x).__module__
    return _root(module) in _LIBRARIES


def _root(module: object) -> str:
    return str(module).partition(".")[0]


# Ours too: `compile(model)` wraps `Optimizer.load_state_dict`, which no step calls.
_LIBRARIES = sys.stdlib_module_names | {"torch", "typing_extensions", "collage_neuron"}
_OF_OBJECTS = frozenset({"builtins", "types", "typing", "typing_extensions", "torch"})
"""Whose callable objects hold no code of others: functools has partial, unittest has Mock."""
