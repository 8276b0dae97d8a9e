"""Finds code that handles shards itself: a recording shows it whole parameters, and it would do something else.

Given: `g = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad`, and `g.norm()`
Result: `DTensor in MyOptimizer.step()`

Of an elementwise update both branches are the same. A norm is that of the shard in one, and of the whole in the other.
"""

from __future__ import annotations

from functools import lru_cache

from collage_neuron.passes.capture.reach import Reach
from collage_neuron.passes.capture.threads import used_in_step

_NAMES = frozenset(
    {"DTensor", "to_local", "from_local", "_local_tensor", "full_tensor", "redistribute", "distribute_tensor",
     "local_map", "placements", "device_mesh", "_spec"}
)  # fmt: skip
"""Names by which code asks for shards, and has them."""


@lru_cache(256)
def handles_shards(base: type) -> str | None:
    """Such a name, and where `step` of the class may use it; None if it uses none."""
    return used_in_step(base, Reach(base, None, {}).is_of_library, _NAMES)
