"""Methods of placeholders: a steady step is answered without torch's dispatcher, at a fifth of the cost.

Code that is written for one parameter at a time calls methods (`m.mul_(0.9).add_(g)`, `p - g`). The first step of a
kind notes which method, with the arguments of a call, made that call and no other (`DeferredCalls.method`); a later one
that calls the method there, with the same tensors, has made the call. Whatever else it does, torch finds out what it
is.
"""

from __future__ import annotations

from typing import Any

import torch

from collage_neuron.torch_privates import dispatch_modes, function_modes, is_autocast_enabled
from collage_neuron.trace.placeholders import MADE, READ, STEP, WaitingParameter, WaitingTensor, waits

_OPERATORS = (
    "abs", "add", "and", "eq", "ge", "gt", "iadd", "iand", "imul", "ior", "isub", "itruediv", "ixor", "le", "lt",
    "mul", "ne", "neg", "or", "pow", "radd", "rmul", "rsub", "sub", "truediv", "xor",
)  # fmt: skip


def _is_operation(name: str) -> bool:
    """Returns True for a method that is an operation too, or one in place."""
    is_one = name[0] != "_" and (name[-1] == "_" or hasattr(torch, name)) and not name.startswith("is_")
    return is_one and callable(getattr(torch.Tensor, name)) and name not in (*READ, *MADE)


def _method(name: str) -> Any:
    tensor, is_grad_enabled = torch.Tensor, torch.is_grad_enabled
    torchs, is_reflected = getattr(tensor, name), name.startswith("__r")

    def method(*args: Any, **kwargs: Any) -> Any:
        if is_reflected and len(args) == 2 and isinstance(args[1], torch.Tensor):
            return getattr(args[1], f"__{name[3:]}")(args[0])  # Python asks a subclass first, and torch does not
        step = STEP.get()
        now = getattr(tensor, name)  # code may have put another one there
        if step is None or now is not torchs:
            return now(*args, **kwargs)
        # One expression: a call of Python's costs as much as two of these questions, and each method asks them.
        has_others = dispatch_modes() > step.modes or function_modes() > step.function_modes
        if not (has_others or is_grad_enabled() or is_autocast_enabled()):
            found = step.again(1, name, args, kwargs)
            if found is not None:
                return found
        return step.method(name, now, args, kwargs)

    method.__name__, method.__qualname__, method.__doc__ = name, f"Tensor.{name}", torchs.__doc__
    return method


def _reading(name: str) -> Any:
    tensor, is_grad_enabled, torchs = torch.Tensor, torch.is_grad_enabled, getattr(torch.Tensor, name)

    def method(self: torch.Tensor) -> Any:
        step, now = STEP.get(), getattr(tensor, name)
        if step is None or now is not torchs or dispatch_modes() or function_modes() or is_grad_enabled():
            return now(self)
        value = step.looked_at(self)
        return now(self if value is None else value)

    method.__name__, method.__qualname__, method.__doc__ = name, f"Tensor.{name}", torchs.__doc__
    return method


for _name in ("item", "__bool__", "__float__"):
    for _kind in (WaitingTensor, WaitingParameter):
        setattr(_kind, _name, _reading(_name))

METHODS = [*(f"__{name}__" for name in _OPERATORS), *filter(_is_operation, dir(torch.Tensor))]
"""The methods that a steady step answers."""

for _name in METHODS:
    for _kind in (WaitingTensor, WaitingParameter):
        setattr(_kind, _name, _method(_name))


def _set(self: torch.Tensor, index: Any, value: Any) -> None:
    """`x[mask] = number`: for a mask of no dimensions torch would ask whether it is true, and else make a tensor."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool and waits(index)
    if is_mask and index.shape in ((), self.shape) and isinstance(value, (int, float)):
        self.masked_fill_(index, value)
    else:
        torch.Tensor.__setitem__(self, index, value)


for _kind in (WaitingTensor, WaitingParameter):
    setattr(_kind, "__setitem__", _set)  # noqa: B010  # as above
