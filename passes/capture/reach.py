"""Finds the host objects that an optimizer's `step()` can reach and change: attributes, contents, classes, globals.

The walk starts at the optimizer's attributes and settings and at the classes that its author wrote, and follows objects
and the code of their methods. It ends at libraries (Python, torch, installed packages other than the optimizer's own):
of these only objects that the optimizer holds are watched, not the contents of their modules and classes.
"""

from __future__ import annotations

import array
import builtins
import dis
import io
import logging
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.cells import (
    MISSING,
    OF_CLASSES,
    Cell,
    fingerprint,
    flat_pairs,
    global_cell,
    put_arguments,
    put_attributes,
    put_defaults,
    put_list,
    put_pairs,
    put_variable,
    slot_writer,
)
from collage_neuron.passes.capture.generators import of_object
from collage_neuron.passes.capture.planes import is_plain

OF_TORCH = frozenset(vars(torch.optim.SGD([torch.empty(0)])))
"""Attributes that every optimizer has: its groups and state, hooks, defaults."""

_LEFT = (OF_TORCH - {"defaults"}) | {"step"}
_LIBRARIES = sys.stdlib_module_names | {"torch", "torch_xla", "numpy", "collage_neuron"}
_ATOMS = frozenset(
    {type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, range, torch.dtype,
     torch.device, GetSetDescriptorType, MemberDescriptorType, type(MISSING)}
)  # fmt: skip
_DECORATED = (staticmethod, classmethod, property, type(lru_cache(len)))
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Thread)
_BUILTINS = frozenset(vars(builtins))
_SMALL = 4096
"""The largest tensor, in elements, that is copied; writes to larger ones are noticed by torch's version counter."""


