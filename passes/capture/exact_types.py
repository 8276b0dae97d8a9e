"""Finds code that asks for the exact type of a number (`type(x) is float`), which nothing can answer for another one.

Given: `x = g.norm().item()`, and `rate = 1.0 if type(x) is float else float(x[0])`
Result: `type in MyOptimizer.step()`

What a recording has read from a tensor is a float for `isinstance`, and has a type of its own (`device_numbers`).
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from types import CellType, FunctionType

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.code_names import globals_of
from collage_neuron.passes.capture.position_aware import reached
from collage_neuron.passes.capture.reach import Reach
from collage_neuron.torch_privates import unhooked_step


def check_types(base: type) -> None:
    """Raises UnsupportedUpdate if code that `step` of the class may call uses `type`; for steps that read numbers."""
    if place := _asks_for_types(base):
        raise UnsupportedUpdate(
            f"the update reads a tensor's value back into Python (.item()), and its code asks for types ({place}), of "
            "which such a value has none while it is recorded; use isinstance, or keep it a tensor"
        )


@lru_cache(256)
def _asks_for_types(base: type) -> str | None:
    reach = Reach(base, None, {})
    functions = [x for x in reach.seen.values() if isinstance(x, FunctionType)]
    own = [x for x in functions if not reach.is_of_library(str(x.__globals__.get("__name__")))]
    found = reached(inspect.unwrap(unhooked_step(base)), own)
    for x in found:  # it grows: variables of a function around another one may hold functions
        held = [cell.cell_contents for cell in x.__closure__ or () if cell != CellType()]
        found += [y for y in held if isinstance(y, FunctionType) and y in own and y not in found]
    return next((f"type in {x.__qualname__}()" for x in found if "type" in globals_of(x.__code__)), None)
