"""A table to which users add entries by name, and in which a name keeps the meaning that it has.

Saved states name their formats, and graphs are computed once for each format: if a name could get another meaning,
both would be read wrongly, and silently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from types import CodeType, FunctionType
from typing import Any, TypeVar

import torch

Entry = TypeVar("Entry")


class Table(dict[str, Entry]):
    """Entries by name. A new one is checked; one of a known name is accepted if it has the same meaning."""

    def __init__(
        self, entries: Mapping[str, Entry], check: Callable[[str, Entry], None], meaning: Callable[[Entry], object]
    ) -> None:
        super().__init__(entries)
        self._check, self._meaning = check, meaning
        self._known = {name: meaning(entry) for name, entry in entries.items()}

    def __setitem__(self, name: str, entry: Entry) -> None:
        """Adds an entry.

        Raises:
            TypeError: it is not an entry of this table.
            ValueError: it cannot be used, or the name has another meaning.
        """
        if name in self and self[name] is entry:
            return
        self._check(name, entry)
        meaning = self._meaning(entry)  # now: the numbers that its functions find in their module may change later
        if name not in self:
            super().__setitem__(name, entry)
            self._known[name] = meaning
        elif meaning != self._known[name]:
            raise ValueError(
                f"{name!r} is registered with another meaning, and states may be stored under this name: choose "
                "another name for the new one"
            )
        # An equal one (a cell of a notebook that is run twice) leaves the first in its place: graphs are cached by it.

    def update(self, *others: Any, **named: Any) -> None:
        """Adds entries as any dictionary does; each is checked."""
        for name, entry in dict(*others, **named).items():
            self[name] = entry

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # | makes a plain dictionary
        """Adds entries as any dictionary does; each is checked."""
        self.update(other)
        return self

    def setdefault(self, name: str, default: Any = None) -> Any:
        """Adds an entry that is missing, as any dictionary does; it is checked."""
        if name not in self:
            self[name] = default
        return self[name]


def meaning_of(*parts: object) -> object:
    """What functions and data mean, to be compared with ==: where equality cannot be told, an object is itself only.

    Two functions mean the same if they have the same instructions, defaults, captured values, and values of the names
    that they look up in their module.
    """
    return _of_each(parts, ())


class _Itself:
    """An object that equals nothing else."""

    def __init__(self, it: object) -> None:
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)


def _of(x: Any, outer: tuple[FunctionType, ...]) -> object:
    # Exact types: a subclass may mean something else.
    if type(x) in _PLAIN:
        return type(x), repr(x)  # as text: 0.0 is not -0.0, and NaN is NaN
    if isinstance(x, FunctionType) and (not outer or x.__globals__ is outer[0].__globals__):
        # Functions that call themselves or each other are named by their place on the way here.
        return outer.index(x) if x in outer else _of_function(x, (*outer, x))
    if isinstance(x, functools.partial):
        return type(x), _of_each((x.func, x.args, x.keywords), outer)
    if type(x) in (tuple, list):
        return type(x), _of_each(x, outer)
    if type(x) is dict:
        return dict, _of_each(x.items(), outer)
    if type(x) is torch.Tensor and not x.is_meta:
        return x.dtype, x.shape, repr(x.tolist())
    return _Itself(x)


def _of_each(parts: Iterable[object], outer: tuple[FunctionType, ...]) -> tuple[object, ...]:
    return tuple(_of(part, outer) for part in parts)


def _of_function(f: FunctionType, outer: tuple[FunctionType, ...]) -> object:
    looked_up = {name: f.__globals__[name] for name in sorted(_names(f.__code__)) if name in f.__globals__}
    captured = [_content(cell) for cell in f.__closure__ or ()]
    return _of_code(f.__code__), _of_each((f.__defaults__, f.__kwdefaults__, captured, looked_up), outer)


def _content(cell: Any) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty yet
        return None


def _names(code: CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, CodeType)))


def _of_code(code: CodeType) -> object:
    """What a function does, without its place in a file."""
    consts = [_of_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags)
    return code.co_code, counts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, tuple(consts)
