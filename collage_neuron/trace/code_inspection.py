"""Whether a step does what cannot wait: asks for exact classes (`type(p) is Parameter`), differentiates, has threads.

Placeholders have classes of their own, and another thread cannot see what waits.
"""

from __future__ import annotations

import dis
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from functools import cache, partial
from inspect import isfunction
from itertools import chain
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, device, dtype
from torch.optim import Optimizer

from collage_neuron.states.inner_optimizers import inner_of
from collage_neuron.trace.reachable_code import cells_of, codes_of

ASKS = "step(), or a function that it uses, asks for exact types, differentiates or starts threads"
"""What is said then."""

STARTERS = {"Thread", "Timer", "ThreadPool", "ThreadPoolExecutor", "start_new_thread", "to_thread"}
"""Names by which Python's own library starts threads."""

MOST = 10_000
"""Objects that are looked at in one walk."""


class Asked:
    """What is known of the functions that an optimizer uses."""

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._steps, self._asks = 0, False

    def by(self, base: Any, optimizer: Optimizer) -> bool:
        """Returns True if `step`, or a function that it names or that the optimizer holds, asks."""
        held = held_by(optimizer)
        ids = list(map(id, held))
        self._steps += 1
        # If it holds others; and in steps 2**n, since what it holds may have got other functions.
        if ids != self._ids or not self._steps & (self._steps - 1):
            self._ids, self._asks = ids, asks_for_types(base) or asks(base, held)
        return self._asks


@cache
def asks_for_types(base: Any) -> bool:
    """Returns True if `step` of a class, or a function that it names and is not torch's, asks."""
    return asks(base, ())


def asks(base: Any, held: Iterable[Any]) -> bool:
    """Returns True if `step` of a class asks, or a function that it names or that one of the objects `held` has."""
    return any(_asks(code) for function in _reached(base, held) for code in codes_of(function.__code__))


def looks_at_graphs(base: Any, optimizer: Optimizer) -> bool:
    """Returns True if `step`, or a function that it uses, may ask how a gradient was computed, or differentiate it."""
    return any(map(_looks, _reached(base, held_by(optimizer))))


def draws(base: Any, optimizer: Optimizer) -> bool:
    """Returns True if `step`, or a function that it uses, may draw from a generator of Python's or numpy's.

    What torch draws `sandbox.Guard` sees.
    """
    functions = _reached(base, held_by(optimizer))
    return any(not _OF_GENERATORS.isdisjoint(code.co_names) for f in functions for code in codes_of(f.__code__))


def held_by(optimizer: Optimizer) -> list[Any]:
    """What an optimizer and its groups hold that may be, or have, a function."""
    inside = [each.optimizer for each in inner_of(optimizer)]
    own = chain.from_iterable((vars(x), *x.param_groups) for x in (optimizer, *inside))
    values = chain.from_iterable(map(dict.items, own))
    return [x for k, x in values if type(x) not in _ATOMS and k not in _OF_TORCH and not k.startswith("_")]


# Attributes and settings that are torch's, or are looked at by their class.
_OF_TORCH = {"state", "defaults", "param_groups", "params", "step"}

# Packages whose objects do not look at what they are given.
_LIBRARIES = {"torch", *sys.stdlib_module_names}

_ATOMS = {int, float, bool, complex, str, bytes, type(None), Tensor, dtype, device}


def _reached(base: Any, held: Iterable[Any]) -> Iterator[FunctionType]:
    classes, known, names = {base}, set(), {"step"}
    waiting = [*_named(classes, {}, names), *_in(held, classes)]
    while waiting:
        function = waiting.pop()
        if function not in known and not str(function.__globals__.get("__name__")).startswith("torch."):
            known.add(function)
            yield function
            names = {name for code in codes_of(function.__code__) for name in code.co_names}
            variables = cells_of(function)
            defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
            waiting += [*_in((*variables, *defaults), classes), *_named(classes, function.__globals__, names)]


def _in(held: Iterable[Any], classes: set[Any]) -> list[FunctionType]:
    """The functions that objects are or hold; the classes of other objects, whose methods have names, are added."""
    waiting, known, found = list(held), dict[int, Any](), list[FunctionType]()
    while waiting and len(known) < MOST:
        x = waiting.pop()
        if type(x) in _ATOMS or id(x) in known or isinstance(x, (type, ModuleType, Tensor)):
            continue
        known[id(x)] = x
        if isinstance(x, Optimizer):  # an inner one, of which what it holds is looked at too (`held_by`)
            classes |= set() if hasattr(type(x), "_collage_base") else {type(x)}
            continue
        if isfunction(x):
            found += _layers(x)
        elif isinstance(x, MethodType):
            waiting += [x.__func__, x.__self__]
        elif isinstance(x, partial):
            waiting += [x.func, *x.args, *x.keywords.values()]
        elif isinstance(x, (dict, list, tuple, set, deque)):
            waiting += x.values() if isinstance(x, dict) else x
        elif str(type(x).__module__).partition(".")[0] not in _LIBRARIES:
            classes.add(type(x))
            waiting += getattr(x, "__dict__", {}).values()
    return found


def _named(classes: Iterable[Any], functions: dict[str, Any], names: set[str]) -> list[FunctionType]:
    """The methods and functions with these names."""
    found = [vars(cls).get(name) for each in classes for cls in each.__mro__ for name in names]
    found += map(functions.get, names)
    return [f for x in found for f in _layers(_unbound(x))]


def _unbound(x: Any) -> Any:
    # Not by asking for attributes: an object may answer by code of its class.
    if isinstance(x, property):
        return x.fget
    return x.__func__ if isinstance(x, (classmethod, staticmethod, MethodType)) else x


def _layers(x: Any) -> Iterator[FunctionType]:
    """A function, and those that it is wrapped around."""
    while isfunction(x):
        yield x
        x = vars(x).get("__wrapped__")


def _asks(code: CodeType) -> bool:
    if not (_DIFFERENTIATES | STARTERS).isdisjoint(code.co_names):
        return True
    named = {(x.opname, x.argval) for x in dis.get_instructions(code) if isinstance(x.argval, str)}
    return not named.isdisjoint(_OF_TYPES)


def _looks(function: FunctionType) -> bool:
    names = {name for code in codes_of(function.__code__) for name in code.co_names}
    variables = [*map(function.__globals__.get, names), *cells_of(function)]
    modules = (str(getattr(x, "__module__", None) or getattr(x, "__name__", "")) for x in variables)
    return not names.isdisjoint(_OF_GRAPHS) or any(module.startswith(_AUTOGRAD) for module in modules)


# Autograd notes what is inside a placeholder before it has its value; `FloatTensor` is a type of old.
_DIFFERENTIATES = {"autograd", "backward", "FloatTensor"}

_OF_GENERATORS = {"random", "manual_seed", "seed", "set_rng_state", "default_generator"}

_OF_GRAPHS = _DIFFERENTIATES | {"grad_fn", "is_leaf", "func", "functional", "jvp", "vjp", "hessian"}
_AUTOGRAD = ("torch.autograd", "torch.func", "torch._functorch")

# How code asks for an exact type: not by the attribute `type`, which is a device's.
_OF_TYPES = {("LOAD_GLOBAL", "type"), ("LOAD_NAME", "type"), ("LOAD_ATTR", "__class__")}


@cache
def attributes_of_torch() -> frozenset[str]:
    """Attributes that every optimizer has: its groups and state, hooks, defaults."""
    # Not at import: the first optimizer of a process makes torch import its compiler, for two seconds.
    return frozenset(vars(torch.optim.SGD([{"params": []}])))
