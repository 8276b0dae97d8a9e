"""0-d parameters (a logit scale): finds out which of their states are numbers, and which have the parameter's shape.

Every state of such a parameter is 0-d, `step` and `exp_avg` alike. A recording distinguishes them: a state that a first
step creates with the parameter's shape, or to which a step writes tensors, has that shape; all others are numbers,
which the host computes. So the result depends only on the optimizer and its state, wherever that comes from.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.planes import check_floating
from collage_neuron.passes.capture.recorder import number_written
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import ParamShaped
from collage_neuron.states.names import is_component, suffixes

Take = Callable[[Mapping[str, Any]], Recording]
"""Records the next step of a parameter with the given state."""


def decide(take: Take, p: torch.Tensor, state: Mapping[str, Any]) -> tuple[dict[str, Any], Recording]:
    """The state of `p` with its tensors as `ParamShaped`, and the recording that proves them to be tensors."""
    shown = {k: v for k, v in state.items() if not is_component(k, state)}
    shown |= {k: ParamShaped(p) for k in shown if any(k + s in state for s in suffixes())}
    if _numbers(shown):
        with suppress(UnsupportedUpdate):  # an optimizer that fills its state when it is made has no first step
            shown |= dict.fromkeys(_numbers(shown).intersection(take({}).captured.states), ParamShaped(p))
    while True:
        recording, written = _attempt(take, shown)
        if recording is not None and not written:
            return shown, recording
        for name in written:
            check_floating(name, state[name].dtype)
        shown |= dict.fromkeys(written, ParamShaped(p))


def _numbers(shown: Mapping[str, Any]) -> set[str]:
    return {k for k, v in shown.items() if isinstance(v, torch.Tensor)}


def _attempt(take: Take, shown: Mapping[str, Any]) -> tuple[Recording | None, set[str]]:
    """A recording, or None, and the names of states that were passed as numbers although they are tensors.

    Raises:
        UnsupportedUpdate: the step cannot be recorded, and not because of them.
    """
    try:
        recording = take(shown)
    except UnsupportedUpdate as error:
        name = number_written(error)
        if name is None:
            raise
        return None, {name}
    return recording, _numbers(shown).intersection(recording.captured.states)
