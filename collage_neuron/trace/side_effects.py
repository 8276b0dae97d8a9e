"""Undoes what a step of a copy changes beside it: in globals, classes, closures and objects."""

from __future__ import annotations

import gc
import sys
import threading
from collections import deque, namedtuple
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import cached_property, partial
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    EllipsisType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    NotImplementedType,
    UnionType,
    WrapperDescriptorType,
)
from typing import Any
from weakref import ReferenceType

import numpy
import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnknownUpdate
from collage_neuron.trace.reachable_code import (
    instructions,
    is_filled,
    is_own,
    names_of,
    reachable,
    root_of,
)

_MISSING = object()
# Held while something is to be undone: two at a time would each put back what the other has changed.
_ALONE = threading.RLock()


@contextmanager
def undone(roots: Iterable[Any]) -> Iterator[None]:
    """A context after which all that code can reach from some objects is as it was.

    Raises:
        UnknownUpdate: it can reach what cannot be put back (a generator, a file).
    """
    with _ALONE, uncollected():
        kept = [restore for x in reachable(roots) for restore in _restoring(x)]
        sys.meta_path.insert(0, finder := _NoModules())
        try:
            yield
        finally:
            sys.meta_path.remove(finder)
            for restore in kept:
                restore()


class _NoModules:
    """Has Python find no modules that are not there yet, for the code of users in one thread: nothing ends them."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        """Raises UnknownUpdate, or leaves it to the others."""
        frame: Any = sys._getframe(1)
        while frame and (frame.f_code.co_name == "<module>" or _module(frame).startswith("importlib")):
            frame = frame.f_back  # a module that a library imports may import others
        if threading.get_ident() == self._thread and frame and is_own(sys.modules.get(_module(frame))):
            raise UnknownUpdate(f"it imports {name}, which cannot be undone")


def _module(frame: Any) -> str:
    return str(frame.f_globals.get("__name__"))


@contextmanager
def uncollected() -> Iterator[None]:
    """A context in which Python collects nothing: what it calls for objects that are gone is not the step's code."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _restoring(x: Any) -> list[Callable[[], None]]:
    """What puts an object back to what it is now, and which only code of its author's changes.

    Raises:
        UnknownUpdate: nothing does. What is not known to be harmless is not: a list of what does harm has no end.
    """
    for kinds, restoring in _OF_KINDS:
        if isinstance(x, kinds):
            return list(restoring(x))
    if is_harmless(x):
        return []
    if not is_own(x) or not has_plain_attributes(type(x)):
        raise UnknownUpdate(f"it uses a {type(x).__name__}, which can be neither copied nor put back")
    return [_of_attributes(x)]


def is_harmless(x: Any) -> bool:
    """Returns True for an object of a library that does not change by being used, or whose changes nobody sees."""
    kind = type(x)
    if root_of(x) in ("torch", "numpy"):
        return not isinstance(x, (numpy.ndarray, torch.Generator)) and not kind.__module__.startswith(_THAT_CHANGE)
    return root_of(x) in _OF_HARMLESS_CLASSES


def has_plain_attributes(kind: type) -> bool:
    """Returns True for a class all of whose objects' attributes are in their `__dict__`, and do not end with them."""
    own = [vars(c) for c in kind.__mro__ if is_own(c)]  # a copy of an object with `__del__` would end too
    return kind.__dictoffset__ != 0 and not any(c.get("__slots__") or "__del__" in c for c in own)


def _of_optimizer(x: Optimizer) -> Iterator[Callable[[], None]]:  # a function holds it: it would write there
    yield from map(_of_container, (vars(x), x.state, *x.param_groups))


def _of_library(x: Any) -> Iterator[Callable[[], None]]:
    """A function, a class or a module of a library, which is not looked into."""
    is_bound = isinstance(x, BuiltinFunctionType) and not isinstance(x.__self__, (ModuleType, NoneType))
    if not is_bound and root_of(x) not in _HARMLESS_LIBRARIES:
        name = getattr(x, "__qualname__", None) or x.__name__
        raise UnknownUpdate(f"it uses {root_of(x)}'s {name}, which may do what cannot be undone")
    yield from ()  # a generator, as the others here are


