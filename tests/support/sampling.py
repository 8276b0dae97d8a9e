"""A part of large products of settings, which CI runs.

`make test` runs the parts, and `make test WHOLE=1`, or naming a test, everything. A product is a test with two
parameters whose values occur in two examples or more: of PRODUCTS examples one is run, and each value in one. What is
marked `sampled` has one code path for most of its examples, so that what breaks one breaks many: there the tests of a
file share the work, and each value is run in one of them (with `each=False`, which needs a reason, maybe in none).
`whole` marks products whose examples have paths of their own.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import TypeVar

import pytest

T = TypeVar("T")

WHOLE = bool(os.environ.get("WHOLE"))
"""True if everything is run."""

PRODUCTS = 4
"""One of so many examples of a product is run."""

Value = tuple[str, Hashable]
"""The value of a parameter, by its name."""

Examples = Mapping[str, set[Value]]
"""The values of the parameters of each example of a test, by the example's name."""


def part(examples: Iterable[T], of: int, first: object = "") -> list[T]:
    """One of `of` examples, in their order; which one is the first depends on the text of `first`."""
    found = list(examples)
    return found if WHOLE else found[_number(str(first)) % min(of, max(1, len(found))) :: of]


def sampled(items: Sequence[pytest.Item]) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests to run, and those that are left out: tests of tests (`mutants`), and most examples of products."""
    if WHOLE:
        return list(items), []
    left = {item for item in items if item.get_closest_marker("mutants")}
    for _, tests in groupby((item for item in items if item not in left), lambda item: item.path):
        left |= _left_out(list(tests))
    return [item for item in items if item not in left], [item for item in items if item in left]


def _left_out(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those of one file."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    together = [examples for examples in tests.values() if _is_marked(examples[0])]
    products = [together, *([examples] for examples in tests.values() if _is_product(examples))]
    left: set[pytest.Item] = set()
    for product in products:
        kept = chosen([({i.nodeid: _values(i) for i in examples}, _of(examples[0])) for examples in product])
        left.update(item for examples in product for item in examples if item.nodeid not in kept)
    return left


def chosen(tests: Iterable[tuple[Examples, int]]) -> set[str]:
    """The names of one of `of` examples of each test, and of others until each value is in one example of some test.

    Those come first whose values the tests before have had least often; which of several, the hash of a name decides.
    """
    shuffled = [({name: examples[name] for name in sorted(examples, key=_number)}, of) for examples, of in tests]
    times: Counter[Value] = Counter()
    kept: set[str] = set()
    for examples, of in shuffled:
        waiting = dict(examples)
        for _ in range(-(-len(examples) // of)):
            name = min(waiting, key=lambda name: sum(times[value] for value in waiting[name]))
            times.update(waiting.pop(name))
            kept.add(name)
    for name, values in (example for examples, _ in shuffled for example in examples.items()):
        if not all(times[value] for value in values):
            times.update(values)
            kept.add(name)
    return kept


def _is_marked(item: pytest.Item) -> bool:
    return item.get_closest_marker("sampled") is not None


def _is_product(examples: Sequence[pytest.Item]) -> bool:
    if _is_marked(examples[0]) or examples[0].get_closest_marker("whole"):
        return False
    values = set[Value]().union(*map(_values, examples))
    each = Counter(name for name, _ in values)
    return len(each) > 1 and len(examples) >= 2 * max(each.values())


def _of(item: pytest.Item) -> int:
    mark = item.get_closest_marker("sampled")
    return mark.kwargs["of"] if mark else PRODUCTS


def _values(item: pytest.Item) -> set[Value]:
    """The values of its parameters: numbers and texts, and objects that are the same in several examples."""
    mark = item.get_closest_marker("sampled")
    each = mark is None or mark.kwargs.get("each", True)
    params = item.callspec.params if each and isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    plain = (str, int, float, type(None))
    return {(name, value if isinstance(value, plain) else id(value)) for name, value in params.items()}


def _number(text: str) -> int:
    return zlib.crc32(text.encode())
