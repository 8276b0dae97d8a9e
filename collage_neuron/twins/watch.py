"""Watches the operations of a step on copies: none may touch what was copied, or precede the closure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.torch_privates import DispatchMode, schema, storage_id

_LOOKS = ("detach", "alias", "view")
"""Operations that neither read nor write: `p.data` is one."""


class Watch:
    """What is watched: operations on the memory of `originals`, given by place, raise UnsupportedUpdate.

    `touched` gets an entry for the first operation on the memory of `copies`: a closure that is called after it would
    have to be evaluated on other weights than the model has.
    """

    def __init__(self, originals: Mapping[int, str], copies: Iterable[int]) -> None:
        self.originals, self.copies = originals, frozenset(copies)
        self.touched: list[Any] = []
        self.error: UnsupportedUpdate | None = None

    def see(self, func: Any, name: str, arguments: Any) -> None:
        """Looks at an operation, which is called `name`, before it is run."""
        for memory in map(memory_of, _tensors(arguments)):
            if memory in self.originals:
                self.error = self.error or reached(self.originals[memory], f"in {func}")
                raise self.error
            if memory in self.copies and not self.touched and name not in _LOOKS:
                self.touched.append(func)


class Operations(DispatchMode):
    """A context in which a watch sees all operations."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.watch.see(func, schema(func).name.removeprefix("aten::"), (args, kwargs))
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """The same for XLA, whose tensors are others where operations are seen: it sees the calls of Python's code."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        if name not in ("__get__", "size", "dim", "numel"):  # attributes, which operations are done with
            self.watch.see(name, name, (args, kwargs))
        return func(*args, **(kwargs or {}))


def watching(watch: Watch, devices: Iterable[str]) -> AbstractContextManager[object]:
    """A context in which `watch` sees what is done on devices of these types."""
    return Calls(watch) if "xla" in devices else Operations(watch)


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    """The tensors among the arguments of an operation."""
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (list, tuple)):
        for y in x:
            yield from _tensors(y)
    elif isinstance(x, dict):
        yield from _tensors(tuple(x.values()))


def memory_of(t: torch.Tensor) -> int:
    """A number of the memory that holds `t`, its address; where it has none, that of what stands for it.

    So it is on XLA, and of a CPU tensor that torch_xla made (`torch.rand_like(p, device="cpu")`), which wraps another.
    It is 0 if there is no memory.
    """
    if t.layout is not torch.strided or t.is_meta:
        return 0
    storage = t.untyped_storage()
    if t.device.type != "xla":
        with suppress(RuntimeError):  # "invalid python storage"
            return storage.data_ptr()
    return storage_id(storage)


def reached(what: str, how: str) -> UnsupportedUpdate:
    """The error for a step that gets hold of a rounded tensor in another way than through its optimizer."""
    return UnsupportedUpdate(
        f"step() uses {what} itself ({how}), which is rounded, and not the fp32 copy that the optimizer has during the "
        "step; take parameters and gradients from self.param_groups, and keep no other reference to them (a module, a "
        "view, p.data)"
    )
