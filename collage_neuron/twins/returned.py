"""What a user's `step()` returns after a step on fp32 copies: not the copies, whose memory is used again."""

from __future__ import annotations

from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.closures import loss_of
from collage_neuron.twins.copies import Copies
from collage_neuron.twins.kept import tensors_in
from collage_neuron.twins.watch import memory_of


def without_copies(copies: Copies, returned: Any, stand_in: Any) -> Any:
    """`returned`, with parameters, groups and the optimizer in place of their copies, and clones of other copies.

    The loss of the closure, for which the code got `stand_in`, is the one that the closure returned.

    Raises:
        UnsupportedUpdate: an object of another class holds copies.
    """
    own, other = copies.original, copies.optimizer
    pairs = [(stand_in, loss_of(other)), (other, own), (other.param_groups, own.param_groups), (other.state, own.state)]
    pairs += [*zip(other.param_groups, own.param_groups, strict=True), *((q, p) for p, q in copies.params.items())]
    return _replaced(returned, {id(x): y for x, y in pairs if x is not None}, copies.memories())


def _replaced(x: Any, table: dict[int, Any], memories: set[int]) -> Any:
    if id(x) in table:
        return table[id(x)]
    if isinstance(x, torch.Tensor):
        return x.detach().clone() if memory_of(x) in memories else x
    if type(x) is dict:
        found = {k: _replaced(v, table, memories) for k, v in x.items()}
        return x if all(found[k] is v for k, v in x.items()) else found
    if type(x) is list or isinstance(x, tuple):
        values = [_replaced(v, table, memories) for v in x]
        if all(v is y for v, y in zip(values, x, strict=True)):
            return x
        return x._make(values) if hasattr(x, "_make") else type(x)(values)
    if any(id(t) in table or memory_of(t) in memories for t in tensors_in([x, *getattr(x, "__dict__", {}).values()])):
        raise UnsupportedUpdate(
            f"step() returns an object of type {type(x).__name__} that holds a parameter, a gradient or a state; "
            "return a clone() of it, alone or in a list, tuple or dictionary"
        )
    return x
