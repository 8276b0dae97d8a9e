"""Finds threads that a step starts: what another thread does to tensors is not recorded."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from collage_neuron.passes.capture.code_names import words_of

STARTERS = frozenset({"Thread", "Timer", "ThreadPool", "ThreadPoolExecutor", "start_new_thread", "to_thread"})
"""Names by which Python's own library starts threads."""


def starts_threads(base: type, is_of_library: Callable[[Any], bool]) -> str | None:
    """What starts threads in the code that `step` of the class may call, and where; None if nothing does.

    A pool that exists before the step is found as an object that cannot be copied (`visits`).
    """
    return used_in_step(base, is_of_library, STARTERS)


def used_in_step(base: type, is_of_library: Callable[[Any], bool], names: frozenset[str]) -> str | None:
    """One of `names` that the code uses which `step` of the class may call, and where; None if it uses none.

    Followed are methods of the class and functions of its modules, by name; not those of libraries.
    """
    seen: set[FunctionType] = set()
    todo = _called({"step"}, base, {})
    while todo:
        function = todo.pop()
        if function in seen or is_of_library(function.__module__):
            continue
        seen.add(function)
        words = words_of(function.__code__)
        for name in sorted(names & words):
            return f"{name} in {function.__qualname__}()"
        todo += _called(words, base, function.__globals__)
    return None


def _called(names: Any, base: type, module: dict[str, Any]) -> list[FunctionType]:
    """The functions that names stand for: methods of the class and its bases, and globals."""
    found = [x.get(name) for x in (*map(vars, base.__mro__), module) for name in names]
    unwrapped = [getattr(x, "__func__", getattr(x, "fget", x)) for x in found if x is not None]
    return [f for x in unwrapped for f in _wrapped(x)]


def _wrapped(x: Any) -> list[FunctionType]:
    """A function, and those that decorators have wrapped."""
    found = []
    while isinstance(x, FunctionType):
        found.append(x)
        x = getattr(x, "__wrapped__", None)
    return found
