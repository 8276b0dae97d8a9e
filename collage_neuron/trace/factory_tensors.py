"""Memory that a step makes of a number (`torch.zeros(n)`), which waits, so that what is done with it alone is seen.

On the host a tensor of one element has its value, and is looked at when it meets what waits
(`trace/adopted_tensors.py`). On a device nobody can look without waiting for it, so it waits too. The mode sees those
that torch makes itself as well: the number of `torch.where(mask, x, 1.0)`. On the host there is a mode in steps only
that may make some: it costs time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from collage_neuron import torch_privates
from collage_neuron.trace.calls import NUMBER, Rule, Written
from collage_neuron.trace.placeholders import STEP, WAITING, WaitingTensor, called, has_xla, waits

aten = torch.ops.aten

FULL = aten.full.default
"""The operation that all of them are."""

RULE = Rule("new", True)

_WAITING = frozenset(WAITING)

Made = tuple[Sequence[int], Any]
"""A shape, and the value of all elements."""

_MADE: Mapping[Any, Callable[..., Made]] = {
    aten.zeros.default: lambda size, **_: (size, 0.0),
    aten.ones.default: lambda size, **_: (size, 1.0),
    aten.full.default: lambda size, fill_value, **_: (size, fill_value),
    aten.scalar_tensor.default: lambda s, **_: ((), s),
    aten.lift_fresh.default: lambda x: (x.shape, x.item()),  # torch.tensor(1.0): the host has just sent it
}


def written(shape: Sequence[int], value: float, device: torch.device) -> tuple[Written, dict[str, Any], list[float]]:
    """How the call is written that makes one, and its numbers: one element is one of the step, unless it is 0 or 1."""
    kwargs = {"dtype": (torch.dtype, torch.float32), "device": (torch.device, device)}
    sizes, is_number = [(int, n) for n in shape], math.prod(shape) == 1 and value not in (0.0, 1.0)
    return [sizes, NUMBER if is_number else (float, value)], kwargs, [value] if is_number else []


class MadeOnDevice(torch_privates.DispatchMode):
    """A mode in which what makes tensors of one number on a device is a call of a step that waits."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self._device, self._is_host = device, device.type == "cpu"

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _MADE and (made := self._made(func, args, kwargs or {})) is not None:
            return made
        if types and _WAITING.issuperset(types):  # what torch would call, after 2 us
            return called(WaitingTensor, func, types, args, kwargs)
        # What torch_xla makes of nothing of its own would not be what its views alias, below a mode.
        with nullcontext() if self._is_host or has_xla(args, kwargs or {}) else torch_privates.with_aliases():
            return func(*args, **kwargs or {})

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The placeholder that is returned; None where torch has to make what it is asked for."""
        step: Any = STEP.get()  # the mode has no reference to it, whose memory would wait for the collector then
        if step is None or step.is_filled or torch.is_grad_enabled() or not self._is_fp32(func, args, kwargs):
            return None
        shape, value = _MADE[func](*args, **kwargs)
        if self._is_host and math.prod(shape) == 1:
            return None
        is_negative_zero = not value and math.copysign(1.0, value) < 0
        if type(value) not in (int, float) or is_negative_zero or math.isnan(value):  # which no other call would equal
            return None
        made: torch.Tensor = step.make(shape, float(value))
        return made

    def _is_fp32(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Returns True for fp32 values in rows on the device of the parameters."""
        if func is aten.lift_fresh.default:
            x = args[0]
            return not waits(x) and x.numel() == 1 and x.dtype == torch.float32 and x.device == self._device
        device, dtype, value = kwargs.get("device"), kwargs.get("dtype"), args[-1]
        if dtype is None and (func is not FULL or type(value) is float):
            dtype = torch.get_default_dtype()
        form = kwargs.get("layout"), kwargs.get("memory_format"), kwargs.get("names")
        is_plain = form in ((None, None, None), (torch.strided, None, None))
        return is_plain and dtype == torch.float32 and self._is_there(device)

    def _is_there(self, device: torch.device | None) -> bool:
        """Returns True for the device of the parameters, which code may name without a number."""
        own = self._device
        if device is None:  # torch.zeros(n): the one that torch takes by default
            device = torch.get_default_device()
        return device.type == own.type and device.index in (None, own.index)