def _of_module(x: Any) -> Iterator[Callable[[], None]]:
    if not is_own(x):
        yield from _of_library(x)
        return
    yield _of_class(x)


def _of_function(x: FunctionType) -> Iterator[Callable[[], None]]:
    if not is_own(x):
        yield from _of_library(x)
        return
    names = names_of(x)
    if harmful := _harmful(x):
        raise UnknownUpdate(f"it uses {harmful}, which may do what cannot be undone")
    before = {k: x.__globals__.get(k, _MISSING) for k in names if k not in _BUILTIN}
    yield lambda: _put(before, x.__globals__.get, x.__globals__.__setitem__, lambda k: x.__globals__.pop(k, None))
    for cell in x.__closure__ or ():
        if is_filled(cell):
            yield _of_cell(cell, cell.cell_contents)
    yield _of_container(vars(x))


def _of_type(x: type) -> Iterator[Callable[[], None]]:
    if not is_own(x):
        yield from _of_library(x)
        return
    if any("__del__" in vars(c) for c in x.__mro__ if is_own(c)):
        raise UnknownUpdate(f"it uses {x.__name__}, whose objects may do what cannot be undone as they end")
    yield _of_class(x)


def _harmful(x: FunctionType) -> str | None:
    """What a function names that may do what is not undone: a builtin function, or a method."""
    for op, name in instructions(x.__code__):
        is_builtin = op == "LOAD_GLOBAL" and name in _HARMFUL_BUILTINS and name not in x.__globals__
        is_method = op in ("LOAD_ATTR", "LOAD_METHOD") and name in _HARMFUL_METHODS
        if is_builtin or is_method:
            return name
    return None


_HARMFUL_BUILTINS = {"open", "exec", "eval", "compile", "input", "breakpoint", "__import__"}
# Functions by which torch and numpy write files, or that do what is no operation.
_HARMFUL_METHODS = {
    "add_step_closure", "backward", "memmap", "save", "savetxt", "savez", "savez_compressed", "start_new_thread",
    "swap_tensors", "tofile",
}  # fmt: skip

# Libraries whose functions change nothing but what they are given, or what is not run or heard: draws, warnings, logs.
_HARMLESS_LIBRARIES = {
    "__future__", "_collections", "_functools", "_operator", "_thread", "_warnings", "abc", "bisect", "builtins",
    "cmath", "collage_neuron", "collections", "contextlib", "contextvars", "copy", "dataclasses", "decimal", "enum",
    "fractions", "functools", "heapq", "inspect", "itertools", "logging", "math", "numbers", "numpy", "operator",
    "random", "re", "statistics", "string", "time", "torch", "torch_xla", "types", "typing", "typing_extensions",
    "warnings",
}  # fmt: skip
_THAT_CHANGE = (
    "torch.optim", "torch.utils", "torch.distributed", "torch.multiprocessing", "torch.profiler", "numpy.random",
)  # fmt: skip
# Packages whose objects say what something is, and do not change; nobody hears what is logged in a dry run.
_OF_HARMLESS_CLASSES = {
    "_abc", "_contextvars", "abc", "contextvars", "dataclasses", "enum", "inspect", "logging", "re", "typing",
    "typing_extensions",
}  # fmt: skip
_FIELD: type = type(vars(namedtuple("_Of", "one"))["one"])
# Classes whose objects do not change; what is in them is looked at by itself.
_HARMLESS = (
    range, slice, EllipsisType, NotImplementedType, CodeType, ReferenceType, tuple, frozenset, partial, MethodType,
    staticmethod, classmethod, property, GetSetDescriptorType, MemberDescriptorType, MethodDescriptorType,
    WrapperDescriptorType, ClassMethodDescriptorType, GenericAlias, UnionType, cached_property, _FIELD,
)  # fmt: skip

