"""Undoes what a step of a copy changes beside it: in globals, classes, closures, objects and random generators."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch.optim import Optimizer

from collage_neuron.errors import UnknownUpdate
from collage_neuron.trace.generators import Generator, may_draw, of_object, of_process
from collage_neuron.trace.reachable_code import is_filled, is_own, names_of, reachable

_MISSING = object()
_ALONE = threading.RLock()
"""Held while something is to be undone: two at a time would each put back what the other has changed."""


@contextmanager
def undone(roots: Iterable[Any]) -> Iterator[None]:
    """A context after which all that code can reach from some objects is as it was.

    Raises:
        UnknownUpdate: it can reach what cannot be put back (a generator, a file).
    """
    with _ALONE:
        kept: list[Callable[[], None]] = []
        names = set[str]()
        for x in reachable(roots):
            if isinstance(x, FunctionType) and is_own(x):
                names |= names_of(x)
            kept += _restoring(x)
        # Beside other threads (a data loader) code must look like it draws: they would get the same numbers again.
        if threading.active_count() == 1 or any(map(may_draw, names)):
            kept += map(_of_generator, of_process())
        try:
            yield
        finally:
            for restore in kept:
                restore()


def _restoring(x: Any) -> Iterator[Callable[[], None]]:
    """What puts an object back to what it is now."""
    if isinstance(x, FunctionType):
        yield from _of_function(x) if is_own(x) else ()
    elif isinstance(x, type):
        yield from [_of_class(x)] if is_own(x) else ()
    elif (generator := of_object(x, "")) is not None:
        yield _of_generator(generator)
    elif isinstance(x, (dict, list, set, deque)):
        yield _of_container(x)
    elif isinstance(x, Optimizer):  # which a function holds: with a copy's parameters it would write there
        yield from map(_of_container, (vars(x), x.state, *x.param_groups))
    elif hasattr(x, "__next__"):
        raise UnknownUpdate(f"it uses a {type(x).__name__}, which can be neither copied nor put back")
    elif is_own(x) and hasattr(x, "__dict__"):
        yield _of_container(vars(x))


def _of_function(x: FunctionType) -> Iterator[Callable[[], None]]:
    names = names_of(x)
    before = {k: x.__globals__.get(k, _MISSING) for k in names if k not in _BUILTIN}
    yield lambda: _put(before, x.__globals__.get, x.__globals__.__setitem__, lambda k: x.__globals__.pop(k, None))
    for cell in x.__closure__ or ():
        if is_filled(cell):
            yield _of_cell(cell, cell.cell_contents)
    yield _of_container(vars(x))


_BUILTIN = frozenset({"__builtins__", "__name__", "__doc__"})


def _of_cell(cell: Any, before: Any) -> Callable[[], None]:
    def restore() -> None:
        if not is_filled(cell) or cell.cell_contents is not before:
            cell.cell_contents = before

    return restore


def _of_class(x: type) -> Callable[[], None]:
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


def _items(x: Any) -> Any:
    return x.items() if isinstance(x, dict) else x


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other) == 2:  # items
        return one[0] is other[0] and one[1] is other[1]
    return one is other


def _of_generator(generator: Generator) -> Callable[[], None]:
    before = generator.read()
    return lambda: generator.write(before)
