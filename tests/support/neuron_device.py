"""A device named `neuron` in Python alone, as TorchNeuron's appears to a program: plain tensors, out of reach.

torch 2.10 and newer can register such a device. Its tensors are C++ tensors whose storages have addresses that belong
to nobody; the bytes lie in memory of the host that hangs on the storage. Every operation runs on the CPU, on that
memory. As on TorchNeuron, float64 is computed in fp32, and int64 holds what int32 does. It is stricter than the device
in one way: a tensor of the host that has dimensions is not taken beside tensors of the device.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._pytree import tree_flatten, tree_map

NAME = "neuron"
NARROW = True
"""False: float64 and int64 are what they are on the CPU."""
copied: list[tuple[str, str]] = []
"""The copies since the list was last cleared: from which type of device to which."""

_ON_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_addresses = itertools.count(1 << 46, 1 << 32)
_libraries: list[torch.library.Library] = []


class Backend:
    """What is `torch.neuron`."""

    name = "trn2"
    """What its only device is called."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: 0)
    set_device = staticmethod(lambda device: None)
    synchronize = staticmethod(lambda device=None: None)
    manual_seed_all = staticmethod(lambda seed: None)
    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, device=None: None)
    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16])

    def get_device_name(self, device: Any = None) -> str:
        return self.name


def register() -> torch.device:
    """The device, which is registered once a process: torch has no way back."""
    if not _libraries:
        registration: Any = backend_registration
        registration._setup_privateuseone_for_python_backend(NAME, backend_module=Backend())
        library = torch.library.Library("_", "IMPL")
        library.fallback(_run, "PrivateUse1")
        own = torch.library.Library("aten", "IMPL")
        own.impl("_copy_from", _copy, "PrivateUse1")
        own.impl("resize_", _resize, "PrivateUse1")
        for name in ("set_.source_Storage_storage_offset", "set_.source_Storage", "set_.source_Tensor", "set_"):
            own.impl(name, _redispatched(name), "PrivateUse1")
        _libraries.extend([library, own])
        torch.serialization.register_package(15, lambda storage: None, _restored)
    return torch.device(NAME, 0)


def _redispatched(name: str) -> Callable[..., Any]:
    base, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops.aten, base), overload or "default")
    return lambda *args: op.redispatch(_ON_CPU, *args)


def on_host(x: Tensor) -> Tensor:
    """The memory of a tensor of the device, as a tensor of the host: what is written to the one is in the other."""
    memory = getattr(x.untyped_storage(), "memory", None)
    if memory is None:  # without elements
        return torch.empty(x.shape, dtype=x.dtype)
    return torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.shape, x.stride())


def on_device(x: Tensor, storage: Any = None) -> Tensor:
    """A tensor of the device with the memory of one of the host, or in a storage that has it already."""
    if storage is None:
        memory = x.untyped_storage()
        device = torch.device(NAME, 0)
        storage = torch._C._construct_storage_from_data_pointer(next(_addresses), device, memory.nbytes())
        storage.memory = memory
    empty = torch._C._acc.create_empty_tensor((0,), x.dtype)  # type: ignore[attr-defined]
    made: Tensor = torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        _ON_CPU, empty, storage, x.storage_offset(), x.shape, x.stride()
    )
    return made


def _restored(storage: Any, location: str) -> Any:
    """A storage of a checkpoint on the device, which has no allocator of its own in C++."""
    if not location.startswith(NAME):
        return None
    as_bytes = torch.empty(0, dtype=torch.uint8).set_(storage)
    return on_device(as_bytes).untyped_storage()


def is_ours(x: Any) -> bool:
    return isinstance(x, Tensor) and x.device.type == NAME


def _run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation, on the CPU."""
    call = _Call(op, args, kwargs)
    return call.back(op(*tree_map(call.there, call.args), **tree_map(call.there, kwargs)))


class _Call:
    """The tensors of a call: those of the device, and what stands for them on the CPU."""

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        self.args = [_number(x, argument) for x, argument in zip(args, op._schema.arguments, strict=False)]
        given = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        if any(x.dim() and not is_ours(x) for x in given):
            raise RuntimeError(f"{op}: expected all tensors on {NAME}, but found one on the host")
        own = {id(x): x for x in given if is_ours(x)}
        self.written = _written(op, args, kwargs)
        self.host = {i: on_host(x) for i, x in own.items()}
        self.storages = {self.host[i].untyped_storage()._cdata: x for i, x in own.items()}
        self.narrow = NARROW and not op.is_view
        self.computed = {i: x.float() if self._is_narrowed(x) else x for i, x in self.host.items()}
        self.wide = self.narrow and any(map(self._is_narrowed, [*self.host.values(), *tree_flatten((args, kwargs))[0]]))

    def _is_narrowed(self, x: Any) -> bool:
        return self.narrow and (x is torch.float64 or (isinstance(x, Tensor) and x.dtype == torch.float64))

    def there(self, x: Any) -> Any:
        """What stands for an argument on the CPU."""
        if isinstance(x, torch.device) and x.type == NAME:
            return torch.device("cpu")
        if x is torch.float64 and self.wide:
            return torch.float32
        return self.computed.get(id(x), x) if isinstance(x, Tensor) else x

    def back(self, results: Any) -> Any:
        """The results on the device: what was written to, views of what was given, or new tensors."""
        for x in self.written:
            self._write(x)
        originals = {id(self.computed[id(x)]): x for x in self.written}
        return tree_map(lambda y: self._back(y, originals) if isinstance(y, Tensor) else y, results)

    def _write(self, x: Tensor) -> None:
        computed, host = self.computed[id(x)], self.host[id(x)]
        if computed.shape != x.shape:  # of `out=`, which operations of torch's own begin with as an empty one
            _resize(x, computed.shape)
            host = on_host(x)
        if computed is not host:
            host.copy_(computed)
        _narrowed(host)

    def _back(self, y: Tensor, originals: dict[int, Tensor]) -> Tensor:
        if id(y) in originals:
            return originals[id(y)]
        owner = self.storages.get(y.untyped_storage()._cdata) if y.numel() else None
        if owner is not None:
            return on_device(y, owner.untyped_storage())
        return on_device(_narrowed(y.double() if self.wide and y.dtype == torch.float32 else y))


def _number(x: Any, argument: Any) -> Any:
    """A number that stands for a tensor, as torch hands it to Python."""
    return torch.tensor(x) if str(argument.type) == "Tensor" and isinstance(x, (int, float)) else x


def _written(op: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """The tensors of the device that an operation writes to, as its schema has them."""
    found: list[Tensor] = []
    for i, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            found += [x for x in tree_flatten(value)[0] if is_ours(x)]
    return found


def _narrowed(x: Tensor) -> Tensor:
    """Its values as they come through the narrower type; in place."""
    if NARROW and x.dtype in _NARROWER:
        x.copy_(x.to(_NARROWER[x.dtype]))
    return x


_NARROWER = {torch.float64: torch.float32, torch.int64: torch.int32}


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """From the host, to the host, or on the device."""
    copied.append((source.device.type, target.device.type))
    x, y = (on_host(t) if is_ours(t) else t for t in (source, target))
    y.copy_(x)
    if is_ours(target):
        _narrowed(y)
    return target


def _resize(x: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    """To as many elements or fewer in the same memory, or to new memory."""
    made = on_device(torch.empty(size, dtype=x.dtype))
    torch.ops.aten.set_.source_Storage_storage_offset.redispatch(
        _ON_CPU, x, made.untyped_storage(), 0, made.shape, made.stride()
    )
    return x