SHARED = (*_HARMLESS, Tensor, Enum, type, ModuleType, FunctionType, BuiltinFunctionType, torch.nn.Module)
"""Classes of objects that a copy of an optimizer has in common with it."""


def _of_torchs_module(x: torch.nn.Module) -> Iterator[Callable[[], None]]:
    """The attributes of a module, and what torch keeps for it elsewhere."""
    own = [vars(x)[name] for name in ("_parameters", "_buffers", "_modules") if name in vars(x)]
    yield from map(_of_container, (vars(x), *own))
    for t in (t for names in own for t in names.values() if isinstance(t, Tensor)):
        yield from _of_tensor(t)


def _of_tensor(x: Tensor) -> Iterator[Callable[[], None]]:
    """Its attributes, and on XLA its value: what is written to others `Guard` sees."""
    yield _of_attributes(x)
    if torch_privates.writes_on_xla(x) is not None:
        yield _of_value(x)
        with suppress(RuntimeError):  # of a view whose base was written by others
            if x.is_leaf and x.grad is not None:
                yield _of_value(x.grad)


def _of_value(x: Tensor) -> Callable[[], None]:
    before, saved = torch_privates.writes_on_xla(x), x.detach().clone()

    def restore() -> None:
        if torch_privates.writes_on_xla(x) != before:
            x.detach().copy_(saved)

    return restore


_OF_KINDS: tuple[tuple[Any, Callable[[Any], Iterable[Callable[[], None]]]], ...] = (
    (FunctionType, _of_function),
    (BuiltinFunctionType, _of_library),
    (ModuleType, _of_module),
    (type, _of_type),
    (
        (dict, list, set, deque),
        lambda x: [_of_container(x), *([_of_container(vars(x))] if hasattr(x, "__dict__") else ())],
    ),
    (Optimizer, _of_optimizer),
    (torch.nn.Module, _of_torchs_module),
    (Tensor, _of_tensor),
    (Enum, lambda x: [_of_attributes(x)]),
    (_HARMLESS, lambda x: ()),
)

_BUILTIN = frozenset({"__builtins__", "__name__", "__doc__"})


def _of_cell(cell: Any, before: Any) -> Callable[[], None]:
    def restore() -> None:
        if not is_filled(cell) or cell.cell_contents is not before:
            cell.cell_contents = before

    return restore


def _of_class(x: Any) -> Callable[[], None]:
    """Returns what puts back the attributes of a class, or a module."""
    before = dict(vars(x))

    def restore() -> None:
        for k in vars(x).keys() - before.keys():
            delattr(x, k)
        _put(before, vars(x).get, lambda k, v: setattr(x, k, v), lambda k: None)

    return restore


def _put(
    before: dict[str, Any],
    get: Callable[[str, Any], Any],
    put: Callable[[str, Any], None],
    delete: Callable[[str], Any],
) -> None:
    for k, v in before.items():
        if get(k, _MISSING) is not v:
            delete(k) if v is _MISSING else put(k, v)


def _of_container(x: Any) -> Callable[[], None]:
    before = x.copy()

    def restore() -> None:
        if len(x) == len(before) and all(map(_is_same, _items(x), _items(before))):
            return
        x.clear()
        (x.extend if isinstance(x, (list, deque)) else x.update)(before)

    return restore


def _of_attributes(x: Any) -> Callable[[], None]:
    own, kind = vars(x), type(x)
    restore_own = _of_container(own)

    def restore() -> None:
        restore_own()
        for name, before in (("__dict__", own), ("__class__", kind)):
            if getattr(x, name) is not before:
                object.__setattr__(x, name, before)

    return restore


def _items(x: Any) -> Any:
    return x.items() if isinstance(x, dict) else x


def _is_same(one: Any, other: Any) -> bool:
    # Not by equality, which is code of the user's, and for which a tensor has no answer.
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:  # items
        return one[0] is other[0] and one[1] is other[1]
    return one is other
