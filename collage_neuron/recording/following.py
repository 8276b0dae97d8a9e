"""Records the step after the next, where that shows what the next one does not: what a state that it makes is for.

Momentum of SGD is the gradient in the first step, as is the anchor of a variance reduction. The step after decays the
one, whose rounding errors are forgotten, and subtracts the other from gradients, with all its errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.analysis.first_moments import unread_states
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import shown_after


def with_following(
    take: Callable[..., Recording], p: torch.Tensor, shown: Mapping[str, Any], recording: Recording
) -> Recording:
    """`recording`, made by `take` of the state `shown`, with that of the step after if it is needed and can be had.

    It cannot if the step changes more than numbers of the state: these the optimizer holds, and they are not advanced.
    """
    captured = recording.captured
    if not unread_states(captured.graph) or recording.host or recording.attributes or recording.group:
        return recording
    tensors = shown_after(captured, p)
    try:
        return replace(recording, following=take({**shown, **recording.scalars, **tensors}))
    except UnsupportedUpdate:
        return recording
