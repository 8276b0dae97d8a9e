"""Parameters that are sharded over processes (DTensor: FSDP2, tensor parallelism) or devices (torch_xla's SPMD).

An elementwise update of a shard is the shard of the update: each process updates its own, and nothing is communicated.
Where others run as written, torch's own operations on DTensors communicate.
States get the placement of their parameter, so that code that saves or reshards states needs no knowledge of ours.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.torch_privates.distributed import layouts, offset_of_shard, part, parts
from collage_neuron.torch_privates.tensors import guard
from collage_neuron.torch_privates.tensors import version as own_version
from collage_neuron.torch_privates.xla import is_split_over_devices, mark_sharding_like

ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that are what they hold. Of another type, a tensor may be a wrapper, or spread."""

TRIED = ("cpu", "xla", "neuron")
"""The types of devices on which tests run steps as written, and traced ones."""


def is_sharded(t: object) -> bool:
    """Returns True if `t` is a DTensor, without importing torch.distributed, which most processes never need."""
    return hasattr(t, "to_local")


def is_sharded_like(x: Any, p: Any) -> bool:
    """Returns True for a DTensor over the same devices with the same placements as `p`, or if neither is one."""
    if type(x) in ORDINARY and type(p) in ORDINARY:
        return True
    if not (is_sharded(x) and is_sharded(p)):
        return is_sharded(x) == is_sharded(p)
    return bool(x.placements == p.placements and x.device_mesh == p.device_mesh)


def redistributed(x: Any, p: Any) -> torch.Tensor:
    """`x` with the placements of `p`, of which it has the shape."""
    found: torch.Tensor = x if is_sharded_like(x, p) else x.redistribute(x.device_mesh, p.placements)
    return found


def check_placements(p: Any, x: Any, what: str) -> None:
    """Raises ValueError for a state `x` of a DTensor `p` of which this process has another part than of `p`."""
    if is_sharded(p) and is_sharded(x) and x.shape == p.shape and not is_sharded_like(x, p):
        raise ValueError(
            f"{what} has the placements {x.placements}, and its parameter {p.placements}; nothing was updated: "
            "redistribute() it as its parameter is"
        )


def is_distributed() -> bool:
    """Returns True if this process belongs to a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def local(t: torch.Tensor) -> torch.Tensor:
    """The local part of `t`, with the same memory: the shard of a DTensor, else `t` itself."""
    shard: torch.Tensor = part(t)
    return shard


def locals_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The local parts of `tensors`: these themselves if none is sharded."""
    return tensors if ORDINARY.issuperset(map(type, tensors)) else parts(tensors)


def version(t: torch.Tensor) -> int:
    """The version counter of `t`, which every write in place moves on."""
    own = own_version(t)
    # An operation on a DTensor moves on its own counter, and one on the part that is in it, as our steps, that of it.
    return own if type(t) in ORDINARY or (shard := local(t)) is t else own + own_version(shard)


