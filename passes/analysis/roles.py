"""The roles of the states of an update, by which a strategy chooses their formats (`numerics.strategies`)."""

from __future__ import annotations

from collections.abc import Sequence

from collage_neuron.numerics.strategies import Role
from collage_neuron.passes.analysis.accumulators import idle_states, slow_states, sum_states
from collage_neuron.passes.analysis.signs import nonnegative
from collage_neuron.passes.ir.update import Captured


def roles_of(captured: Captured, slots: Sequence[float]) -> dict[str, Role]:
    """The roles of the states that have one; `slots` are the numbers of a step."""
    graph = captured.graph
    idle, sums = idle_states(graph), sum_states(graph)
    (outputs,) = next(n for n in graph.nodes if n.op == "output").args
    below = {name for name, fill in captured.fresh.items() if fill < 0}
    numbers = {f"s{i}": x for i, x in enumerate(slots)}
    magnitudes = nonnegative(graph, {k: v for k, v in outputs.items() if k not in below}, numbers)
    roles: dict[str, Role] = dict.fromkeys(sorted(slow_states(graph)), "signed")
    roles |= {name: "sum" if name in sums else "slow" for name in roles if name in magnitudes}
    return roles | dict.fromkeys(sorted(idle), "idle")


def pattern(slots: Sequence[float]) -> tuple[tuple[bool, bool, bool], ...]:
    """What roles depend on of the numbers of a step: the sign of each, and if it is at most 1."""
    return tuple((x > 0, x < 0, abs(x) <= 1) for x in slots)
