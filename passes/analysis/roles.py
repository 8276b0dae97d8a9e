"""The roles of the states of an update, by which a strategy chooses their formats (`numerics.strategies`)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch.fx as fx

from collage_neuron.numerics.strategies import Role
from collage_neuron.passes.analysis.accumulators import denominators, idle_states, odd_states, slow_states, sum_states
from collage_neuron.passes.analysis.comparisons import compared, counts
from collage_neuron.passes.analysis.first_moments import first_moments, is_long, unread_states
from collage_neuron.passes.analysis.gains import Gains
from collage_neuron.passes.analysis.polynomials import Sum
from collage_neuron.passes.analysis.sensitive import sensitive
from collage_neuron.passes.analysis.signs import nonnegative
from collage_neuron.passes.analysis.value_numbering import Values
from collage_neuron.passes.ir.stage import returned
from collage_neuron.passes.ir.update import Captured

if TYPE_CHECKING:
    from collage_neuron.passes.ir.recording import Recording


def roles_of(captured: Captured, slots: Sequence[float], following: Recording | None = None) -> dict[str, Role]:
    """The roles of the states that have one; `slots` are the numbers of a step, `following` is the step after it."""
    graph = captured.graph
    idle, sums, slow = idle_states(graph), sum_states(graph), slow_states(graph)
    outputs = returned(graph)
    below = {name for name, fill in captured.fresh.items() if fill < 0}
    values = Values(graph, numbers={f"s{i}": x for i, x in enumerate(slots)})
    new = {name: values.of[node] for name, node in outputs.items() if name != "grad"}
    magnitudes = nonnegative(values, {name: x for name, x in new.items() if name not in below})
    others = sorted(new.keys() - slow - idle - {"param"})
    roles: dict[str, Role] = dict.fromkeys(sorted(slow), "signed")
    roles |= {name: "sum" if name in sums else "slow" for name in roles if name in magnitudes}
    roles |= {name: "maximum" for name in others if name in magnitudes and is_maximum(values, new[name], name)}
    gains = Gains(values, new, magnitudes, sums)
    roles |= dict.fromkeys(sorted(roles.keys() & (compared(values, new) | sensitive(gains, new, roles))), "signed")
    found = first_moments(new, odd_states(graph) & set(others), gains)
    roles |= {n: "long" if is_long(values, new[n], n) else "average" for n in sorted(found)}
    roles |= {n: role for n, role in _later(graph, following).items() if n in others}
    roles |= {name: "counter" for name in sorted(new.keys() - {"param"}) if counts(values, new[name], name)}
    roles |= dict.fromkeys(sorted(idle), "idle")
    return roles | dict.fromkeys(sorted(idle & denominators(graph)), "decaying")  # a position divides nothing


def _later(graph: fx.Graph, following: Recording | None) -> dict[str, Role]:
    """The roles in the step after of first moments that this step makes without reading them."""
    later = {} if following is None else roles_of(following.captured, following.slots)
    return {n: later[n] for n in sorted(unread_states(graph)) if later.get(n) in ("average", "long")}


def is_maximum(values: Values, x: Sum, name: str) -> bool:
    """Returns True for `maximum(state, y)`, which has no decay (AMSGrad's)."""
    atoms = [values.atoms[a] for p, c in x.items() if c == 1 for a, e in p if e == 1 and len(p) == 1]
    own = values.atom("input", name=name)
    return len(x) == len(atoms) == 1 and atoms[0].kind == "maximum" and own in atoms[0].operands


def pattern(slots: Sequence[float]) -> tuple[tuple[object, ...], ...]:
    """What roles may depend on of the numbers of a step: where it differs, they are determined anew.

    The sign of each number, if it is at most 1, or below, and in steps of a fifth its size and its distance from 1.
    """
    return tuple((x > 0, x < 0, abs(x) <= 1, abs(x) < 1, _size(x), _size(1 - abs(x))) for x in slots)


def _size(x: float) -> float:
    return round(4 * math.log2(abs(x))) if x and math.isfinite(x) else abs(x)
