"""Parameters of which this process has a part: that waits, of a DTensor inside it as before.

What is not elementwise is not launched: the update of a part is not the part of the whole's update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.runtime.cross_rank_check import why_not_summed
from collage_neuron.runtime.wrappers import SUMS, of_part
from collage_neuron.states.sharding import ORDINARY, is_sharded, is_sharded_like
from collage_neuron.trace.calls import Uncompiled

if TYPE_CHECKING:
    from collage_neuron.passes.ir.recording import Recording


class OfPart(UnsupportedUpdate):
    """What can neither be launched nor run as written: an update of a part of which nobody knows the whole."""


def may_wait(p: Any) -> bool:
    """Returns True for a DTensor whose operations its class takes apart into those of parts that can wait."""
    has_part = is_sharded(p) and why_not_summed(p) is None and type(torch_privates.part(p)) in ORDINARY
    return has_part and (p.grad is None or is_sharded_like(p.grad, p))


def parts(objects: Sequence[Any], are_sharded: bool) -> Sequence[Any]:
    """What waits of objects: of a DTensor the part of this process."""
    return list(map(torch_privates.part, objects)) if are_sharded else objects


def check_sharded(p: Any, values: Sequence[Any]) -> None:
    """Raises Uncompiled for states and gradients that are not sharded as their parameter is; numbers are not."""
    tensors = [x for x in values if isinstance(x, torch.Tensor) and x.dim()]
    if not all(is_sharded_like(x, p) for x in tensors):
        raise Uncompiled("a state or a gradient is not sharded as its parameter is")


def check_elementwise(recording: Recording) -> None:
    """Raises Uncompiled for an update that is not elementwise: that of a part is not the part of that of the whole."""
    if recording.captured.reduces or recording.captured.seen_as is not None:
        raise Uncompiled(SUMS)


def no_copy(part: torch.Tensor) -> torch.Tensor:
    """Raises Uncompiled: what is read of a part is not what is read of the whole."""
    raise Uncompiled("step() reads a value of a parameter that is sharded")


def without_whole(why: str, shape: Sequence[int]) -> str:
    """What is said of a step that is not launched, of a part whose library does not say who has the others."""
    reason = "no DTensor says which processes have the others; what step() computes would be that of the part"
    return of_part(why, shape, reason)
