"""Placeholders: tensors whose value waits. They have shape, strides, dtype and device, and no memory.

torch calls a placeholder's class for each operation on it, in whatever thread, library or transform that is, and for
what it is asked without one (`numpy()`, `tolist()`, printing, copying) there are methods here. So a value that waits
can be reached, but not read before it is there: it is computed, or there is a RuntimeError.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron.torch_privates.operations import (
    is_cast,
    with_aliases,
    with_autocast,
    without_overrides,
    written_arguments,
)
from collage_neuron.torch_privates.tensors import exchange, without_memory

if TYPE_CHECKING:
    from collage_neuron.trace.deferred_calls import DeferredCalls

WAITS = (
    "the value of this tensor waits for the end of optimizer.step() (collage_neuron): another thread cannot read it, "
    "nor what code has kept of a step that raised; let step() itself read it, or read parameters and states afterwards"
)


STEP: ContextVar[DeferredCalls | None] = ContextVar("STEP", default=None)
"""The step of this thread whose operations wait, the innermost one."""


IN_PROGRESS: list[DeferredCalls] = []
"""The steps of all threads whose operations wait."""


def called(
    cls: type, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Any:
    """What torch calls for an operation on placeholders."""
    step = STEP.get()
    while step is not None:
        if not step.is_filled:  # a step inside another one may have its values while the outer one waits
            return step.call(func, args, kwargs)
        step = step.outer
    return computed(func, args, kwargs or {}, has_xla(args, kwargs or {}))


def computed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], has_own: bool) -> Any:
    """Runs an operation on placeholders that have values.

    `has_own`: tensors of torch_xla's own are among the arguments. Then torch is just about to make what the operation
    returns alias, and what does so here would do it twice; but torch does nothing for what the operation writes.
    """
    given, named = valued(args), dict(zip(kwargs, valued(kwargs.values()), strict=True))
    if is_cast(func):
        with with_autocast():
            return func(*given, **named)
    if (has_own and not written_in(func, args, kwargs)) or not has_xla(given, named):
        return func(*given, **named)
    with with_aliases():
        return func(*given, **named)


def has_xla(args: Iterable[Any], kwargs: dict[str, Any]) -> bool:
    """Returns True if tensors of torch_xla are among the arguments of an operation, and are no placeholders."""
    return any(torch.is_tensor(x) and not waits(x) and x.device.type == "xla" for x in in_lists(args, kwargs))


def in_lists(args: Iterable[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """The arguments of an operation, and what is in those that are lists."""
    return chain.from_iterable(x if isinstance(x, (list, tuple)) else (x,) for x in (*args, *kwargs.values()))


def written_in(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments to which an operation writes, and what is in those that are lists."""
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in written_arguments(func)]
    return [*in_lists(found, {})]


class WaitingTensor(torch.Tensor):
    """The class of a placeholder; `isinstance` and attributes are those of a tensor."""

    __torch_function__: Any = torch.nn.Parameter.__torch_function__  # its results are of torch's own class
    __torch_dispatch__: Any = classmethod(called)

    @property
    def data(self) -> torch.Tensor:
        """A tensor that shares the memory: here an operation, so that it is known."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """`p.data = x`: an operation too, if `x` waits as well."""
        step = STEP.get()
        if step is None or not step.set_data(self, value):
            compute_all()
            set_data(value_of(self), value_of(value))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        """A copy is an operation too, so that it waits."""
        return memo.setdefault(id(self), self.clone())  # type: ignore[no-any-return]


set_data: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""What `t.data = x` does to a tensor."""


class WaitingParameter(torch.nn.Parameter):
    """The class of a placeholder that stands for a parameter."""

    __torch_dispatch__: Any = classmethod(called)
    data = WaitingTensor.data


def _of_value(name: str) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, _VALUE):
            compute_all()
        return getattr(value_of(self), name)(*args, **kwargs)

    return method


def _of_device(name: str) -> Any:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return getattr(torch.empty(0, dtype=self.dtype, device=self.device), name)(*args, **kwargs)

    return method


HANDS_OUT = (
    "__array__", "__cuda_array_interface__", "__dlpack__", "_typed_storage", "apply_", "const_data_ptr", "data_ptr",
    "map_", "mutable_data_ptr", "numpy", "register_hook", "share_memory_", "storage", "untyped_storage",
)  # fmt: skip
"""What can be asked of a tensor without an operation, and lets others write to it, or be called for it."""

READ = (
    *HANDS_OUT, "__contains__", "__dlpack_device__", "__format__", "__reduce_ex__", "__repr__", "__str__",
    "_reduce_ex_internal", "as_subclass", "is_set_to", "is_shared", "storage_type", "tolist",
)  # fmt: skip
"""What can be asked of a tensor without an operation, and depends on its value or its memory."""

MADE = "new", "new_tensor"
"""What makes a tensor of numbers where a tensor is: torch looks below for the device of a placeholder."""

