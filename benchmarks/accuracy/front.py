"""What the table says: which goals are met, and what stands against each peer with as many bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from accuracy.goals import GOALS, Goal
from accuracy.table import Row

PER_SCALE = 0.05
"""Bytes per parameter that the scales of one block format may take, which no goal and no `bytes=` counts."""


def goals(found: Sequence[Row]) -> Iterator[tuple[Goal, Row, float, str]]:
    """Each goal whose strategy ran: the strategy's row, its worst error in the goal's conditions, and where that is."""
    by_name = {row.name: row for row in found}
    for goal in GOALS:
        row = by_name.get(goal.strategy)
        if row is not None:
            yield (goal, row, *goal.worst(row.worst))


def best(found: Sequence[Row], peer: Row, condition: str) -> Row | None:
    """The most accurate strategy under the condition among those with no more bytes than the peer."""
    fitting = [r for r in found if r.own and condition in r.errors and r.bytes <= peer.bytes + 2 * PER_SCALE]
    return min(fitting, key=lambda row: row.mean(condition), default=None)


def losing(found: Sequence[Row], peer: Row) -> list[str]:
    """The conditions under which no strategy of at most as many bytes is as accurate as the peer."""
    lost = []
    for condition in peer.errors:
        ours = best(found, peer, condition)
        if ours is not None and ours.mean(condition) > peer.mean(condition):
            lost.append(condition)
    return lost
