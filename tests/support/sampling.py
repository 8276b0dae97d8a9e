"""A part of large products of settings, which CI runs, chosen so that each value of each parameter is in it.

`make test` runs the parts, and `make test WHOLE=1` everything. What is marked `sampled` has one code path for most of
its examples, so that what breaks one of them breaks many; examples that have paths of their own are not sampled.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

import pytest

T = TypeVar("T")

WHOLE = bool(os.environ.get("WHOLE"))
"""True if everything is run."""


def part(examples: Iterable[T], of: int, first: object = "") -> list[T]:
    """One of `of` examples, in their order; which one is the first depends on the text of `first`."""
    found = list(examples)
    return found if WHOLE else found[_number(str(first)) % min(of, max(1, len(found))) :: of]


def sampled(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, and those that are left out: of a test marked `sampled(of=n)`, all but one of n."""
    if WHOLE:
        return list(items), []
    left: set[pytest.Item] = set()
    for _, examples in groupby(items, lambda item: item.nodeid.partition("[")[0]):
        left.update(_left_out(list(examples)))
    return [item for item in items if item not in left], [item for item in items if item in left]


def _left_out(examples: Sequence[pytest.Item]) -> list[pytest.Item]:
    mark = examples[0].get_closest_marker("sampled")
    if mark is None:
        return []
    kept = chosen({item.name: _values(item) for item in examples}, mark.kwargs["of"])
    return [item for item in examples if item.name not in kept]


def chosen(examples: Mapping[str, set[tuple[str, int]]], of: int) -> set[str]:
    """The names of examples with each of their values at least once, and of others until they are one of `of`."""
    kept: set[str] = set()
    met: set[tuple[str, int]] = set()
    shuffled = sorted(examples, key=_number)
    for name in shuffled:
        if not examples[name] <= met:
            kept.add(name)
            met |= examples[name]
    for name in shuffled:
        if len(kept) * of < len(examples):
            kept.add(name)
    return kept


def _values(item: pytest.Item) -> set[tuple[str, int]]:
    """The values of its parameters, which are the same objects in all examples of a test."""
    params = item.callspec.params if isinstance(item, pytest.Function) else {}
    return {(name, id(value)) for name, value in params.items()}


def _number(text: str) -> int:
    return zlib.crc32(text.encode())
