"""All live objects of some classes, as the garbage collector knows them: nobody else has a list of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from itertools import chain, compress
from typing import Any


def objects_of(kinds: Collection[type]) -> list[Any]:
    """All live objects whose class is one of `kinds`, not a subclass of one.

    Of all other objects none may be held while another thread runs: Python reuses a tuple that is being filled, and
    raises SystemError, or worse, if somebody else refers to it. So there is one call of C, the last `list`, in which
    the objects are listed, looked at and let go, and no collection that could run code of others.
    """
    wanted = set(kinds)
    with _ONE, _listed_by_collector():
        steps = list(chain.from_iterable(_selected(wanted, generation) for generation in range(3)))
        found = list(chain.from_iterable(steps))
    return [x for x in found if type(x) in wanted]


def _selected(wanted: set[type], generation: int) -> Iterator[Iterator[Any]]:
    """The objects of a generation whose class is wanted; then nothing, twice.

    They are listed twice, one list after the other, of which only the second has the first: so each is beside its
    class. Both lists are read to their ends, for they have these iterators in them: neither would ever be let go.
    """
    objects, looked_at = _listed(generation), _listed(generation)
    yield compress(objects, map(wanted.__contains__, map(type, looked_at)))
    yield from (filter(().__contains__, rest) for rest in (objects, looked_at))


def _listed(generation: int) -> Iterator[Any]:
    """The objects of a generation, listed when the first is asked for."""
    return chain.from_iterable(map(gc.get_objects, (generation,)))


_ONE = threading.Lock()
"""Another thread that is here too would switch the collector on again."""


@contextmanager
def _listed_by_collector() -> Iterator[None]:
    """A context in which frozen objects are listed too, and nothing is collected."""
    frozen, enabled = gc.get_freeze_count() > 0, gc.isenabled()
    if frozen:
        gc.collect()
        gc.unfreeze()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
        if frozen:
            gc.freeze()


def with_subclasses(cls: type) -> set[type]:
    """A class and all classes that inherit from it."""
    found: set[type] = {cls}
    left = [cls]
    while left:
        new: set[type] = set(type.__subclasses__(left.pop())) - found
        found |= new
        left += new
    return found
