"""Replaces objects by identity in nested containers, to exchange parameters for their copies and back."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any


def leaves(x: Any, path: tuple[int, ...] = ()) -> Iterator[Any]:
    """The objects in nested containers."""
    if id(x) in path:
        return
    if isinstance(x, dict):
        for pair in dict.items(x):
            yield from leaves(pair, (*path, id(x)))
    elif isinstance(x, (list, tuple, set, frozenset, deque)):
        for item in x:
            yield from leaves(item, (*path, id(x)))
    else:
        yield x


def substituted(x: Any, table: Mapping[int, Any], path: tuple[int, ...] = ()) -> Any:
    """`x` with objects replaced by `table` in all nested containers; containers without such objects stay the same."""
    if id(x) in table:
        return table[id(x)]
    if isinstance(x, MethodType) and id(x.__self__) in table:
        return getattr(table[id(x.__self__)], x.__name__)
    if id(x) in path or not isinstance(x, (dict, list, tuple, set, frozenset, deque)):
        return x
    path = (*path, id(x))
    old = list(dict.items(x)) if isinstance(x, dict) else list(x)
    new = [substituted(item, table, path) for item in old]
    if all(a is b for a, b in zip(old, new, strict=True)):
        return x
    if isinstance(x, dict):
        made = copy.copy(x)
        made.clear()
        made.update(new)
        return made
    return type(x)(*new) if hasattr(x, "_fields") else type(x)(new)
