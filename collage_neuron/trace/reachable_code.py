"""What Python code can reach: from its functions and classes, through globals, closures, containers and objects."""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, lru_cache, partial
from itertools import accumulate
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import ReferenceType

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnknownUpdate

MOST = 100_000
"""Objects that are looked at, at most."""

ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types whose objects lead to nothing and cannot change."""

# Functions, classes and objects of these are not followed.
_LIBRARIES = sys.stdlib_module_names | {"torch", "torch_xla", "numpy", "typing_extensions", "collage_neuron"}


def is_own(x: Any) -> bool:
    """Returns True for a function, a class or a module of a user, or an object of such a class."""
    return root_of(x) not in _LIBRARIES


def root_of(x: Any) -> str:
    """The package, or module, of a function or a class, or of the class of an object."""
    if isinstance(x, ModuleType):
        return x.__name__.partition(".")[0]
    kind = x if isinstance(x, (FunctionType, BuiltinFunctionType, type)) else type(x)
    modules = [getattr(kind, "__module__", None) or "builtins"]
    while isinstance(x, FunctionType):  # functools.wraps gives a function the module of another one
        modules.append(x.__globals__.get("__name__"))
        x = vars(x).get("__wrapped__")
    roots = [str(module).partition(".")[0] for module in modules]
    return next((root for root in roots if root not in _LIBRARIES), roots[0])


def reachable(roots: Iterable[Any]) -> Iterator[Any]:
    """The objects that can be reached, each once; parameters of models, and other optimizers, are not looked into."""
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


def _children(x: Any) -> Iterator[Any]:
    if isinstance(x, (Optimizer, ModuleType)):
        return
    if is_own(type(x)):  # its class has the code that is run for it, whatever it is an object of besides
        yield type(x)
    for kinds, children in _OF_KINDS:  # the first that fits: a model is an object with attributes too
        if isinstance(x, kinds):
            yield from children(x)
            return
    if is_own(x):
        yield from _attributes(x)


def _attributes(x: Any) -> Iterable[Any]:
    return vars(x).values() if hasattr(x, "__dict__") else ()


def _of_function(x: FunctionType) -> Iterable[Any]:
    if not is_own(x):
        return ()
    return [
        *used_globals(x),
        *cells_of(x),
        *(x.__defaults__ or ()),
        *(x.__kwdefaults__ or {}).values(),
        *vars(x).values(),
    ]


def used_globals(function: FunctionType) -> list[Any]:
    """The globals that a function names, and of modules among them what it may name there (`helpers.count()`)."""
    names, found = names_of(function), list[Any]()
    imported = {module.__name__: module for _, modules in imported_by(function) for module in modules}
    todo, known = [function.__globals__, imported], set[int]()
    names.update(imported)
    while todo:
        used = [v for k, v in list(todo.pop().items()) if k in names]
        modules = {id(v): v for v in used if isinstance(v, ModuleType) and is_own(v) and id(v) not in known}
        known.update(modules)
        found += used
        todo += map(vars, modules.values())
    return found


def imported_by(function: FunctionType) -> Iterator[tuple[str, list[ModuleType]]]:
    """The names by which a function imports modules itself, with those that are there and may be meant."""
    package = str(function.__globals__.get("__package__") or "")
    parents = [*accumulate(package.split("."), "{}.{}".format)] if package else []
    for op, name in instructions(function.__code__):
        if op == "IMPORT_NAME":
            known = [name, *(f"{parent}.{name}".rstrip(".") for parent in parents)]
            yield name, [sys.modules[x] for x in known if x in sys.modules]


@lru_cache(1 << 14)
def instructions(code: CodeType) -> frozenset[tuple[str, str]]:
    """The instructions, with names, of a function's code and of that of functions within it."""
    each = (i for inner in codes_of(code) for i in dis.get_instructions(inner))
    return frozenset((i.opname, i.argval) for i in each if isinstance(i.argval, str))


def names_of(function: FunctionType) -> set[str]:
    """The names that a function uses, also in functions within it, and its strings that could be names."""
    codes = list(codes_of(function.__code__))
    return {name for code in codes for name in (*code.co_names, *(x for x in code.co_consts if isinstance(x, str)))}


def codes_of(code: CodeType) -> Iterator[CodeType]:
    """A function's code, and that of the functions within it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes_of(inner)


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


# Attributes of a model that have no objects of its author's but modules, which are its children.
_TENSORS = {"_parameters", "_buffers", "_modules"}

_OF_KINDS: tuple[tuple[Any, Callable[[Any], Iterable[Any]]], ...] = (
    (FunctionType, _of_function),
    (type, lambda x: [*vars(x).values(), *x.__bases__] if is_own(x) else ()),
    (dict, lambda x: [*x, *x.values(), getattr(x, "default_factory", None), *_attributes(x)]),
    ((list, tuple, set, frozenset, deque), lambda x: [*x, *_attributes(x)]),
    (torch.nn.Module, lambda x: [*x.children(), *(v for k, v in vars(x).items() if k not in _TENSORS)]),
    (torch.Tensor, _attributes),
    (ReferenceType, lambda x: [x()]),
    (MethodType, lambda x: [x.__func__, x.__self__]),
    (BuiltinFunctionType, lambda x: [x.__self__]),  # of an object (`numbers.append`), or a module
    (partial, lambda x: [x.func, *x.args, *x.keywords.values()]),
    ((staticmethod, classmethod), lambda x: [x.__func__]),
    (property, lambda x: [x.fget, x.fset, x.fdel]),
    (cached_property, lambda x: [x.func]),
)
