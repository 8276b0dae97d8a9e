"""Private names of torch about tensors: versions, identities, guards, views, and tensors without memory."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import starmap
from operator import attrgetter, length_hint
from typing import Any

import torch

version: Callable[[torch.Tensor], int] = attrgetter("_version")
"""How often a tensor, or one that shares its memory, was written in place: it costs no look at the values."""


storage_id: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")
"""The identity of a tensor's memory, its `untyped_storage()`. `data_ptr()` is 0 on the meta device, of recordings."""


copy_all: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copies to each tensor the value in its place: a public call for each (`copy_`) costs ten times as much."""


def copy_each(into: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Copies to each tensor the value in its place in the other list, which may be of another dtype."""
    if into:
        torch._foreach_copy_(into, values)


def flattened(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The elements of all tensors, which have one dtype, in one: `reshape` and `cat` take three times as long."""
    made: torch.Tensor = torch._C._nn.flatten_dense_tensors(tensors)
    return made


def guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """A function of as many tensors: True if all have the same classes, dtypes, devices, shapes, strides and flags.

    It is the guard of torch.compile, one call for all: reading each property of a thousand tensors costs six times as
    much. It returns False whenever a tensor occurs twice: then, and where torch has none, the properties are read, and
    no more tensors may be the same ones.
    """
    try:
        guards = torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
        if guards.check(*tensors):
            check: Callable[..., bool] = guards.check
            return check
    except (AttributeError, TypeError, RuntimeError):
        pass
    # Another torch, or tensors that its guard does not take.
    count, expected = len(set(map(id, tensors))), list(map(_properties, tensors))
    return lambda *others: len(set(map(id, others))) >= count and list(map(_properties, others)) == expected


def _properties(t: torch.Tensor) -> tuple[Any, ...]:
    flags = t.requires_grad, t.is_inference(), t.is_neg(), t.is_conj()
    return type(t), t.dtype, t.device, t.layout, t.shape, t.layout is torch.strided and t.stride(), flags


Views = list[tuple[type, tuple[Any, ...]]]
"""How a tensor was made of another one: notes of torch's, as their types and what these are made of."""


def base_of(t: torch.Tensor) -> torch.Tensor | None:
    """The tensor that `t` is a view of, or None."""
    return t._base


def same_view(t: torch.Tensor, whole: torch.Tensor, other: torch.Tensor) -> torch.Tensor | None:
    """The view of `other` that `t` is of `whole`, which has its memory; None if torch does not say which, or none.

    torch_xla's tensors say it by no offset or stride, but torch notes how they were made. It does not note which part
    of several (`split`); of these the view knows, until it is detached.
    """
    own, before = _views(t), _views(whole)
    views = own[len(before) :]
    if own[: len(before)] != before:
        return None
    if not _are_noted(t, views):
        base = t._base
        return None if base is None or _views(base) != before else t._view_func_unsafe(other)
    return _replayed(views, other)


def view_of_all(t: torch.Tensor, memory: torch.Tensor) -> torch.Tensor | None:
    """The view of a 1-D tensor, which stands for the whole memory of `t`, that `t` is; None if torch does not say."""
    views = _views(t)
    if not views and t.numel() == memory.numel():
        return memory.view(t.shape)
    try:
        made = _replayed(views, memory) if _are_noted(t, views) else None
    except (RuntimeError, IndexError):  # what the memory was made for had more dimensions
        return None
    return made if made is not None and made.shape == t.shape else None


def _replayed(views: Views, other: torch.Tensor) -> torch.Tensor:
    notes = [kind((has_symbols, True, *more)) for kind, (has_symbols, _, *more) in views]  # True: a view, and no copy
    made: torch.Tensor = torch._C._functionalization.apply_view_meta_sequence(other, notes)
    return made


def writes_on_xla(t: torch.Tensor) -> int | None:
    """How often the memory of a tensor on XLA was written, also where torch counts no version; None elsewhere."""
    if t.device.type != "xla" or not torch._is_functional_tensor(t):
        return None
    return int(torch._functionalize_mutation_counter(t))


def _are_noted(t: torch.Tensor, views: Views) -> bool:
    # XLA_DISABLE_FUNCTIONALIZATION=1 leaves no notes.
    return torch._is_functional_tensor(t) and not any(
        kind.__name__.startswith(("split", "unbind")) for kind, _ in views
    )


def _views(t: torch.Tensor) -> Views:
    found: Any = torch._C._functionalization.get_view_meta_sequence(t) if torch._is_functional_tensor(t) else ()
    notes = [(type(note), note.as_tuple()) for note in found]
    return [note for note in notes if not note[0].__name__.startswith(("detach_", "alias_"))]


def exchange(x: torch.Tensor, y: torch.Tensor) -> None:
    """Exchanges what is inside two tensor objects; the objects, their attributes and all that refers to them stay.

    `x.data = y` would make autograd forget where it accumulates the gradient of `x`, and the hooks that DDP has there;
    `torch.utils.swap_tensors` rejects tensors that such a place refers to.
    """
    torch._C._swap_tensor_impl(x, y)
    if type(x) not in (torch.Tensor, torch.nn.Parameter) and hasattr(x, "_local_tensor"):  # a DTensor
        a: Any = x
        b: Any = y
        a._local_tensor, b._local_tensor = b._local_tensor, a._local_tensor
        a._spec, b._spec = b._spec, a._spec


def attributes(t: torch.Tensor) -> dict[str, Any]:
    """What code has left on a tensor object, without what a DTensor, or FSDP1, keeps there of itself."""
    own = vars(t)
    if "_fsdp_flattened" in own:
        return {k: x for k, x in own.items() if not k.startswith("_")}
    return own if "_local_tensor" not in own else {k: x for k, x in own.items() if k not in ("_local_tensor", "_spec")}


def exchange_each(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The same of many pairs of tensors that are what they hold."""
    deque(starmap(torch._C._swap_tensor_impl, pairs), maxlen=0)


def exchange_all(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The same of all pairs, or of none if torch rejects one."""
    waiting = iter(pairs)
    try:
        exchange_each(waiting)
    except RuntimeError:
        exchange_each(pairs[: len(pairs) - length_hint(waiting) - 1])  # those that are exchanged already
        raise


def exchange_shards(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """The same of pairs among which are DTensors."""
    for x, y in pairs:
        exchange(x, y)


def holders(t: torch.Tensor) -> int:
    """How many tensors, arrays and other objects refer to the memory of `t`, itself among them."""
    storage = torch.Tensor.untyped_storage(t)
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # the object `storage` is one


def are_held_once(tensors: Iterable[torch.Tensor]) -> bool:
    """Returns True if nothing but each tensor itself refers to its memory: `holders` takes twice as long for many."""
    storages = list(map(torch.Tensor.untyped_storage, tensors))
    counts = map(torch._C._storage_Use_Count, map(storage_id, storages))
    return all(n <= 2 for n in counts)  # the tensor, and the object in `storages`


def _lie_at(tensors: Sequence[torch.Tensor], addresses: list[int], _: list[int]) -> bool:
    return [*map(torch.Tensor.data_ptr, tensors)] == addresses


are_at: Callable[..., bool] = getattr(torch._C, "_tensors_data_ptrs_at_indices_equal", _lie_at)  # not in torch 2.13
"""Says of tensors, addresses and numbers of these whether they lie there: `data_ptr` of each takes twice as long."""

users: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]  # not in torch's stubs
"""How often something in C++ refers to what is inside a tensor; the object of Python's counts once."""


def _keeps_objects() -> bool:
    t = torch.empty(1, dtype=torch.float32, device="cpu")
    alone, view = sys.getrefcount(t), t.view(1)
    return view is not t and sys.getrefcount(t) > alone


_KEEPS_OBJECTS = _keeps_objects()
"""True where a tensor that something in C++ refers to keeps its object alive itself, as the newest torch has it."""


def references(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often something in Python refers to each tensor's object, and `tensors` itself."""
    counts = list(map(sys.getrefcount, tensors))
    if _KEEPS_OBJECTS:
        counts = [n - (users(t) > 1) for n, t in zip(counts, tensors, strict=True)]
    return counts


def without_memory(
    kind: type[torch.Tensor],
    shape: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
) -> torch.Tensor:
    """A tensor without memory, of a class that torch calls for each operation on it.

    On the CPU its dispatch keys are those of the meta device: so `x.data = t` is an error of torch's, which would give
    `x` memory at the address 0. Its device is the CPU still, and torch does not ask its class for that, as it does for
    a meta tensor that pretends (`dispatch_device`): 2 us each time, five times for each tensor of a fused step.
    """
    unsafe: Any = torch.Tensor
    if device.type == "cpu":
        reach = 1 + offset + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))
        memory = torch.empty(max(reach, 0), dtype=dtype, device="cpu")
        own = memory.as_strided(shape, stride, offset)
        memory.untyped_storage().resize_(0)
        made: torch.Tensor = unsafe._make_subclass(kind, own, False, device_for_backend_keys=torch.device("meta"))
    else:  # `x.data = t` is an error there without that
        made = unsafe._make_wrapper_subclass(
            kind, shape, strides=stride, storage_offset=offset, dtype=dtype, device=device
        )
    torch._C._set_throw_on_mutable_data_ptr(made)  # who asks for its address: it would be 0
    return made


inside: Callable[[torch.Tensor], int] = attrgetter("_cdata")
"""The identity of what is inside a tensor object: what `exchange` exchanges."""
