"""What each kind of object leads to, and how what it holds is read and put back: a visit for each kind."""

from __future__ import annotations

import array
import builtins
import gc
import io
import logging
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from enum import Enum
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import (
    BuiltinMethodType,
    CellType,
    FunctionType,
    GetSetDescriptorType,
    MappingProxyType,
    MemberDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
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
    put_elements,
    put_list,
    put_pairs,
    put_variable,
    slot_writer,
)
from collage_neuron.passes.capture.code_names import globals_of, names_of, words_of
from collage_neuron.passes.capture.generators import may_draw, of_object
from collage_neuron.passes.capture.objects import NumpyArray, is_c_iterator, names_in, slot, slots_in

LIBRARIES = sys.stdlib_module_names | {"torch", "torch_xla", "numpy", "collage_neuron"}
ATOMS = frozenset(
    {type(None), type(...), type(NotImplemented), bool, int, float, complex, str, bytes, range, torch.dtype,
     torch.device, GetSetDescriptorType, MemberDescriptorType, type(MISSING)}
)  # fmt: skip


def are_atoms(x: Iterable[Any]) -> bool:
    """Returns True if there are only numbers and the like, which lead to nothing: without a Python step for each."""
    return ATOMS.issuperset(map(type, x))


_DECORATED = (staticmethod, classmethod, property, type(lru_cache(len)))
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Thread)
_BUILTINS = frozenset(vars(builtins))
_SMALL = 4096
"""The largest tensor, in elements, that is copied; writes to larger ones are noticed by torch's version counter."""


class Visits:
    """Objects of a walk: visited once each, they leave cells, and others to be visited later.

    The classes that the author of `base` wrote, and their package, are not a library.
    """

    def __init__(self, base: type) -> None:
        self.cells: dict[Any, Cell] = {}
        """Keyed by owner: the id of a container, or the id of a module's globals and a name."""
        self.iterators: dict[int, tuple[Any, str]] = {}
        """Iterators of C code, whose position is hidden, and where they were found."""
        self.outside: dict[int, tuple[Any, str]] = {}
        """Objects with effects outside the process or in another thread (files, queues, thread locals), and where."""
        self.seen: dict[Any, Any] = {}
        """All objects found, by id; holding them prevents the reuse of an id."""
        self.runs_code = False
        """True if code was found that does not belong to a library."""
        self._words: set[str] = set()
        """Names that the code uses."""
        self._of_libraries: set[str] = set()
        """Modules, classes and functions of libraries that the code reaches, and that are not followed."""
        self._todo: list[tuple[Any, str]] = []
        self._packages = {cls.__module__.partition(".")[0] for cls in base.__mro__} - LIBRARIES

    def is_of_library(self, module: Any) -> bool:
        """Returns True for library code, of which only wrapped objects are followed; not for the optimizer's own."""
        package = str(module).partition(".")[0]
        return module is not None and package not in self._packages and _is_installed(package)

    @property
    def may_draw(self) -> bool:
        """Returns True if the code may draw random numbers: it uses such a name, or another installed package."""
        others = {name.partition(".")[0] for name in self._of_libraries} - LIBRARIES
        return bool(others) or any(map(may_draw, self._words | self._of_libraries))

    def _later(self, x: Any, where: str) -> None:
        if type(x) not in ATOMS:
            self._todo.append((x, where))

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
        elif is_c_iterator(x):
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
        is_small = x.device.type == "cpu" and x.numel() <= _SMALL and not x.requires_grad and x.layout is torch.strided
        if is_small and not _is_freed(x):
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
        if not deep or (are_atoms(dict.values(x)) and are_atoms(dict.keys(x))):
            return
        for k, v in x.items():
            self._later(k, where)
            if type(v) not in ATOMS:
                self._later(v, f"{where}[{k!r}]" if type(k) in ATOMS else f"{where}[...]")

    def _sequence(self, x: Any, where: str) -> None:
        if not isinstance(x, (tuple, frozenset)):
            self.cells[id(x)] = Cell(where, lambda: list(x), lambda new: put_list(x, new))
        for i, y in enumerate(() if are_atoms(x) else x):
            if type(y) not in ATOMS:
                self._later(y, f"{where}[{i}]")
        if names_in(x) is not None:
            self._object(x, where)

    def _shown(self, x: Any, where: str) -> None:
        """Visits the dictionary that a read-only one, or a view of keys or values, shows; not that of a class."""
        for y in gc.get_referents(x):
            if not isinstance(y, Mapping) or OF_CLASSES.isdisjoint(y):
                self._later(y, where)

    def _class(self, x: type, where: str) -> None:
        if self.is_of_library(getattr(x, "__module__", None)) or issubclass(x, Enum):
            self._of_libraries.add(f"{x.__module__}.{x.__qualname__}")
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
        if self.is_of_library(x.__module__):
            self._of_libraries.add(f"{x.__module__}.{x.__qualname__}")
            return
        self.runs_code = True
        if x.__defaults__ or x.__kwdefaults__:
            named, put = f"a default argument of {x.__qualname__}", partial(put_defaults, x)
            self.cells[id(x)] = Cell(named, lambda: [x.__defaults__, x.__kwdefaults__], put)
        for y in (x.__defaults__, x.__kwdefaults__, vars(x)):
            if y:
                self._later(y, f"a default or attribute of {x.__qualname__}")
        mentioned = names_of(x.__code__)
        self._words |= words_of(x.__code__)
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
        if self.is_of_library(module.__name__):
            self._of_libraries.add(module.__name__)
        elif key not in self.seen:
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
        if isinstance(x, BuiltinMethodType):  # `from torch import rand as draw`
            self._of_libraries.add(f"{x.__module__ or 'builtins'}.{x.__name__}")
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
        if x.dtype != object:
            self._value(x, where, x.copy, lambda old: x.__setitem__(..., old))
            return
        self.cells[id(x)] = Cell(where, lambda: list(x.flat), partial(put_elements, x))
        for y in x.flat:
            self._later(y, where)

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
        names = names_in(x)
        if names is not None:
            if any(isinstance(v, _LOCKS) for v in names.values()):
                self.outside[id(x)] = x, where
                return
            self._later(names, where)
        slots = [s for s in slots_in(x) if slot(x, s, MISSING) is not MISSING]
        if slots:
            self.cells[id(x)] = Cell(where, lambda: [slot(x, s, MISSING) for s in slots], slot_writer(x, slots))
            for s in slots:
                self._later(slot(x, s, MISSING), f"{where}.{s}")
        if names is None and not slots:
            self._value(x, where, lambda: fingerprint(x), None)
        self._later(type(x), type(x).__name__)


