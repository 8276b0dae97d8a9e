"""Parameters of which this process has a part: that waits, of a DTensor inside it as before.

Its class takes each operation apart into those on the part and those between processes. Both wait, and are launched: so
sums are those of all processes, if they launch the same (`process_agreement.agreed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.reductions import across
from collage_neuron.runtime.wrappers import SUMS, of_part, why_not_summed
from collage_neuron.states.sharding import ORDINARY, is_sharded, is_sharded_like
from collage_neuron.trace.calls import Uncompiled

if TYPE_CHECKING:
    from collage_neuron.passes.ir.update import Captured
    from collage_neuron.runtime.step_plan import Job


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


def check_parts(captured: Captured, are_known: bool) -> None:
    """Raises Uncompiled for an update of a part that is not the part of that of the whole."""
    # Where it is known who has the other parts (DTensor), sums are those of the operations that its class calls, on the
    # part and between processes. But what these give are DTensors, and states of one number are kept as they are.
    if captured.seen_as is not None or (captured.small if are_known else captured.reduces):
        raise Uncompiled(SUMS)


def check_sent(captured: Captured, params: Sequence[Any]) -> None:
    """Raises Uncompiled if numbers are added up by other processes than those that agree on what is launched."""
    groups = {node.args[2] for node in captured.graph.nodes if node.target is across}
    for p in params if groups else ():
        mesh = p.device_mesh if is_sharded(p) else None
        if mesh is None or not groups <= {mesh.get_group(i).group_name for i in range(mesh.ndim)}:
            raise Uncompiled("step() adds up numbers of processes that have no parts of the parameter")


def sent(jobs: Sequence[Job], params: Sequence[Any]) -> object:
    """What jobs need of other processes, in the order in which they are taken, alike in all; None if it is nothing."""
    places, groups, found = {id(p): i for i, p in enumerate(params)}, dict[object, int](), list[object]()
    for backend in dict.fromkeys(job.backend for job in jobs):
        for job in (x for x in jobs if x.backend is backend and x.update.between):
            # A group by its number: along a dimension of a mesh, processes of other parts have other groups.
            own = [(how, groups.setdefault(group, len(groups))) for how, group in job.update.between]
            found.append((backend.name, [places[id(p)] for p in job.params], own))
    return found or None


def no_copy(part: torch.Tensor) -> torch.Tensor:
    """Raises Uncompiled: what is read of a part is not what is read of the whole."""
    raise Uncompiled("step() reads a value of a parameter that is sharded")


def without_whole(why: str, shape: Sequence[int]) -> str:
    """What is said of a step that is not launched, of a part whose library does not say who has the others."""
    reason = "no DTensor says which processes have the others; what step() computes would be that of the part"
    return of_part(why, shape, reason)
