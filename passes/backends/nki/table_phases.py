"""Phases: groups values by the function table that the Scalar engine must hold to compute them.

The engine evaluates sqrt, reciprocal, exp and log from tables, and loading one takes as long as an instruction on
hundreds of columns. So a kernel passes over a tile once for each such function: all chunks up to the square root, then
all chunks from the reciprocal on. Values that cross phases are stored for the whole tile. To have few of them, a value
is computed in the latest possible phase.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from collage_neuron.passes.backends.nki.ir import Value

TABLES = frozenset({"sqrt", "reciprocal", "exp", "log"})
"""Functions with their own table; copy, square, abs and sign are assumed to be in every one."""


def in_phases(values: Sequence[Value], stores: Collection[Value]) -> dict[Value, int]:
    """The phase of each of `values` (operands first), in the order in which to compute them.

    Within a phase, values that are only stored come as early as possible, so that fewer tiles are alive at once.
    """
    users = {v: [u for u in values if v in u.tiles()] for v in values}
    final = _final(values, set(stores), users)
    phase = _late(values, _early(values), users, final)
    order = sorted(values, key=lambda v: phase[v])
    return {v: phase[v] for v in _stored_early(order, phase, final)}


def _early(values: Sequence[Value]) -> dict[Value, int]:
    """The first phase in which each value can be computed."""
    function: dict[int, str] = {}
    phase: dict[Value, int] = {}
    for value in values:
        first = max((phase[x] for x in value.tiles() if x in phase), default=0)
        if value.op in TABLES:
            while function.setdefault(first, value.op) != value.op:
                first += 1
        phase[value] = first
    return phase


def _late(
    values: Sequence[Value], early: Mapping[Value, int], users: Mapping[Value, list[Value]], final: Collection[Value]
) -> dict[Value, int]:
    """The phase in which each value is needed; for functions, and for values that are only stored, the first one."""
    phase = dict(early)
    for value in reversed(values):
        needed = [phase[u] for u in users[value] if u not in final]
        if needed and value.op not in TABLES:
            phase[value] = min(needed)
    for value in values:
        if value in final:
            phase[value] = max((phase[x] for x in value.tiles() if x in phase), default=0)
    return phase


def _final(values: Sequence[Value], stores: Collection[Value], users: Mapping[Value, list[Value]]) -> set[Value]:
    """Stored values that are read only by other stored values."""
    final: set[Value] = set()
    for value in reversed(values):
        if value in stores and all(u in final for u in users[value]):
            final.add(value)
    return final


def _stored_early(order: Sequence[Value], phase: Mapping[Value, int], final: Collection[Value]) -> list[Value]:
    done: list[Value] = []
    waiting = [v for v in order if v in final]
    for value in order:
        for v in (value, *waiting):
            ready = all(x.op == "load" or x in done for x in v.tiles()) and phase[v] == phase[value]
            if v not in done and (v is value or ready):
                done.append(v)
    return done
