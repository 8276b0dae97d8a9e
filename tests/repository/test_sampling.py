"""The parts of products that CI runs: they have each value of each parameter, and are no larger than asked."""

from __future__ import annotations

from itertools import product

import pytest
import sampling


@pytest.mark.parametrize("of", [2, 3, 10])
@pytest.mark.parametrize("sizes", [(7, 11), (20, 2), (3, 4, 5), (9,)])
def test_a_part_has_each_value(sizes: tuple[int, ...], of: int) -> None:
    examples = {str(places): set(zip("abc", places, strict=False)) for places in product(*map(range, sizes))}
    kept = sampling.chosen(examples, of)
    assert set.union(*(examples[name] for name in kept)) == set.union(*examples.values())
    assert len(kept) <= max(-(-len(examples) // of), sum(sizes))
    assert kept == sampling.chosen(dict(reversed(examples.items())), of)


@pytest.mark.skipif(sampling.WHOLE, reason="everything is run")
def test_parts_of_a_list_begin_at_different_places_and_are_never_empty() -> None:
    found = [sampling.part(range(7), 3, first) for first in "abcdefgh"]
    assert {x for one in found for x in one} == set(range(7))
    assert sampling.part([5], 3, "x") == [5]
    assert sampling.part([], 3) == []
