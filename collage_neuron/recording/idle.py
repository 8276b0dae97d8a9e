"""What a step does where there are no gradients: to groups in which no parameter has one, and to such parameters.

The code of `step()` runs for them too, as in plain torch: it counts steps in the group, or advances a schedule, before
it passes by parameters without a gradient. What it does to a group without any is recorded in each step, and is all
that may be: a step that updates such a parameter, or counts in its state, is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture import position_aware
from collage_neuron.passes.capture.capture import capture
from collage_neuron.passes.capture.planes import differing
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import shown_after
from collage_neuron.recording.bucketing import buckets, naming
from collage_neuron.recording.visible import visible
from collage_neuron.states import small
from collage_neuron.states.bookkeeping import bookkeeping

Idle = Mapping[int, Recording]
"""By the index of a group, in which no parameter has a gradient, the recording of what a step does to it."""


def recordings(base: type[Optimizer], optimizer: Optimizer) -> Idle:
    """The recordings for the groups in which no parameter has a gradient. Classes of torch.optim do not need them.

    Parameters without a gradient in other groups are looked at in steps 1, 2, 4, 8, ...

    Raises:
        UnsupportedUpdate: the step does something to a parameter without a gradient; nothing has been changed.
    """
    if position_aware.is_of_torch(base):
        return {}
    steps, found = bookkeeping(optimizer).steps, dict[int, Recording]()
    for i, group in enumerate(optimizer.param_groups):
        lacking = [p for p in group["params"] if p.grad is None]
        is_idle = len(lacking) == len(group["params"])
        if is_idle or (lacking and steps & (steps + 1) == 0):
            with naming(base):
                recorded = list(_recorded(base, optimizer, group, lacking))
            found |= {i: recorded[0]} if is_idle else {}
    return found


def _recorded(
    base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], params: list[torch.nn.Parameter]
) -> Iterator[Recording]:
    """The recordings of parameters without a gradient, one for all that are alike; of an empty group, that of none."""
    for alike in buckets(optimizer, params) if params else [[_nothing()]]:
        p, ours = alike[0], bookkeeping(optimizer)
        take = partial(capture, base, optimizer, group, p, idle=True)
        shown = visible(optimizer.state.get(p, {}), p, ours.small)
        first = small.decide(take, p, shown, ours.makes_small)
        after = {**first.recording.scalars, **shown_after(first.recording.captured, p)}
        if not shown and after:  # it makes a state before it looks at the gradient, and must leave it as it is then
            _check_made(p, first.recording)
            _check_unchanged(p, after, take(after, made=first.makes))
        else:
            _check_unchanged(p, first.shown, first.recording)
        yield first.recording


def _check_made(p: torch.Tensor, recording: Recording) -> None:
    """Raises for a new state that is not zero: it is made with the first gradient, where it might be another one."""
    fresh = recording.captured.fresh
    others = [name for name in shown_after(recording.captured, p) if fresh.get(name) != 0]
    for name in [*others, *(k for k, v in recording.scalars.items() if not _is_zero(v))]:
        raise UnsupportedUpdate(
            f"of a parameter without a gradient, of shape {list(p.shape)}, the step makes "
            f"optimizer.state[p][{name!r}], which is not zero; pass by such parameters before their state is made "
            "(if p.grad is None: continue)"
        )


def _is_zero(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return not value.any()
    return value is None or (isinstance(value, (bool, int, float, str, list, tuple, dict)) and not value)


def _check_unchanged(p: torch.Tensor, before: Mapping[str, Any], recording: Recording) -> None:
    (outputs,) = next(n for n in reversed(recording.captured.graph.nodes) if n.op == "output").args
    written = [name for name, node in outputs.items() if node.op != "placeholder" or node.target != name]
    for name in [*written, *differing(before, recording.scalars), *(recording.captured.fresh.keys() - before.keys())]:
        what = "it" if name == "param" else "its gradient" if name == "grad" else f"optimizer.state[p][{name!r}]"
        raise UnsupportedUpdate(
            f"of a parameter without a gradient, of shape {list(p.shape)}, the step changes {what}; pass by such "
            "parameters before their state is looked at (if p.grad is None: continue), or give it a gradient of zeros"
        )


def _nothing() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.empty(1, dtype=torch.float32, device="cpu"), requires_grad=False)