_VISITS: tuple[tuple[Any, Callable[[Visits, Any, str], None]], ...] = (
    (dict, Visits._dict),
    ((list, tuple, set, frozenset, deque), Visits._sequence),
    (torch.Tensor, Visits._tensor),
    (FunctionType, Visits._function),
    (CellType, Visits._cell),
    (type, Visits._class),
    ((ModuleType, logging.Logger, Optimizer), Visits._nothing),
    ((MethodType, BuiltinMethodType, MethodWrapperType, partial, cached_property, *_DECORATED), Visits._parts),
    (weakref.ref, Visits._reference),
    (torch.nn.Module, Visits._module),
    ((bytearray, array.array), Visits._bytes),
    ((io.IOBase, threading.local, ContextVar), Visits._outside),
    (NumpyArray, Visits._array),
    ((MappingProxyType, KeysView, ValuesView, ItemsView), Visits._shown),
)


@lru_cache(4096)
def _is_installed(package: str) -> bool:
    """Returns True for Python's own modules, torch, numpy and other installed packages."""
    file = getattr(sys.modules.get(package), "__file__", None) or ""
    return package in LIBRARIES or not {"site-packages", "dist-packages"}.isdisjoint(Path(file).parts)


def _is_freed(x: torch.Tensor) -> bool:
    """Returns True for a tensor whose memory was given back, as FSDP does: reading it would end the process."""
    if type(x).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or not x.numel():
        return False
    last = x.storage_offset() + sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return x.untyped_storage().nbytes() < (last + 1) * x.element_size()


def _copy_into(x: torch.Tensor, value: torch.Tensor) -> None:
    x.detach().copy_(value)
