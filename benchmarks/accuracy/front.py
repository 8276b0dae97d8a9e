"""What the table says: which goals are met, and what stands against each peer with as many bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from accuracy.conditions import CONDITIONS, PRE_TRAINING
from accuracy.goals import GOALS, Goal
from accuracy.table import Row

PER_SCALE = 0.05
"""Bytes per parameter that the scales of one block format may take, which no goal and no `bytes=` counts."""


def goals(found: Sequence[Row]) -> Iterator[tuple[Goal, dict[str, float]]]:
    """Each goal whose strategy ran, and what was measured for it, by condition."""
    by_name = {row.name: row for row in found}
    for goal in GOALS:
        row = by_name.get(goal.strategy)
        if row is not None:
            units = by_name[goal.unit].errors if goal.unit in by_name else {}
            yield goal, goal.measured(row.errors, units)


def best(found: Sequence[Row], peer: Row, condition: str) -> Row | None:
    """The most accurate strategy under the condition among those with no more bytes than the peer."""
    fitting = [r for r in found if r.own and condition in r.errors and r.bytes <= peer.bytes + 2 * PER_SCALE]
    return min(fitting, key=lambda row: row.mean(condition), default=None)


def by_accuracy(found: Sequence[Row]) -> list[str]:
    """The strategies, the most accurate first: what `bytes=N` chooses from (numerics/strategies.py).

    By their largest error under any condition, where 1 stands for every error above it too: the steps are lost. Those
    that are as good to one digit go by their largest error in pre-training, and then by bytes, more of them first.
    """

    def rank(row: Row) -> tuple[float, float, float]:
        whole, usual = (_digits(min(1.0, _largest(row, of)), 1) for of in (CONDITIONS, PRE_TRAINING))
        return whole, usual, -row.bytes

    return [row.name for row in sorted((row for row in found if row.own), key=rank)]


def _largest(row: Row, of: Iterable[str]) -> float:
    return max((row.mean(name) for name in of if name in row.errors), default=float("inf"))


def _digits(x: float, digits: int) -> float:
    return float(f"{x:.{digits - 1}e}")


def losing(found: Sequence[Row], peer: Row) -> list[str]:
    """The conditions under which no strategy of at most as many bytes is as accurate as the peer, to two digits."""
    lost = []
    for condition in peer.errors:
        ours = best(found, peer, condition)
        if ours is not None and _digits(ours.mean(condition), 2) > _digits(peer.mean(condition), 2):
            lost.append(condition)
    return lost
