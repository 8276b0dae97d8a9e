"""Private names of torch about operations: what they are, and the mode that sees them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

DispatchMode = TorchDispatchMode
"""Sees every operation below autograd: `torch.overrides` has only the mode above it, which sees composite operations.

Noticed by `tests/passes/test_capture.py::test_the_captured_graph_replays_the_optimizer`.
"""


def schema(operation: Any) -> Any:
    """What an operation takes, returns and writes: `torch.library` lets one declare a schema, and not read it.

    Noticed by `tests/passes/test_capture.py::test_the_captured_graph_replays_the_optimizer`.
    """
    return operation._schema


def is_operation(target: object) -> bool:
    """Returns True for one overload of an operation, and not for a function; their class has no public name.

    Noticed by `tests/passes/test_verify.py::test_explain_shows_formats_bytes_and_both_graphs`.
    """
    return isinstance(target, torch._ops.OpOverload)


def modes() -> list[Any]:
    """The modes that see the operations of this thread; the last one sees them first.

    Noticed by `tests/trace/test_placeholders.py::test_memory_is_there_for_those_who_ask`.
    """
    return list(torch.utils._python_dispatch._get_current_dispatch_mode_stack())


def without_modes() -> AbstractContextManager[object]:
    """A context in which no mode sees operations.

    Noticed by `tests/trace/test_hostile.py::test_an_update_is_right`.
    """
    return torch.utils._python_dispatch._disable_current_modes()


dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many modes see the operations of this thread.

Noticed by `tests/trace/test_method_cache.py::test_what_changes_an_operation_is_seen`.
"""

function_modes: Callable[[], int] = torch._C._len_torch_function_stack
"""How many modes see its functions and methods.

Noticed by `tests/trace/test_method_cache.py::test_what_changes_an_operation_is_seen`.
"""

is_autocast_enabled: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Returns True if autocast is on for some device.

Noticed by `tests/trace/test_method_cache.py::test_what_changes_an_operation_is_seen`.
"""


def on_lists(name: str, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    """An operation of torch on each tensor of a list: "add_", or "sqrt", which returns a list.

    Noticed by `tests/trace/test_traced_step.py::test_a_step_has_the_bits_of_a_recorded_one`.
    """
    return list(getattr(torch, f"_foreach_{name}")(*args, **kwargs) or ())
