"""Records the next step of torch's own elementwise classes: a step of a copy with one parameter.

What such a step does depends on the settings of a group, on the numbers in a state, and on what kind of tensors there
are. So one parameter shows what happens to all that are alike, and the optimizer's own step need not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from numbers import Number
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.analysis.state_roles import structure
from collage_neuron.passes.ir.update import Recording
from collage_neuron.states.visible_states import ParamShaped, require_known, visible
from collage_neuron.trace.calls import Uncompiled
from collage_neuron.trace.meta_copy import Copied, Stepped, alone, state_of
from collage_neuron.trace.placeholders import waits


def record(base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], p: Any) -> Recording:
    """The recording of the next step for a parameter of a group.

    Raises:
        UnsupportedUpdate: it cannot be compiled.
    """
    shown = visible(optimizer.state.get(p, {}), p, ())
    try:
        try:
            return _record(base, optimizer, group, p, shown)
        except UnsupportedUpdate:
            if p.dim():
                raise
            return _record(base, optimizer, group, p, _as_numbers(optimizer.state.get(p, {}), shown))
    except Uncompiled as error:
        raise UnsupportedUpdate(f"{base.__name__} cannot be compiled: {error}") from error
    except UnsupportedUpdate:
        require_known(optimizer)  # a word of an unknown format looks like a state of the user's
        raise


def _as_numbers(state: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    # In fp32: torch loads a number of a 0-d bf16 parameter in bf16, as it does states.
    return {k: state[k].float() if isinstance(state[k], Tensor) else v for k, v in shown.items()}


def _record(
    base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], p: Any, shown: dict[str, Any]
) -> Recording:
    while True:
        copied = alone(base, optimizer, group, p, shown)
        stepped = copied.step()
        # All states of a 0-d parameter are 0-d. Those that the step computes from what waits are tensors, no numbers.
        waiting = {*stepped.kind.named[0], *(k for k, x in state_of(copied).items() if waits(x))}
        tensors = {k for k, x in shown.items() if k in waiting and not isinstance(x, ParamShaped)}
        if not tensors:
            break
        shown |= dict.fromkeys(tensors, ParamShaped(p))
    found = recording_of(copied, stepped)
    if structure(found.captured.graph).unread:
        return replace(found, following=recording_of(copied, copied.step()))
    return found


def recording_of(copied: Copied, stepped: Stepped) -> Recording:
    """What a step of a copy with one parameter has done.

    Raises:
        UnsupportedUpdate: it has left the parameter as it is.
    """
    if len(stepped.kind.planned) != 1 or stepped.kind.reads:
        raise UnsupportedUpdate("step() does nothing to a parameter")
    (planned,) = stepped.kind.planned
    # Lists and objects that other code keeps there are not the step's: they stay what they are.
    own = ((k, v) for k, v in state_of(copied).items() if isinstance(v, Tensor | Number | str | None))
    scalars = {k: _copy(v) for k, v in own if not waits(v)}
    return replace(planned.recording, scalars=scalars, kind=stepped.kind, numbers=list(stepped.numbers))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
