"""Applies the host side effects of a step (on objects, iterators, globals and generators) exactly once.

Recordings contain changes of numbers and tensors, and undo all others (`passes.capture.host_state`). If a recording has
seen others, the optimizer's own code runs once more, on stand-ins for all parameters with gradients, but with the real
objects. These then change as in a plain step, and the numbers must equal the recorded ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.passes.capture.host_state import HostState
from collage_neuron.passes.capture.joint import Joint
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.recording import independence
from collage_neuron.recording.bucketing import naming
from collage_neuron.states.bookkeeping import bookkeeping

Scalars = Mapping[torch.Tensor, Mapping[str, Any]]


@contextmanager
def of_step(
    base: type[Optimizer],
    optimizer: Optimizer,
    recordings: Sequence[Recording],
    found: Callable[[], independence.Found],
) -> Iterator[Scalars | None]:
    """A context that applies the side effects of one step, or none if its body raises.

    `found` has the recordings by parameter.

    Yields the host scalars of each parameter after the step; None if the recordings contain all changes.

    Raises:
        UnsupportedUpdate: the step with the real objects is not the one that was recorded.
    """
    if not any(recording.host for recording in recordings):
        yield None
        return
    states = {f"optimizer.state[p{i}]": state for i, state in enumerate(optimizer.state.values())}
    host = HostState(base, optimizer, states)
    host.enter(copies=False)
    try:
        alone = independence.host_side(base, optimizer)
        host.instead_of(optimizer, alone)
        joint = Joint(base, alone, follow=True, made=bookkeeping(optimizer).makes_small)
        with naming(base):
            parts = independence.confirm(joint, optimizer, found())
            host.check()
        yield {p: part.scalars for p, part in parts.items()}
        joint.sync(optimizer)
        host.leave(HostState(base, optimizer, states), alone, optimizer)
    except BaseException:
        host.restore()
        raise
