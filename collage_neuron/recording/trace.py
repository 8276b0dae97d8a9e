"""The trace of a step on the host: objects, iterators, globals and generators that it changes, changed exactly once.

Recordings show what a step does to numbers and to tensors, and leave everything else as it was (`passes.host_state`).
Where one has seen more change, the optimizer's own code runs once more, on stand-ins for all parameters that have
gradients, with the real objects: they change as in a plain step, and the numbers must be those that were recorded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.passes.capture.host_state import HostState
from collage_neuron.passes.capture.joint import Joint
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.recording import independence
from collage_neuron.recording.bucketing import naming

Scalars = Mapping[torch.Tensor, Mapping[str, Any]]


@contextmanager
def of_step(base: type[Optimizer], optimizer: Optimizer, found: Mapping[Any, Recording]) -> Iterator[Scalars | None]:
    """Leaves the trace of one step, unless what runs inside raises: then none.

    Yields the host scalars of each parameter after the step; None where the recordings carry all that changes.

    Raises:
        UnsupportedUpdate: the step with the real objects is not the one that was recorded.
    """
    if not any(recording.host for recording in found.values()):
        yield None
        return
    states = {f"optimizer.state[p{i}]": state for i, state in enumerate(optimizer.state.values())}
    host = HostState(base, optimizer, states)
    host.enter(copies=False)
    try:
        alone = independence.host_side(base, optimizer)
        host.instead_of(optimizer, alone)
        joint = Joint(base, alone, follow=True)
        with naming(base):
            parts = independence.confirm(joint, optimizer, found)
            host.check()
        yield {p: part.scalars for p, part in parts.items()}
        joint.sync(optimizer)
        host.leave(HostState(base, optimizer, states), alone, optimizer)
    except BaseException:
        host.restore()
        raise


def put_all(names: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Writes all numbers that a step has changed in attributes or settings."""
    for name, value in new.items():
        put(names, name, value)


def put(names: dict[str, Any], name: str, value: Any) -> None:
    """Writes a number that a step has changed; a tensor, list or dictionary in place, since others may hold it."""
    old = names.get(name)
    if isinstance(old, torch.Tensor) and isinstance(value, torch.Tensor) and old.dtype == value.dtype:
        old.copy_(value)
    elif type(old) is type(value) is list:
        old[:] = value
    elif type(old) is type(value) is dict:
        old.clear()
        old.update(value)
    else:
        names[name] = value
