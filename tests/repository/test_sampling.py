"""The parts of products that CI runs: they have each value of each parameter, and are no larger than asked."""

from __future__ import annotations

from itertools import product

import pytest
import sampling


def examples_of(test: str, sizes: tuple[int, ...]) -> dict[str, set[sampling.Value]]:
    return {f"{test}{places}": set(zip("abc", places, strict=False)) for places in product(*map(range, sizes))}


@pytest.mark.parametrize("of", [2, 3, 10])
@pytest.mark.parametrize("sizes", [(7, 11), (20, 2), (3, 4, 5), (9,)])
def test_a_part_has_each_value(sizes: tuple[int, ...], of: int) -> None:
    examples = examples_of("test", sizes)
    kept = sampling.chosen([(examples, of)])
    assert set.union(*(examples[name] for name in kept)) == set.union(*examples.values())
    assert -(-len(examples) // of) <= len(kept) <= max(-(-len(examples) // of) + 2, sum(sizes))
    assert kept == sampling.chosen([({name: examples[name] for name in reversed(examples)}, of)])


def test_tests_of_a_file_cover_each_others_values() -> None:
    tests = [examples_of(name, (9,)) for name in "xyz"]
    kept = sampling.chosen([(examples, 3) for examples in tests])
    assert [len(kept & examples.keys()) for examples in tests] == [3, 3, 3]
    assert {name[1:] for name in kept} == {name[1:] for examples in tests for name in examples}


@pytest.mark.skipif(sampling.WHOLE, reason="everything is run")
def test_parts_of_a_list_begin_at_different_places_and_are_never_empty() -> None:
    found = [sampling.part(range(7), 3, first) for first in "abcdefgh"]
    assert {x for one in found for x in one} == set(range(7))
    assert sampling.part([5], 3, "x") == [5]
    assert sampling.part([], 3) == []
