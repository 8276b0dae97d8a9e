"""Placeholders: tensors whose value waits. They have shape, strides, dtype and storage, and no memory that is read.

Whoever takes the memory of one, in any thread and through any library, gets a RuntimeError from torch itself
(`torch_privates.withhold`). What Python code can do with a tensor without an operation that a dispatch mode sees
(`numpy()`, `tolist()`, `data_ptr()`, `p.data = x`, printing, copying) computes all values first: a placeholder is of a
class in which these names do that. So a value that waits can be reached, but never read before it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from collage_neuron import torch_privates

WAITS = (
    "the value of this tensor waits for the end of optimizer.step() (collage_neuron): there a library that takes its "
    "memory cannot read it, nor can another thread; without COLLAGE_NEURON_TRACE=on in the environment no value waits"
)


def placeholder(shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A new placeholder on the CPU."""
    made = torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
    torch_privates.withhold(made, WAITS)
    made.__class__ = WaitingTensor
    return made


def compute_all() -> None:
    """Computes the values that wait in this thread; RuntimeError if it is not the thread of the step."""
    _of_mode("fill")()


def _of_mode(name: str) -> Callable[..., Any]:
    """A method of the mode in which the step of this thread runs; code in the step may have modes of its own."""
    for mode in reversed(torch_privates.modes()):
        if hasattr(mode, "fill"):
            method: Callable[..., Any] = getattr(mode, name)
            return method
    raise RuntimeError(WAITS)


def _computed_first(name: str) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        compute_all()  # its class is torch's again
        return getattr(self, name)(*args, **kwargs)

    return method


class WaitingTensor(torch.Tensor):
    """The class of a placeholder; `isinstance` and attributes are those of a tensor."""

    __torch_function__: Any = torch.nn.Parameter.__torch_function__  # its results are of torch's own class

    @property
    def data(self) -> torch.Tensor:
        """A tensor that shares the memory: here an operation, so that it is known."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """`p.data = x`: an operation too, if `x` waits as well."""
        if not _of_mode("set_data")(self, value):
            compute_all()
            self.data = value


set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""What `t.data = x` does to a tensor."""


class WaitingParameter(torch.nn.Parameter):
    """The same of a parameter."""

    data = WaitingTensor.data


_READ = (
    "__array__", "__contains__", "__cuda_array_interface__", "__deepcopy__", "__dlpack__", "__dlpack_device__",
    "__format__", "__reduce_ex__", "__repr__", "__str__", "apply_", "as_subclass", "data_ptr", "is_set_to",
    "is_shared", "map_", "numpy", "register_hook", "share_memory_", "storage", "tolist", "untyped_storage",
)  # fmt: skip
"""What can be asked of a tensor without an operation, and depends on its value or its memory."""

WaitingTensor.__name__, WaitingParameter.__name__ = "Tensor", "Parameter"  # what code may look at, and messages show
for _kind in (WaitingTensor, WaitingParameter):
    for _name in _READ:
        setattr(_kind, _name, _computed_first(_name))


def wait(t: torch.Tensor) -> None:
    """Makes the class of a tensor, or a parameter, that of a placeholder."""
    t.__class__ = _CLASSES[type(t)]


def has_value(t: torch.Tensor) -> None:
    """Makes it torch's again."""
    t.__class__ = _TORCHS.get(type(t), type(t))


_CLASSES: Mapping[type, Any] = {
    torch.Tensor: WaitingTensor,
    torch.nn.Parameter: WaitingParameter,
    WaitingTensor: WaitingTensor,
    WaitingParameter: WaitingParameter,
}
_TORCHS: Mapping[type, Any] = {WaitingTensor: torch.Tensor, WaitingParameter: torch.nn.Parameter}