def some_bits(t: torch.Tensor) -> bytes:
    """The first and last bits of `t` on the CPU, which show writes that torch does not count (`t.data.add_`, numpy).

    They are read without an operation of torch, which would take five times as long: this is asked in every step.
    """
    if type(t) not in ORDINARY or not t.is_cpu or t.layout is not torch.strided:
        return b""
    count = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    if count != t.numel():  # between its elements there are others
        return b""
    first, size = t.data_ptr(), count * t.element_size()
    # Memory that was given back (FSDP1) has an address all the same.
    if t.untyped_storage().nbytes() < size:
        return b""
    half = min(size // 2, 1024)
    return ctypes.string_at(first, half) + ctypes.string_at(first + size - half, half)


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The version counters of `tensors`."""
    own, shards = map(own_version, tensors), locals_of(tensors)
    if shards is tensors:
        return list(own)
    return [v if x is t else v + own_version(x) for v, t, x in zip(own, tensors, shards, strict=True)]


class Guard:
    """Whether as many tensors are of the same classes, dtypes, shapes, ..., and DTensors have alike parts."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._sharded = [type(t) not in ORDINARY for t in tensors]
        sharded = list(compress(tensors, self._sharded))
        self._layouts = layouts(sharded)
        self._is_alike = guard([*tensors, *parts(sharded)])

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
        """That of `tensors`; None if one is neither an ordinary tensor nor a DTensor with one in it, or is nested."""
        if any(t.is_nested for t in tensors):
            return None  # torch's guard would end the process
        if ORDINARY.issuperset(map(type, tensors)):
            return guard(tensors)  # without a call of Python's
        return cls(tensors) if ORDINARY.issuperset(map(type, locals_of(tensors))) else None

    def __call__(self, *tensors: torch.Tensor) -> bool:
        sharded = list(compress(tensors, self._sharded))
        is_same = layouts(sharded) == self._layouts  # mostly the same objects
        return is_same and self._is_alike(*tensors, *parts(sharded))


def first_element(p: Any) -> int:
    """The row-major index in the whole of `p` of the first element of this process's part."""
    if not is_sharded(p):
        return 0
    offset = offset_of_shard(p)
    return sum(i * math.prod(p.shape[d + 1 :]) for d, i in enumerate(offset))


def like(shard: torch.Tensor, p: Any) -> torch.Tensor:
    """`shard` as this process's part of a tensor that is sharded like `p`; shards may be uneven, or empty.

    Under torch_xla's SPMD the one process has the whole tensor, and marks it with the sharding of `p`.
    """
    if shard.device.type == "xla":
        _mark(shard, p)
    if not is_sharded(p) or is_sharded(shard):
        return shard
    from torch.distributed.tensor import DTensor

    whole: torch.Tensor = DTensor.from_local(
        shard, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
    )
    return whole


def beside(shared: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """`shared`, words of the blocks of this process's part of `p`: a local tensor; under SPMD it is marked like `p`."""
    if shared.device.type == "xla":
        _mark(shared, p)
    return shared


def _mark(t: torch.Tensor, p: Any) -> None:
    if _is_spmd():
        mark_sharding_like(t, p)


def is_split(p: torch.Tensor) -> bool:
    """Returns True if SPMD (`mark_sharding`) has given each device a part of `p`."""
    return p.device.type == "xla" and _is_spmd() and is_split_over_devices(p)


def _is_spmd() -> bool:
    import torch_xla.runtime as xr  # an extra: imported only where parameters are on an XLA device

    return bool(xr.is_spmd())


def spread(whole: torch.Tensor, p: Any) -> torch.Tensor:
    """Shards a tensor that every process has whole like `p`: each process keeps its shard, nothing is sent."""
    if not is_sharded(p) or is_sharded(whole):
        return whole
    from torch.distributed.tensor import DTensor, Replicate

    copies = [Replicate()] * p.device_mesh.ndim
    return DTensor.from_local(whole, p.device_mesh, copies, run_check=False).redistribute(placements=p.placements)


def gradient(p: Any) -> torch.Tensor:
    """The local shard of the gradient of `p`; a partial gradient (tensor parallelism) is summed first."""
    grad = p.grad
    if type(grad) in ORDINARY:
        ordinary: torch.Tensor = grad
        return ordinary
    if is_sharded(grad) and grad.placements != p.placements:
        grad = grad.redistribute(p.device_mesh, p.placements)
    return local(grad)


def settle_gradients(optimizer: Optimizer) -> None:
    """Shards gradients of DTensors as these are: partial ones (tensor parallelism) are summed."""
    for group in optimizer.param_groups:
        for p in () if ORDINARY.issuperset(map(type, group["params"])) else group["params"]:
            grad: Any = p.grad if type(p) not in ORDINARY else None
            if is_sharded(grad) and grad.device_mesh == p.device_mesh and grad.placements != p.placements:
                p.grad = grad.redistribute(p.device_mesh, p.placements)


def gradients(params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The local shards of the gradients of `params`, as `gradient` says."""
    grads: list[torch.Tensor] = list(map(attrgetter("grad"), params))
    if ORDINARY.issuperset(map(type, grads)):
        return grads
    return parts(grads) if are_sharded_alike(grads, params) else list(map(gradient, params))


def are_sharded_alike(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Returns True if tensors have the shapes, dtypes and placements of others, as FSDP2's gradients have."""
    return layouts(some) == layouts(others)


def set_gradient(p: torch.Tensor, grad: torch.Tensor) -> None:
    """`p.grad = grad` for a gradient of any dtype: torch's setter rejects another one than that of `p`."""
    p.grad = torch.empty_like(grad, dtype=p.dtype)  # not the old one, which may be DDP's own view of a bucket
    p.grad.data = grad


def writable_gradient(p: Any) -> torch.Tensor:
    """The local shard of the gradient, to write to: a tensor of its own replaces a partial or expanded `p.grad`."""
    grad = gradient(p)
    if (is_sharded(p.grad) and p.grad.placements != p.placements) or (0 in grad.stride() and grad.numel() > 1):
        grad = grad.clone(memory_format=torch.contiguous_format)
        p.grad = like(grad, p)
    return grad


def rewrite_data(p: torch.Tensor, data: torch.Tensor) -> None:
    """`p.data = data` with another dtype; for a DTensor as in `Module.to`, since its own dtype cannot change."""
    if not is_sharded(p):
        p.data = like(data, p)
        return
    torch.utils.swap_tensors(p, torch.nn.Parameter(like(data, p), requires_grad=p.requires_grad))
