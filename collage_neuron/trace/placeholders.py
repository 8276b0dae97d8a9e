"""Placeholders: tensors whose value waits. They have shape, strides, dtype and storage, and no memory that is read.

Whoever takes the memory of one, in any thread and through any library, gets a RuntimeError from torch itself
(`torch_privates.withhold`). What Python code can do with a tensor without an operation that a dispatch mode sees
(`numpy()`, `tolist()`, `data_ptr()`, `p.data = x`, printing, copying) computes all values first: a placeholder is of a
class in which these names do that. So a value that waits can be reached, but never read before it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from collage_neuron import torch_privates

WAITS = (
    "the value of this tensor waits for the end of optimizer.step(): it cannot be read there by a library that takes "
    "its memory, nor by another thread (collage_neuron; without COLLAGE_NEURON_TRACE=on in the environment no value waits)"
)


def placeholder(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new placeholder on the CPU."""
    made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    torch_privates.withhold(made, WAITS)
    made.__class__ = Waiting
    return made


def compute_all() -> None:
    """Computes the values that wait in this thread; RuntimeError if it is not the thread of the step."""
    mode = torch_privates.innermost_mode()
    fill: Callable[[], None] | None = getattr(mode, "fill", None)
    if fill is None:
        raise RuntimeError(WAITS)
    fill()


def _computed_first(name: str) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        compute_all()  # its class is torch's again
        return getattr(self, name)(*args, **kwargs)

    return method


class Waiting(torch.Tensor):
    """The class of a placeholder; `isinstance` and attributes are those of a tensor."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]  # as torch's
        """A tensor that shares the memory: here an operation, so that it is known."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """`p.data = x`: an operation too, if `x` waits as well."""
        set_data: Callable[..., bool] | None = getattr(torch_privates.innermost_mode(), "set_data", None)
        if set_data is None or not set_data(self, value):
            compute_all()
            self.data = value


set_inside: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""What `t.data = x` does to a tensor."""


class WaitingParameter(torch.nn.Parameter):
    """The same of a parameter."""

    data = Waiting.data  # type: ignore[assignment]


_READ = ("numpy", "tolist", "data_ptr", "untyped_storage", "storage", "__array__", "__dlpack__", "__dlpack_device__",
         "__reduce_ex__", "__deepcopy__", "__repr__", "__str__", "__format__", "share_memory_", "is_shared",
         "register_hook", "is_set_to", "__contains__", "__cuda_array_interface__")  # fmt: skip
for _kind in (Waiting, WaitingParameter):
    for _name in _READ:
        setattr(_kind, _name, _computed_first(_name))


def wait(t: torch.Tensor) -> None:
    """Makes the class of a tensor, or a parameter, that of a placeholder."""
    t.__class__ = Waiting if type(t) is torch.Tensor else WaitingParameter


def has_value(t: torch.Tensor) -> None:
    """Makes it torch's again."""
    if type(t) is Waiting:
        t.__class__ = torch.Tensor
    elif type(t) is WaitingParameter:
        t.__class__ = torch.nn.Parameter
