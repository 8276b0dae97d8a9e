"""Private names of torch about operations: what they are, and the mode that sees them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DispatchMode = TorchDispatchMode
"""Sees every operation below autograd: `torch.overrides` has only the mode above it, which sees composite operations.
"""


def schema(operation: Any) -> Any:
    """What an operation takes, returns and writes: `torch.library` lets one declare a schema, and not read it."""
    return operation._schema


def is_operation(target: object) -> bool:
    """Returns True for one overload of an operation, and not for a function; their class has no public name."""
    return isinstance(target, torch._ops.OpOverload)


@cache
def written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """The places and names of the arguments that an operation writes to; empty for a function."""
    given = func._schema.arguments if is_operation(func) else ()
    return tuple((i, a.name) for i, a in enumerate(given) if a.alias_info is not None and a.alias_info.is_write)


def modes() -> list[Any]:
    """The modes that see the operations of this thread; the last one sees them first."""
    return list(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


def without_modes() -> AbstractContextManager[object]:
    """A context in which no mode sees operations."""
    return torch.utils._python_dispatch._disable_current_modes()


@contextmanager
def unseen() -> Iterator[None]:
    """A context in which no mode sees operations, functions and methods."""
    with without_modes(), torch._C.DisableTorchFunction():
        yield


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes see the operations of this thread."""

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes see its functions and methods."""

is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Returns True if autocast is on for some device."""


def forget_casts() -> None:
    """Lets go of what autocast keeps of parameters that it has cast, as at its end: it refers weakly to them."""
    if is_autocast_enabled():
        torch.clear_autocast_cache()


def is_cast(func: Any) -> bool:
    """Returns True within an operation on a placeholder if autocast is on around it, and has it in other dtypes.

    A placeholder has no keys of the host by which torch would call autocast first, and within the operation torch says
    that autocast is off; how many contexts there are it says still. It publishes which operations these are as a table.
    """
    torch.autocast_increment_nesting()
    if not (torch.autocast_decrement_nesting() and _has_autocast(func)):
        return False
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]  # not in torch's stubs
        return torch.is_autocast_enabled("cpu")


@cache
def _has_autocast(func: Any) -> bool:
    return is_operation(func) and bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "AutocastCPU"))


def with_autocast() -> AbstractContextManager[None]:
    """A context in which such an operation is cast."""
    made: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCPU, False)
    return made


def has_dual_level() -> bool:
    """Returns True if tensors may have tangents, of forward-mode AD: torch has no question for it."""
    return bool(torch.autograd.forward_ad._current_level >= 0)


def on_lists(name: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """An operation of torch on each tensor of a list: "add_", or "sqrt", which returns a list."""
    return list(getattr(torch, f"_foreach_{name}")(*args, **kwargs) or ())


@contextmanager
def unobserved() -> Iterator[None]:
    """A context in which torch computes, and nothing else."""
    # Most often it does already, and the contexts cost 20 us.
    if not (dispatch_modes() or torch.is_grad_enabled() or torch.is_inference_mode_enabled() or is_autocast_enabled()):
        yield
        return
    # `torch.autocast(enabled=False)` is for one device.
    with without_modes(), torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
        yield


def with_aliases() -> AbstractContextManager[None]:
    """A context in which views of torch_xla's tensors alias these, as anywhere else.

    Within an operation on a placeholder torch leaves out the key by which they do (`Functionalize`). torch_xla takes
    other code then, in which a write through a view is lost, and the first row of a square matrix is its first column.
    """
    made: AbstractContextManager[None] = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.Functionalize, False)
    return made


def without_overrides() -> AbstractContextManager[None]:
    """A context in which classes of tensors do not see functions: `DisableTorchFunctionSubclass` has no public name."""
    made: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return made


@contextmanager
def unobserved_on_xla() -> Iterator[None]:
    """Both contexts: what is computed within an operation on a placeholder is what it is elsewhere."""
    with unobserved(), with_aliases():
        yield
