"""Notices when a step asks for the shape of its parameter, and answers for a parameter without dimensions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from collage_neuron.passes.capture import layouts
from collage_neuron.passes.capture.device_numbers import as_own
from collage_neuron.passes.capture.planes import NO_DIMENSIONS, is_meta, touches_meta


def _lies_on_device(x: Any) -> bool:
    """Returns True for a number on a device, such as a closure's loss; it is read when it enters the tensor plane."""
    return isinstance(x, torch.Tensor) and not (x.is_cpu or x.is_meta) and x.dim() == 0


EVERY_NUMBER = 2
"""That `torch.tensor`, too, makes tensors without data on the parameter's device; 1: only functions such as `zeros`."""


def _is_fraction(value: Any, *others: Any, dtype: Any = None, device: Any = None, **_: Any) -> bool:
    """Returns True for a number that is given to the tensor plane's device as a floating-point tensor."""
    if others or type(value) not in (int, float) or device is None or torch.device(device).type != "meta":
        return False
    return type(value) is float if dtype is None else bool(dtype.is_floating_point)


class ShapeWatch(TorchFunctionMode):
    """Notices if code asks for the shape of a tensor, since its behaviour may then depend on it.

    It also keeps numbers that code puts on the parameter's device (`torch.as_tensor(lr, device=p.device)`) on the host,
    and moves those there that enter the tensor plane. For a 0-d parameter it gives the true shape, and tensors created
    with that size get the shape of the stand-in.

    With `made` as `EVERY_NUMBER`, fractions that code puts on the parameter's device become tensors without data there,
    like those that it makes with `torch.zeros`: code may write tensors to them (`torch.tensor(0.0, device=p.device)`).

    Questions about how tensors lie in memory are checked with the real `params` (`layouts`).
    """

    _QUERIES = frozenset(
        {
            torch.Tensor.dim,
            torch.Tensor.size,
            torch.Tensor.numel,
            torch.Tensor.nelement,
            torch.Tensor.__len__,
            torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
            torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
            torch.Tensor.nbytes.__get__,  # type: ignore[attr-defined]
            torch.numel,
            *layouts.QUERIES,
        }
    )

    def __init__(self, made: int = 0, params: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.asked: set[str] = set()
        self._made, self._params = made, params
        self._sizes: list[torch.Size] = []  # those that were handed out for NO_DIMENSIONS, known by identity

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in layouts.OF_LAYOUT and any(map(is_meta, args)):
            layouts.check_layout(func, self._params)
            self.asked.add(layouts.LAYOUT)
        if func in self._QUERIES and any(map(is_meta, args)):
            self.asked.add("shape")
            return self._answer(func, args, kwargs)
        if self._sizes:
            args, kwargs = tuple(map(self._sized, args)), {k: self._sized(x) for k, x in kwargs.items()}
        if any(map(_lies_on_device, args)) and any(map(touches_meta, args)):
            # Here, and not in the recorder: below this, XLA's tensors are wrapped already.
            args = tuple(x.cpu() if _lies_on_device(x) else x for x in args)
        if func in (torch.tensor, torch.as_tensor) and not isinstance(args[0], (list, tuple)):
            if self._made == EVERY_NUMBER and _is_fraction(*args, **kwargs):
                return torch.full((), args[0], dtype=kwargs.get("dtype"), device="meta")
            kwargs = {k: v for k, v in kwargs.items() if k != "device"}  # a number stays on the scalar plane
        out = func(*args, **kwargs)
        return as_own(out) if func is torch.Tensor.item else out

    def _answer(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args[0].shape != NO_DIMENSIONS:
            return func(*args, **kwargs)
        answer = func(torch.empty((), dtype=torch.float32, device="cpu"), *args[1:], **kwargs)
        if isinstance(answer, torch.Size):
            self._sizes.append(answer)
        return answer

    def _sized(self, x: Any) -> Any:
        return NO_DIMENSIONS if any(x is size for size in self._sizes) else x
