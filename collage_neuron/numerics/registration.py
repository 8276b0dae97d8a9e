"""A table to which users add entries by name, and in which a name keeps its entry.

Saved states name their formats, and graphs are computed once for each format: if a name could get another meaning,
both would be read wrongly, and silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, TypeVar

Entry = TypeVar("Entry")


class Table(dict[str, Entry]):
    """Entries by name. A new one is checked; a known name is rejected, unless it is the same object."""

    def __init__(self, entries: Mapping[str, Entry], check: Callable[[str, Entry], None]) -> None:
        super().__init__(entries)
        self._check = check

    def __setitem__(self, name: str, entry: Entry) -> None:
        """Adds an entry.

        Raises:
            TypeError: it is not an entry of this table.
            ValueError: it cannot be used, or the name has another one.
        """
        if name in self and self[name] is entry:
            return
        self._check(name, entry)
        if name in self:
            raise ValueError(
                f"{name!r} is registered already, and states may be stored under this name: choose another name for "
                "the new one, or `del` the first where nothing is stored in it (a cell of a notebook that is run again)"
            )
        super().__setitem__(name, entry)

    # Those of a dictionary do not go through `__setitem__`.
    update: Any = MutableMapping.update
    setdefault: Any = MutableMapping.setdefault

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]  # | makes a plain dictionary
        """Adds entries as any dictionary does; each is checked."""
        self.update(other)
        return self
