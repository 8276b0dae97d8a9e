"""Gradients with NaN or Inf: propagated as in torch, or a skipped step, which changes nothing and is counted.

The decision to skip is made where the gradients are. If that is the host, all that skip is left out, as if `step()` had
not been called for it: no number advances. A device decides later. The host does not wait for it, lets the step advance
its numbers, and the device writes nothing. But a step that creates states, often with values that only it gives them
(schedule-free's `z` is the parameter, SGD's momentum the gradient), would leave zeros, which every later step takes for
those values. So there the host asks, and the next step is the first again. It asks too where the code of a traced step
has to know a value.

With several processes, all that share parameters skip a step, or none does. Each process sees only the gradients of its
own shards. So the decisions are summed on the device, over every process group among which a parameter is sharded;
processes without shards, or without gradients, take part. Nothing is needed where all processes have equal gradients
(DDP), or where there is one program (SPMD).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.runtime import wrappers
from collage_neuron.settings import SKIPPED, Settings
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import gradient, is_distributed, is_sharded

if TYPE_CHECKING:
    from collage_neuron.runtime.step_plan import Job


def decision(optimizer: Optimizer) -> torch.Tensor | None:
    """A device mask: true if all gradients of groups with `nonfinite="skip"` are finite. None without such groups.

    Processes that share parameters share the mask. Each takes part, whether or not it has gradients in this step.
    """
    skipping = [group for group in optimizer.param_groups if Settings.of(group).nonfinite == "skip"]
    if not skipping:
        return None
    params = [p for group in skipping for p in group["params"]]
    finite = agreed(optimizer, params, all_finite(params))
    count(optimizer, finite)
    return finite


def all_finite(params: Sequence[torch.Tensor]) -> torch.Tensor:
    """A 0-d mask, on the device of the first parameter (if any): true if all gradients are finite."""
    device = params[0].device if params else None
    grads = [gradient(p) for p in params if p.grad is not None]
    on_host = [g for g in grads if g.is_cpu and g.numel() and not g.is_sparse]
    found = [torch.isfinite(g).all().to(device) for g in grads if not g.is_cpu or g.is_sparse]
    found += [_are_finite_between(on_host).to(device)] if on_host else []
    return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool, device=device)


def _are_finite_between(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """`all_finite` for tensors on the CPU: the least and the largest element, NaN if there is one, take one pass.

    `isfinite` writes a mask, and takes 25 times as long on bf16.
    """
    ends = [end.double() for t in tensors for end in torch.aminmax(t)]
    return torch.stack(ends).isfinite().all()


def count(optimizer: Optimizer, finite: torch.Tensor) -> None:
    """Counts a skipped step, on the device. All groups with `nonfinite="skip"` share one count."""
    # A number becomes a tensor first: as a constant it would give XLA another program after each checkpoint.
    before = torch.as_tensor(_count(optimizer), dtype=torch.int32).to(finite.device)
    _set(optimizer, before + (~finite).to(torch.int32))


def read_counts(optimizer: Optimizer) -> None:
    """Replaces the count by a number in every group that may skip, for a checkpoint. Waits for the device."""
    _set(optimizer, int(_count(optimizer)))


def _count(optimizer: Optimizer) -> torch.Tensor | int:
    counts = (group[SKIPPED] for group in optimizer.param_groups if SKIPPED in group)
    return next(counts, 0)


def _set(optimizer: Optimizer, count: torch.Tensor | int) -> None:
    for group in optimizer.param_groups:
        if SKIPPED in group or group.get("collage_nonfinite") == "skip":
            group[SKIPPED] = count


def skipped_steps(optimizer: Optimizer) -> int:
    """Number of steps of this run that `optimizer` skipped because of NaN or Inf in a gradient.

    The count is in `param_groups` (`collage_skipped`): copies, pickles and checkpoints carry it. After loading a
    checkpoint without it the count starts at 0.

    With ``nonfinite="skip"``, if any gradient has a NaN or Inf, the step changes no bit of any parameter or state
    tensor. With parameters on the CPU, it is as if `step()` had not been called. On an XLA device, numbers on the host
    advance (`step`, and bias corrections computed from it), since the host does not wait for the decision; but a step
    that would create states (the first of a parameter) is left out, and leaves nothing behind. Processes that share
    parameters skip together.
    """
    return int(_count(optimizer))


# --- agreement between processes --------------------------------------------------------------------------------------


Reduce = Callable[[torch.Tensor], None]
"""Sums a tensor over a process group, in place."""


def agreed(optimizer: Optimizer, params: Sequence[Any], finite: torch.Tensor) -> torch.Tensor:
    """The common decision, a 0-d mask like `finite`: true if it is true in all processes that share `params`.

    Raises:
        ValueError: the parameters were split by a library that does not tell its process groups.
    """
    reductions = _reductions(optimizer, params)
    if not reductions:
        return finite
    found = (~finite).float()  # a sum, as for gradients: not every collective library has a minimum over booleans
    for reduce in reductions:
        reduce(found)
    return found == 0


def _reductions(optimizer: Optimizer, params: Sequence[Any]) -> Sequence[Reduce]:
    ours = bookkeeping(optimizer)
    if ours.reductions is None:  # searches all objects of the process, so only once
        _check_known(params)
        ours.reductions = [*_of_wrapper(optimizer), *_of_flat(params)]
    return [*_of_meshes(params), *ours.reductions]


def _check_known(params: Sequence[Any]) -> None:
    """Raises for parameters that layers of Megatron or neuronx_distributed have split, without DTensors."""
    for p in params if is_distributed() else ():
        if getattr(p, "tensor_model_parallel", False) and not is_sharded(p):
            raise ValueError(
                f"a parameter of shape {list(p.shape)} is split by tensor parallelism (p.tensor_model_parallel), over "
                "processes that only its library knows, and each would skip steps by itself; nothing was updated: use "
                "nonfinite='pass', and leave out steps in the training loop"
            )


def _of_meshes(params: Sequence[Any]) -> list[Reduce]:
    """The reductions for FSDP2, HSDP and tensor parallelism: one per dimension of each mesh, in parameter order."""
    meshes = dict.fromkeys(p.device_mesh for p in params if is_sharded(p))
    groups = {mesh.get_group(i): mesh.device_type for mesh in meshes for i in range(mesh.ndim)}
    return [_all_reduce(group, device) for group, device in groups.items()]


def _all_reduce(group: Any, device: str | torch.device | None = None) -> Reduce:
    def reduce(found: torch.Tensor) -> None:
        # Where the group's network is; parameters may be offloaded.
        there = found if device is None else found.to(device)
        torch.distributed.all_reduce(there, group=group)
        found.copy_(there)

    return reduce


def _of_flat(params: Sequence[Any]) -> Iterator[Reduce]:
    """The reductions for FSDP1: over the processes that share a flat parameter."""
    if not any(map(torch_privates.is_flattened, params)):
        return
    held = set(params)
    handles = wrappers.instances(*torch_privates.FSDP1)
    own = [h for h in handles if not held.isdisjoint(torch_privates.of_flat_parameter(h))]
    yield from (_all_reduce(group, device) for group, device in {h.process_group: h.device for h in own}.items())


def _of_wrapper(optimizer: Optimizer) -> Iterator[Reduce]:
    """The reductions for ZeRO-1 of torch and torch_xla, where each process has other parameters or shards."""
    of_torch = "torch.distributed.optim.zero_redundancy_optimizer"
    for zero in wrappers.instances(of_torch, "ZeroRedundancyOptimizer") if is_distributed() else ():
        if vars(zero).get("optim") is optimizer:
            yield _all_reduce(zero.process_group, torch_privates.device_of_zero(zero))
    for zero in wrappers.zero_of_xla(optimizer):
        yield from (partial(_all_reduce_of_xla, zero, groups) for groups in torch_privates.groups_of_xla_zero(zero))


def _all_reduce_of_xla(zero: Any, groups: Any, found: torch.Tensor) -> None:
    import torch_xla.core.xla_model as xm  # an extra: imported only where parameters are on an XLA device

    xm.all_reduce(xm.REDUCE_SUM, [found], groups=groups, pin_layout=zero.pin_layout)


# --- what the host leaves out -----------------------------------------------------------------------------------------


def not_skipped(optimizer: Optimizer, jobs: list[Job], finite: torch.Tensor | None) -> list[Job]:
    """The jobs of a step but those that are left out; on a device, waits for `finite` if one would create states."""
    if finite is None:
        return jobs
    skipping = [job for job in jobs if job.settings.nonfinite == "skip" and (finite.is_cpu or _creates(optimizer, job))]
    if not skipping or bool(finite):
        return jobs
    return [job for job in jobs if not any(job is other for other in skipping)]


def _creates(optimizer: Optimizer, job: Job) -> bool:
    """Returns True if a parameter lacks a state or a number that the update writes."""
    stored = {fmt.keys(name)[0] for name, fmt in job.update.formats.items() if name != "param"}
    names = stored | set(job.recording.captured.small) | job.recording.scalars.keys()
    return any(not names <= optimizer.state[p].keys() for p in job.params) if names else False