class Reach:
    """The cells that the code of `base` can reach from `optimizer`, or from the class alone if that is None.

    `states` are the dictionaries of host scalars that stand for `optimizer.state[p]`.
    """

    def __init__(self, base: type, optimizer: Optimizer | None, states: Mapping[str, dict[str, Any]]) -> None:
        self.cells: dict[Any, Cell] = {}
        """Keyed by owner: the id of a container, or the id of a module's globals and a name."""
        self.iterators: dict[int, tuple[Any, str]] = {}
        """Iterators of C code, whose position is hidden, and where they were found."""
        self.outside: dict[int, tuple[Any, str]] = {}
        """Objects with effects outside the process or in another thread (files, queues), and where they were found."""
        self.carried: set[int] = set()
        """Ids of lists and dictionaries of numbers that are reachable from one attribute or setting only."""
        self.seen: dict[Any, Any] = {}
        """All objects found, by id; holding them prevents the reuse of an id."""
        self.own: dict[int, str] = {}
        """The optimizer's groups and states, which code may reach only through the optimizer."""
        self.leads_back = False
        """True if an object that the optimizer holds, or a global, refers to the optimizer."""
        self.runs_code = False
        """True if code was found that does not belong to a library."""
        self._optimizer = optimizer
        self._todo: list[tuple[Any, str]] = []
        self._packages = {cls.__module__.partition(".")[0] for cls in base.__mro__} - _LIBRARIES
        for cls in base.__mro__:
            self._later(cls, cls.__name__)
        self._walk()
        if optimizer is not None:
            self._start(optimizer, states)
            self._walk()

    def _start(self, optimizer: Optimizer, states: Mapping[str, dict[str, Any]]) -> None:
        self.seen[id(optimizer)] = optimizer
        named = {"optimizer": vars(optimizer), **states}
        self.own = {id(optimizer.param_groups): "param_groups", id(optimizer.state): "state"}
        for i, group in enumerate(optimizer.param_groups):
            named[f"param_groups[{i}]"] = group
            self.own[id(group)] = f"param_groups[{i}]"
        for where, namespace in named.items():
            self._namespace(namespace, where)

    def _namespace(self, names: dict[str, Any], where: str) -> None:
        """Visits the attributes of the optimizer, a group or a state; they are a cell if not all are numbers."""
        leave = of_nobody if where == "optimizer" else {"params"}.__contains__
        left = () if self.runs_code or where != "optimizer" else ("defaults",)  # torch's own code never writes there
        kept = {k: v for k, v in names.items() if not leave(k) and k not in left}
        if all(map(_cannot_change, kept.values())):
            return
        self.cells[id(names)] = Cell(where, lambda: flat_pairs(names, leave), lambda new: put_pairs(names, new, leave))
        for k, v in kept.items():
            if is_plain(v) and (where != "optimizer" or k != "defaults"):
                self._carry(v)
            self._later(v, f"{where}.{k}" if where == "optimizer" else f"{where}[{k!r}]")

    def _carry(self, x: Any) -> None:
        if isinstance(x, (list, dict)):
            if id(x) in self.seen or id(x) in self.carried:
                self.carried.discard(id(x))
                return
            self.carried.add(id(x))
            for y in x.values() if isinstance(x, dict) else x:
                self._carry(y)

    def _is_of_library(self, module: Any) -> bool:
        """Returns True for library code, of which only wrapped objects are followed; not for the optimizer's own."""
        package = str(module).partition(".")[0]
        return module is not None and package not in self._packages and _is_installed(package)

    def _later(self, x: Any, where: str) -> None:
        if type(x) not in _ATOMS:
            self._todo.append((x, where))

    def _walk(self) -> None:
        while self._todo:
            x, where = self._todo.pop()
            if id(x) in self.own:
                raise UnsupportedUpdate(
                    f"{where} is the optimizer's own {self.own[id(x)]}, which a recording has in another place; let "
                    f"step() take it from self.{self.own[id(x)]}"
                )
            if id(x) in self.seen:
                self.carried.discard(id(x))
                self.leads_back |= x is self._optimizer
                continue
            self.seen[id(x)] = x
            self._visit(x, where)

    def _visit(self, x: Any, where: str) -> None:
        if type(x).__module__.startswith("collage_neuron.") or (isinstance(x, torch.Tensor) and x.is_meta):
            return
        for kinds, visit in _VISITS:
            if isinstance(x, kinds):
                visit(self, x, where)
                return
        generator = of_object(x, f"{where}, a random generator")
        if generator is not None:
            self._value(x, generator.name, generator.read, generator.write)
        elif _is_c_iterator(x):
            self.iterators[id(x)] = x, where
            self._inside_iterator(x, where)
        else:
            self._object(x, where)

    def _value(self, x: Any, where: str, read: Callable[[], Any], write: Callable[[Any], None] | None) -> None:
        put = None if write is None else lambda new: write(new[0])
        self.cells[id(x)] = Cell(where, lambda: [read()], put, by_value=True)

    # --- kinds of objects -----------------------------------------------------------------------------------------

    def _nothing(self, x: Any, where: str) -> None:
        """Visits an object that is not followed: a module, a logger, another optimizer."""

    def _outside(self, x: Any, where: str) -> None:
        if not any(x is stream for stream in (sys.stdout, sys.stderr, sys.stdin)):
            self.outside[id(x)] = x, where

    def _tensor(self, x: torch.Tensor, where: str) -> None:
        if x.device.type == "cpu" and x.numel() <= _SMALL and not x.requires_grad and x.layout is torch.strided:
            self._value(x, where, lambda: x.detach().clone(), lambda old: _copy_into(x, old))
        elif not x.is_inference():
            self._value(x, where, lambda: torch_privates.version(x), None)

    def _module(self, x: torch.nn.Module, where: str) -> None:
        """Visits an nn.Module: its own attributes, its buffers and its submodules; not its hooks."""
        self._dict(vars(x), where, deep=False)
        plain = {k: v for k, v in vars(x).items() if not k.startswith("_")}
        for k, v in {**plain, **torch_privates.contents(x)}.items():
            self._later(v, f"{where}.{k}")
        self._later(type(x), type(x).__name__)

    def _dict(self, x: dict[Any, Any], where: str, deep: bool = True) -> None:
        self.cells[id(x)] = Cell(where, lambda: flat_pairs(x), lambda new: put_pairs(x, new))
        for k, v in x.items() if deep else ():
            self._later(k, where)
            self._later(v, f"{where}[{k!r}]" if type(k) in _ATOMS else f"{where}[...]")

    def _sequence(self, x: Any, where: str) -> None:
        if not isinstance(x, (tuple, frozenset)):
            self.cells[id(x)] = Cell(where, lambda: list(x), lambda new: put_list(x, new))
        for i, y in enumerate(x):
            self._later(y, f"{where}[{i}]")
        if _names_in(x) is not None:
            self._object(x, where)

    def _class(self, x: type, where: str) -> None:
        if self._is_of_library(getattr(x, "__module__", None)) or issubclass(x, Enum):
            return
        self.runs_code = True
        self.cells[id(x)] = Cell(
            where, lambda: flat_pairs(vars(x), OF_CLASSES.__contains__), lambda new: put_attributes(x, new)
        )
        for base in x.__mro__[1:]:
            self._later(base, base.__name__)
        for k, v in vars(x).items():
            if k not in OF_CLASSES:
                self._later(v, f"{where}.{k}")

    def _function(self, x: FunctionType, where: str) -> None:
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            self._later(cell, f"{name}, a closure variable of {x.__qualname__}")
        if self._is_of_library(x.__module__):
            return
        self.runs_code = True
        if x.__defaults__ or x.__kwdefaults__:
            named, put = f"a default argument of {x.__qualname__}", partial(put_defaults, x)
            self.cells[id(x)] = Cell(named, lambda: [x.__defaults__, x.__kwdefaults__], put)
        for y in (x.__defaults__, x.__kwdefaults__, vars(x)):
            if y:
                self._later(y, f"a default or attribute of {x.__qualname__}")
        mentioned = names_of(x.__code__)
        own = frozenset(x.__globals__) if "globals" in mentioned else globals_of(x.__code__)
        self._globals(x.__globals__, own, mentioned, str(x.__module__))
        for name in mentioned & sys.modules.keys():  # imported by the function itself
            self._attributes(sys.modules[name], mentioned)

    def _globals(self, module: dict[str, Any], names: frozenset[str], mentioned: frozenset[str], where: str) -> None:
        """Visits the globals of a module that code uses, and the attributes that it uses of modules among them."""
        for name in names:
            value = module.get(name, MISSING)
            if isinstance(value, ModuleType):
                self._attributes(value, mentioned)
            key = (id(module), name)
            if key not in self.cells and not name.startswith("__") and (value is not MISSING or name not in _BUILTINS):
                self.cells[key] = global_cell(module, name, f"{where}.{name}")
                self._later(value, f"{where}.{name}")

    def _attributes(self, module: ModuleType, mentioned: frozenset[str]) -> None:
        key = (id(module), mentioned)
        if key not in self.seen and not self._is_of_library(module.__name__):
            self.seen[key] = module
            self._globals(vars(module), mentioned & vars(module).keys(), mentioned, module.__name__)

    def _cell(self, x: CellType, where: str) -> None:
        def read() -> list[Any]:
            try:
                return [x.cell_contents]
            except ValueError:  # a variable that has no value yet
                return [MISSING]

        self.cells[id(x)] = Cell(where, read, lambda new: put_variable(x, new[0]))
        self._later(read()[0], where)

    def _parts(self, x: Any, where: str) -> None:
        """Visits an object that only refers to others: a bound method, a partial, a decorated method, a reference."""
        names = ("__self__", "__func__", "__wrapped__", "func", "args", "keywords", "fget", "fset", "fdel")
        for name in names:
            part = getattr(x, name, None)
            if not isinstance(part, ModuleType):
                self._later(part, where)
        if type(x) is partial:
            self.cells[id(x)] = Cell(where, lambda: [x.func, x.args], partial(put_arguments, x))

    def _reference(self, x: Any, where: str) -> None:
        self._later(x(), where)

    def _array(self, x: Any, where: str) -> None:
        self._value(x, where, x.copy, lambda old: x.__setitem__(..., old))

    def _bytes(self, x: Any, where: str) -> None:
        self._value(x, where, lambda: x[:], lambda old: x.__setitem__(slice(None), old))

    def _inside_iterator(self, x: Any, where: str) -> None:
        """Visits what an iterator shares with its copies: the objects it iterates over, and functions that it calls."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # later Pythons will not copy the iterators of itertools
            try:
                _, args, *state = x.__reduce__()
            except Exception:  # generators, and others that cannot be copied
                return
        for part in (*args, *state):
            self._later(part, where)

    def _object(self, x: Any, where: str) -> None:
        names = _names_in(x)
        if names is not None:
            if any(isinstance(v, _LOCKS) for v in names.values()):
                self.outside[id(x)] = x, where
                return
            self._later(names, where)
        slots = [s for s in _slots(x) if _slot(x, s) is not MISSING]
        if slots:
            self.cells[id(x)] = Cell(where, lambda: [_slot(x, s) for s in slots], slot_writer(x, slots))
            for s in slots:
                self._later(_slot(x, s), f"{where}.{s}")
        if names is None and not slots:
            self._value(x, where, lambda: fingerprint(x), None)
        self._later(type(x), type(x).__name__)


def _cannot_change(x: Any) -> bool:
    """Returns True for numbers, strings and tuples of them, and for tensors, which shadows copy."""
    if isinstance(x, tuple):
        return all(map(_cannot_change, x))
    return type(x) in _ATOMS or isinstance(x, torch.Tensor)


def _is_array(x: Any) -> bool:
    return type(x).__module__ == "numpy" and type(x).__name__ == "ndarray"


class _ArrayMeta(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return _is_array(x)


class _Array(metaclass=_ArrayMeta):
    """numpy's arrays, without importing numpy."""


