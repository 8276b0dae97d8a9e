"""Watches the operations of a step on copies: none may touch what was copied, or precede the closure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.torch_privates import DispatchMode, schema

_LOOKS = ("aten::detach", "aten::alias", "aten::view")
"""Operations that neither read nor write: `p.data` is one."""


class Watch(DispatchMode):
    """A context in which operations on the memory of `originals`, given by place, raise UnsupportedUpdate.

    `touched` gets an entry for the first operation on the memory of `copies`: a closure that is called after it would
    have to be evaluated on other weights than the model has.
    """

    def __init__(self, originals: Mapping[int, str], copies: Iterable[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self.originals, self.copies = originals, frozenset(copies)
        self.touched: list[Any] = []
        self.error: UnsupportedUpdate | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for memory in map(memory_of, _tensors((args, kwargs))):
            if memory in self.originals:
                self.error = self.error or reached(self.originals[memory], f"in {func}")
                raise self.error
            if memory in self.copies and not self.touched and schema(func).name not in _LOOKS:
                self.touched.append(func)
        return func(*args, **(kwargs or {}))


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
    """The address of the memory that holds `t`; 0 if it has none."""
    return t.untyped_storage().data_ptr() if t.layout is torch.strided and not t.is_meta else 0


def reached(what: str, how: str) -> UnsupportedUpdate:
    """The error for a step that gets hold of a rounded tensor in another way than through its optimizer."""
    return UnsupportedUpdate(
        f"step() uses {what} itself ({how}), which is rounded, and not the fp32 copy that the optimizer has during the "
        "step; take parameters and gradients from self.param_groups, and keep no other reference to them (a module, a "
        "view, p.data)"
    )
