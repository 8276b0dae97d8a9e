"""What Python code can reach: from its functions and classes, through globals, closures, containers and objects."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from types import BuiltinMethodType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnknownUpdate

MOST = 100_000
"""Objects that are looked at, at most."""

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types whose objects lead to nothing and cannot change."""

_LIBRARIES = sys.stdlib_module_names | {"torch", "torch_xla", "numpy", "typing_extensions", "collage_neuron"}
"""Whose functions, classes and objects are not followed."""


def is_own(x: Any) -> bool:
    """Returns True for a function or a class of a user, or an object of such a class."""
    kind = x if isinstance(x, (FunctionType, type)) else type(x)
    return str(getattr(kind, "__module__", "")).partition(".")[0] not in _LIBRARIES


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """The objects that can be reached, each once; models and other optimizers are not looked into."""
    todo, seen = list(roots), dict[int, Any]()
    while todo:
        x = todo.pop()
        if type(x) in ATOMS or id(x) in seen:
            continue
        seen[id(x)] = x  # alive: its id would be used again
        if len(seen) > MOST:
            raise UnknownUpdate(f"its code can reach more than {MOST:,} objects, which are not looked at")
        yield x
        todo += _children(x)


def _children(x: Any) -> Iterable[Any]:
    for kinds, children in _OF_KINDS:
        if isinstance(x, kinds):
            return children(x)
    followed = is_own(x) and not isinstance(x, (torch.Tensor, torch.nn.Module, Optimizer, ModuleType))
    return vars(x).values() if followed and hasattr(x, "__dict__") else ()


def _of_function(x: FunctionType) -> Iterable[Any]:
    if not is_own(x):
        return ()
    return [
        *used_globals(x).values(),
        *cells_of(x),
        *(x.__defaults__ or ()),
        *(x.__kwdefaults__ or {}).values(),
        *vars(x).values(),
    ]


def used_globals(function: FunctionType) -> dict[str, Any]:
    """The globals that a function names."""
    names = names_of(function)
    return {k: v for k, v in function.__globals__.items() if k in names}


def names_of(function: FunctionType) -> set[str]:
    """The names that a function uses, also in functions within it, and its strings that could be names."""
    found, todo = set[str](), [function.__code__]
    while todo:
        code = todo.pop()
        found.update(code.co_names, (x for x in code.co_consts if isinstance(x, str)))
        todo += [x for x in code.co_consts if isinstance(x, type(code))]
    return found


def cells_of(function: FunctionType) -> list[Any]:
    """The cells of a function's closure that are filled."""
    return [cell.cell_contents for cell in function.__closure__ or () if is_filled(cell)]


def is_filled(cell: Any) -> bool:
    """Returns True if a cell has contents."""
    try:
        cell.cell_contents  # noqa: B018  # an empty cell raises
    except ValueError:
        return False
    return True


_OF_KINDS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (FunctionType, _of_function),
    (type, lambda x: [*vars(x).values(), *x.__bases__] if is_own(x) else ()),
    (dict, lambda x: [*x, *x.values()]),
    ((list, tuple, set, frozenset, deque), list),
    (MethodType, lambda x: [x.__func__, x.__self__]),
    (BuiltinMethodType, lambda x: [x.__self__]),  # of an object (`numbers.append`), or a module
    (partial, lambda x: [x.func, *x.args, *x.keywords.values()]),
    ((staticmethod, classmethod), lambda x: [x.__func__]),
    (property, lambda x: [x.fget, x.fset, x.fdel]),
)