_VISITS: tuple[tuple[Any, Callable[[Reach, Any, str], None]], ...] = (
    (dict, Reach._dict),
    ((list, tuple, set, frozenset, deque), Reach._sequence),
    (torch.Tensor, Reach._tensor),
    (FunctionType, Reach._function),
    (CellType, Reach._cell),
    (type, Reach._class),
    ((ModuleType, logging.Logger, Optimizer), Reach._nothing),
    ((MethodType, BuiltinMethodType, MethodWrapperType, partial, cached_property, *_DECORATED), Reach._parts),
    (weakref.ref, Reach._reference),
    (torch.nn.Module, Reach._module),
    ((bytearray, array.array), Reach._bytes),
    (io.IOBase, Reach._outside),
    (_Array, Reach._array),
)


@lru_cache(4096)
def names_of(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes that code uses, also in nested functions."""
    inner = (names_of(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*inner)


@lru_cache(4096)
def globals_of(code: CodeType) -> frozenset[str]:
    """The names of globals only."""
    inner = (globals_of(c) for c in code.co_consts if isinstance(c, CodeType))
    own = (i.argval for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_NAME")))
    return frozenset(own).union(*inner)


@lru_cache(4096)
def _is_installed(package: str) -> bool:
    """Returns True for Python's own modules, torch, numpy and other installed packages."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in _LIBRARIES or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def of_nobody(name: str) -> bool:
    """Returns True for attributes of an optimizer that no step changes: hooks and similar ones, and our own."""
    return name in _LEFT or name.startswith("_collage")


def _copy_into(x: torch.Tensor, value: torch.Tensor) -> None:
    x.detach().copy_(value)


def _is_c_iterator(x: Any) -> bool:
    """Returns True for an iterator whose position Python cannot write: all except instances of Python classes."""
    return hasattr(type(x), "__next__") and _names_in(x) is None and not _slots(x)


def _names_in(x: Any) -> dict[str, Any] | None:
    """The attributes of an object, read without its `__getattr__`, which may do anything."""
    try:
        names = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None
    return names if isinstance(names, dict) else None


def _slots(x: Any) -> tuple[str, ...]:
    kind: Any = type(x)
    return _slots_of(kind)


def _slot(x: Any, name: str) -> Any:
    try:
        return object.__getattribute__(x, name)
    except AttributeError:
        return MISSING


@lru_cache(4096)
def _slots_of(kind: Any) -> tuple[str, ...]:
    written = [vars(cls) for cls in kind.__mro__ if "__slots__" in vars(cls)]
    return tuple({k: None for names in written for k, v in names.items() if isinstance(v, MemberDescriptorType)})