for _kind in (WaitingTensor, WaitingParameter):
    for _name in filter(partial(hasattr, torch.Tensor), READ):
        setattr(_kind, _name, _of_value(_name))
    for _name in MADE:
        setattr(_kind, _name, _of_device(_name))

WaitingParameter.__deepcopy__ = _of_value("__deepcopy__")  # type: ignore[method-assign]


class _AtOnce:
    """What has got its value within the operation that writes it has it before anything else is done with it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        step = STEP.get()
        while step is not None:
            step.give_late()
            step = step.outer
        with without_overrides():  # in another thread it is late still
            return func(*args, **kwargs or {})


class LateTensor(_AtOnce, WaitingTensor):
    """The class of such a placeholder."""


class LateParameter(_AtOnce, WaitingParameter):
    """That of one that stands for a parameter."""


WAITING = WaitingTensor, WaitingParameter
# The attribute of what was inside a placeholder that has its value now: C++ may hold that still.
_VALUE = "_collage_value"


# --- what waits -------------------------------------------------------------------------------------------------------


def placeholder(
    shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device, offset: int = 0
) -> torch.Tensor:
    """A new placeholder."""
    return without_memory(WaitingTensor, shape, stride, dtype, device, offset)


_CLASSES: dict[type, Any] = {torch.Tensor: WaitingTensor, torch.nn.Parameter: WaitingParameter}
for _torchs, _kind in _CLASSES.items():  # code that asks for the name of a class, or prints it, gets torch's
    _kind.__name__, _kind.__qualname__, _kind.__module__ = _torchs.__name__, _torchs.__qualname__, _torchs.__module__


def wait(t: torch.Tensor) -> None:
    """Makes the class of a tensor, or a parameter, that of a placeholder."""
    t.__class__ = _CLASSES[type(t)]


def has_value(t: torch.Tensor) -> None:
    """Makes it torch's again."""
    if isinstance(t, WAITING):
        t.__class__ = _TORCHS[type(t)]


_TORCHS: dict[type, Any] = {
    **{kind: torchs for torchs, kind in _CLASSES.items()},
    LateTensor: torch.Tensor,
    LateParameter: torch.nn.Parameter,
}


def present(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """After placeholders have been exchanged with what was inside the first ones: the classes of both."""
    for owner, other in pairs:
        if waits(other):  # what is around a shard is a DTensor as before
            owner.__class__ = _CLASSES[type(owner)]
            other.__class__ = torch.Tensor


def withdraw(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Before they are exchanged back, if they wait still."""
    for owner, other in pairs:
        if type(owner) in _TORCHS:
            other.__class__, owner.__class__ = WaitingTensor, _TORCHS[type(owner)]


def waits(x: object) -> bool:
    """Returns True for what has no value yet, or stands for what has one."""
    return isinstance(x, WAITING)


def stands_for(x: object) -> bool:
    """Returns True for what stands for a tensor that has its value."""
    return isinstance(x, WAITING) and hasattr(x, _VALUE)


_requires_grad = attrgetter("requires_grad")


def are_marked(tensors: Sequence[torch.Tensor]) -> bool:
    """Returns True if code has left something on a placeholder: the next step must not find it."""
    return any(any(map(asked, tensors)) for asked in (vars, _requires_grad, weakref.getweakrefcount))


# --- what has its value -----------------------------------------------------------------------------------------------


def give(t: torch.Tensor, value: torch.Tensor) -> None:
    """Gives a placeholder its value. The object `value` stands for `t` from now on, wherever C++ has what was in it."""
    vars(t).pop(_VALUE, None)
    has_value(t)
    grad = t.grad  # it belongs to what is inside an object, which is exchanged, and not to the object
    exchange(t, value)
    wait(value)
    if grad is not None:
        t.grad = getattr(grad, _VALUE, grad)
    setattr(value, _VALUE, t)
    if (step := STEP.get()) is not None:
        step.given[id(t)] = value


def put_off(t: torch.Tensor, other: torch.Tensor) -> None:
    """Takes the value from `t` again, which `other` has from now on, until `give` (`DeferredCalls._now` says why)."""
    grad = t.grad
    delattr(other, _VALUE)
    has_value(other)
    exchange(t, other)
    t.grad = grad
    setattr(t, _VALUE, other)
    t.__class__ = LateParameter if isinstance(t, torch.nn.Parameter) else LateTensor


def value_of(x: Any) -> Any:
    """The tensor that has the value of `x`; RuntimeError if it waits."""
    if not isinstance(x, WAITING):
        return x
    found = getattr(x, _VALUE, None)
    if found is None:
        error = RuntimeError(WAITS)  # the step is told, and is repeated even if code catches this
        for step in IN_PROGRESS:
            step.is_asked_for(x, error)
        raise error
    return value_of(found)


def valued(given: Any) -> list[Any]:
    """The values of arguments, and of those in lists (`value_of`)."""
    return [valued(x) if isinstance(x, (list, tuple)) else value_of(x) for x in given]


def compute_all() -> None:
    """Computes the values that wait in this thread."""
    step = STEP.get()
    while step is not None:
        step.fill("its memory is read")
        step = step.outer
