"""Parameters of which this process has a part (DTensor): the part waits, inside a DTensor as before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron import torch_privates
from collage_neuron.states.shard_sums import why_not
from collage_neuron.states.sharding import ORDINARY, is_sharded
from collage_neuron.trace.calls import Uncompiled

if TYPE_CHECKING:
    from collage_neuron.passes.capture.recording import Recording


def may_wait(p: Any) -> bool:
    """Returns True for a DTensor whose operations its class takes apart into those of parts that can wait."""
    has_part = is_sharded(p) and why_not(p) is None and type(torch_privates.part(p)) in ORDINARY
    return has_part and (p.grad is None or _is_sharded_like(p.grad, p))


def is_whole(p: Any) -> bool:
    """Returns True for an ordinary tensor that is no part of a parameter for a library (FSDP1, tensor parallelism)."""
    return not vars(p) or not (torch_privates.is_flattened(p) or getattr(p, "tensor_model_parallel", False))


def parts(objects: Sequence[Any], are_sharded: bool) -> Sequence[Any]:
    """What waits of objects: of a DTensor the part of this process."""
    return list(map(torch_privates.part, objects)) if are_sharded else objects


def check_sharded(p: Any, values: Sequence[Any]) -> None:
    """Raises Uncompiled for states and gradients that are not sharded as their parameter is; numbers are not."""
    tensors = [x for x in values if isinstance(x, torch.Tensor) and x.dim()]
    if not all(_is_sharded_like(x, p) for x in tensors):
        raise Uncompiled("a state or a gradient is not sharded as its parameter is")


def check_elementwise(recording: Recording) -> None:
    """Raises Uncompiled for an update that is not elementwise: that of a part is not the part of that of the whole."""
    if recording.captured.reduces or recording.captured.seen_as is not None:
        raise Uncompiled("it adds up elements of a parameter that is sharded, or sees it in another shape")


def no_copy(part: torch.Tensor) -> torch.Tensor:
    """Raises Uncompiled: what is read of a part is not what is read of the whole."""
    raise Uncompiled("step() reads a value of a parameter that is sharded")


def _is_sharded_like(x: Any, p: Any) -> bool:
    if not (is_sharded(x) and is_sharded(p)):
        return is_sharded(x) == is_sharded(p)
    return bool(x.placements == p.placements and x.device_mesh == p.device_mesh)
