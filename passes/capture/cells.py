"""Cells: host objects that a step may change (containers, classes, variables), and how to restore each."""

from __future__ import annotations

import operator
import pickle
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from types import CellType, FunctionType
from typing import Any

import torch

MISSING: Any = object()
"""The value of a name that is not bound."""

OF_CLASSES = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__slots__", "__abstractmethods__"})
"""Attributes that every class has and that no step changes."""


@dataclass(eq=False)
class Cell:
    """One object that can change: how to read its contents as a list of objects, and how to restore them."""

    where: str
    read: Callable[[], list[Any]]
    write: Callable[[list[Any]], None] | None
    """None if the contents cannot be restored."""
    by_value: bool = False
    """True if `read` makes copies, which are compared by value and not by identity."""
    before: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.before = self.read()

    def is_changed(self, since: list[Any]) -> bool:
        """Returns True if the contents differ from `since`: other objects, or other values if `read` copies."""
        now = self.read()
        alike: Callable[[Any, Any], bool] = same if self.by_value else operator.is_
        return len(now) != len(since) or not all(map(alike, now, since))

    def restore(self) -> None:
        """Restores the contents from when the cell was found."""
        if self.write is not None and self.is_changed(self.before):
            self.write(self.before)


def fingerprint(x: Any) -> Any:
    """The contents of an object of an extension type, as text to compare; None if it cannot be pickled."""
    try:
        return pickle.dumps(x)
    except Exception:  # whatever an object raises that was not made to be pickled
        return None


def _items(x: Mapping[Any, Any]) -> Any:
    return OrderedDict.items(x) if isinstance(x, OrderedDict) else dict.items(x) if isinstance(x, dict) else x.items()


def flat_pairs(x: Mapping[Any, Any], leave: Callable[[Any], bool] | None = None) -> list[Any]:
    """Keys and values of a dictionary in one list, alternating."""
    return [y for k, v in list(_items(x)) if leave is None or not leave(k) for y in (k, v)]


def pairs_of(flat: list[Any]) -> Iterator[tuple[Any, Any]]:
    """The (key, value) pairs of a list made by `flat_pairs`."""
    return zip(flat[::2], flat[1::2], strict=True)


def put_pairs(x: dict[Any, Any], flat: list[Any], leave: Callable[[Any], bool] | None = None) -> None:
    """Replaces the contents of a dictionary, except the keys in `leave`."""
    kind: Any = OrderedDict if isinstance(x, OrderedDict) else dict
    left = [(k, v) for k, v in kind.items(x) if leave is not None and leave(k)]
    kind.clear(x)
    for k, v in [*left, *pairs_of(flat)]:
        kind.__setitem__(x, k, v)


def put_attributes(x: type, flat: list[Any]) -> None:
    """Restores the attributes of a class."""
    old = dict(pairs_of(flat))
    for k in list(vars(x)):
        if k not in old and k not in OF_CLASSES:
            type.__delattr__(x, k)
    for k, v in old.items():
        if vars(x).get(k, MISSING) is not v:
            type.__setattr__(x, k, v)


def put_list(x: Any, new: list[Any]) -> None:
    """Replaces the contents of a list, a set or a deque."""
    x.clear()
    (x.update if isinstance(x, set) else x.extend)(new)


def put_elements(x: Any, new: list[Any]) -> None:
    """Replaces the objects in an array of numpy; by its place each, since a list would be taken for several."""
    for at, y in zip(product(*map(range, x.shape)), new, strict=True):
        x[at] = y


def put_variable(x: CellType, new: Any) -> None:
    """Restores a closure variable."""
    if new is MISSING:
        del x.cell_contents
    else:
        x.cell_contents = new


def put_defaults(x: FunctionType, new: list[Any]) -> None:
    """Restores the default arguments of a function."""
    x.__defaults__, x.__kwdefaults__ = new


def put_arguments(x: partial[Any], new: list[Any]) -> None:
    """Restores the function and the positional arguments of a `partial`; its keywords are a cell of their own."""
    x.__setstate__((*new, x.keywords, vars(x)))  # type: ignore[attr-defined]


def slot_writer(x: Any, slots: list[str]) -> Callable[[list[Any]], None]:
    """A function that restores attributes in `__slots__`."""

    def write(new: list[Any]) -> None:
        for name, value in zip(slots, new, strict=True):
            object.__delattr__(x, name) if value is MISSING else object.__setattr__(x, name, value)

    return write


def global_cell(module: dict[str, Any], name: str, where: str) -> Cell:
    """The cell of one global variable; other names of its module are ignored."""

    def write(new: list[Any]) -> None:
        if new[0] is MISSING:
            module.pop(name, None)
        else:
            module[name] = new[0]

    return Cell(where, lambda: [module.get(name, MISSING)], write)


def same(x: Any, y: Any) -> bool:
    """Returns True if two states of one generator, or two values of one tensor or array, are equal bit for bit."""
    if isinstance(x, torch.Tensor):
        return isinstance(y, torch.Tensor) and x.dtype == y.dtype and x.shape == y.shape and _bytes(x) == _bytes(y)
    if isinstance(x, dict):
        return isinstance(y, dict) and x.keys() == y.keys() and all(same(x[k], y[k]) for k in x)
    if hasattr(x, "tobytes"):
        kinds = [getattr(z, "dtype", None) or getattr(z, "typecode", None) for z in (x, y)]
        return hasattr(y, "tobytes") and kinds[0] == kinds[1] and bool(x.tobytes() == y.tobytes())
    return type(x) is type(y) and bool(x == y)


def _bytes(x: torch.Tensor) -> bytes:
    return bytes(x.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
