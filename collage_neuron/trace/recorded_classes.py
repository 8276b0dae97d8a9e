"""Which classes are recorded: the elementwise ones of torch, while their code is torch's. All others are traced."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from itertools import chain
from types import FunctionType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.states import step_inventory
from collage_neuron.states.inner_optimizers import inner_of
from collage_neuron.trace.reachable_code import cells_of

TRACE = "COLLAGE_NEURON_TRACE"
"""The environment variable with which steps of torch's own classes are traced too, if it is "on"."""


CLASSES = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""The elementwise ones, whose step evaluates a closure once, first, and counts nothing outside of states."""


def is_traced(base: type[Optimizer], optimizer: Optimizer) -> bool:
    """Returns True if steps are traced; to record those of torch's elementwise classes costs less."""
    if os.environ.get(TRACE) == "on" or base not in CLASSES:
        return True
    seen = step_inventory.of(optimizer)
    if seen is None:
        return not is_recorded(base, optimizer)
    known, own, code = seen.structure.known, [*vars(optimizer)], _code_of(base).now()
    if known.get("code") is not code or known["attributes"] != own:
        known["code"], known["attributes"], known["is recorded"] = code, own, is_recorded(base, optimizer)
    return not known["is recorded"]


def is_recorded(base: type[Optimizer], optimizer: Optimizer | None = None) -> bool:
    """Returns True for these classes, unless somebody has put code of another kind in the place of theirs."""
    if base not in CLASSES or not is_of_library(base):
        return False
    if optimizer is not None and not _has_no_code_of_its_own(base, tuple(vars(optimizer))):  # type: ignore[arg-type]
        return False
    if optimizer is not None and inner_of(optimizer):
        return False
    return _code_of(base).is_of_library()


@lru_cache
def _has_no_code_of_its_own(base: Any, attributes: tuple[str, ...]) -> bool:
    """Returns True if no attribute of the object is in the place of one of its class."""
    own = (k for k in attributes if k not in attributes_of_torch() and not k.startswith("_collage") and k != "step")
    return not any(hasattr(base, k) for k in own)


class _Code:
    """What the code of a class is, and what it refers to: the classes, and what is in their modules."""

    def __init__(self, base: type[Optimizer]) -> None:
        classes = base.__mro__[:-1]
        names = dict.fromkeys(c.__module__ for c in classes)
        modules = [sys.modules[name] for name in names if name in sys.modules]  # importlib need not put it there
        self._views = [vars(x).values() for x in (*classes, *modules)]
        """Of what is there when they are read."""
        self._last: list[Any] = []
        self._is_of_library = True
        """Whether the last one is."""

    def now(self) -> list[Any]:
        """All of it, in a list that is the same object as long as nothing has changed."""
        now = list(chain.from_iterable(self._views))
        if now != self._last:  # functions and classes are equal if they are the same
            self._last, self._is_of_library = now, all(map(is_of_library, now))
        return self._last

    def is_of_library(self) -> bool:
        """Returns True if all of it is what Python or torch defines."""
        self.now()
        return self._is_of_library


_code_of: Callable[[Any], _Code] = cache(_Code)


@cache
def attributes_of_torch() -> frozenset[str]:
    """Attributes that every optimizer has: its groups and state, hooks, defaults."""
    # Not at import: the first optimizer of a process makes torch import its compiler, for two seconds.
    return frozenset(vars(torch.optim.SGD([{"params": []}])))


# --- what Python or torch defines ------------------------------------------------------------------------------------


def is_of_library(x: Any) -> bool:
    """Returns True for what Python or torch defines, and not for other code that is wrapped by theirs."""
    return _is_of_library(x, set())


def _is_of_library(x: Any, seen: set[int]) -> bool:
    if id(x) in seen:
        return True
    seen.add(id(x))
    # `torch.no_grad()(f)` is a function of torch around `f`, `functools.partial(f)` an object of Python.
    parts = _parts(x)
    if parts is not None:
        return all(_is_of_library(part, seen) for part in parts) and _is_named_so(x)
    if isinstance(x, type) or not callable(x):
        return _is_named_so(x)
    return _root(type(x).__module__) in _OF_OBJECTS


def _parts(x: Any) -> list[Any] | None:
    """What a wrapper holds; None of what is no wrapper."""
    if isinstance(x, FunctionType):
        return cells_of(x)
    if isinstance(x, MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, (staticmethod, classmethod)):
        return [x.__func__]
    if isinstance(x, property):
        return [f for f in (x.fget, x.fset, x.fdel) if f is not None]
    return None


def _is_named_so(x: Any) -> bool:
    module = getattr(x, "__globals__", {}).get("__name__") or getattr(x, "__module__", None) or type(x).__module__
    return _root(module) in _LIBRARIES


def _root(module: object) -> str:
    return str(module).partition(".")[0]


# Ours too: `compile(model)` wraps `Optimizer.load_state_dict`, which no step calls.
_LIBRARIES = sys.stdlib_module_names | {"torch", "typing_extensions", "collage_neuron"}
# Modules whose callable objects hold no code of others: functools has partial, unittest has Mock.
_OF_OBJECTS = frozenset({"builtins", "collections", "types", "typing", "typing_extensions", "torch"})
