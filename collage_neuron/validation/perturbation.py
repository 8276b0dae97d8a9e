"""Monte Carlo arithmetic: estimates the effect of rounding on tensor code by random perturbations.

The code runs on several copies of its inputs at once. The first copy is not changed; in the others every floating-point
result is perturbed, up or down at random, by a small relative amount. The differences between the copies show how much
the roundings of another order of operations can change, and where a comparison, a sign or a `where` may go either way.
Parker, "Monte Carlo Arithmetic", 1997.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from collage_neuron.passes.functionalize.recorded_ops import writes_first_argument
from collage_neuron.torch_privates import DispatchMode, schema, storage_id

FUNCTION = 2.0**-16
"""The perturbation of exp, log and pow in fp32: the polynomials of two backends differ by 2**-18 at most."""
NARROW = 2.0**-7
"""The perturbation of a result that the code itself converts to 16 bits: the rewritten update keeps it in fp32."""
TINY = 2.0**-125
"""Below this a device may flush to zero, and another order of products may leave fp32's normal range earlier."""

CANCELLED = 4
"""A sum below so many perturbations of its first operand may be 0: no perturbed copy would have just that by chance."""

_SUMS = {"add", "sub", "addcmul", "addcdiv"}
_FUNCTIONS = {"exp", "log", "pow", "sigmoid", "softplus", "atan2"}
_COPIES = {"clone", "copy", "_to_copy", "lift_fresh", "_foreach_copy"}
_EXACT = {"where", "masked_fill", "index_put", "sign", "sgn", "abs", "neg", "maximum", "minimum", "clamp", "clamp_min",
          "clamp_max", "nan_to_num"}  # fmt: skip
"""Operations that do not round in fp32; code may compare their result with the operand that they selected."""
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
"""What is in their memory is no result: it may be infinite, and the next operation writes it (`out=`)."""
_FILLS = {"full", "full_like", "new_full", "fill", "ones", "ones_like", "new_ones"}


class Perturbation(DispatchMode):
    """A mode under which elementwise code runs with perturbed results; it perturbs tensors of `shape`.

    With `stacked` the first dimension counts the copies, and copy 0 is not perturbed; else a tensor is one copy, and
    may have its elements in another shape. `amount` is the relative change of a result, `fills` that of a tensor filled
    with a number. With `to_bf16` every other copy is rounded to bf16 besides: there, values that are close become
    equal, and their difference 0. Without it, half of the differences of numbers that are equal but for what is
    perturbed become 0: code may divide by the norm of such a difference, and only 0 gives another result then.
    """

    def __init__(
        self,
        shape: Sequence[int],
        amount: float,
        fills: float,
        generator: torch.Generator,
        stacked: bool,
        to_bf16: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self._shape, self._amount, self._fills = tuple(shape), amount, fills
        self._generator, self._stacked, self._to_bf16 = generator, stacked, to_bf16
        self._followed: dict[int, str] = {}
        self._alive: list[Tensor] = []  # keeps storages alive: the address of a freed one would be used again
        self.moved: dict[str, Tensor] = {}
        """The total perturbation of each followed tensor, without its effects through the code."""
        self.added: dict[str, Tensor] = {}
        """The magnitude of what the code added to each followed tensor in place."""
        self.overflowed = torch.zeros(self._shape, dtype=torch.bool, device="cpu")
        """Marks elements where a result is NaN or infinite although every operand is finite."""

    def follow(self, name: str, x: Tensor) -> None:
        """Registers an input of the code: it is perturbed too, and `moved` has its total perturbation."""
        self._alive.append(x.detach())
        self._followed[storage_id(x.untyped_storage())] = name
        for moves in self.moved, self.added:
            moves[name] = torch.zeros(x.shape, dtype=torch.float32, device="cpu")
        self._move(x, self._amount)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        finite = self._finite(args)
        written = self._written(func, args)
        within, first = _within(func, args, kwargs), self._cancelled(func, args)
        out = func(*args, **kwargs)
        if _name(func) in _UNWRITTEN:
            return out.zero_()
        for name, x, before in written:
            self.added[name] += (x.detach() - before).abs().reshape(self.added[name].shape)
        self._note_overflow(finite, out)
        amount = self._amount_of(func, out)
        if amount:
            for x, bound in zip(_tensors(args[0] if out is None else out), first, strict=False):
                if self._is_whole(x) and x.is_floating_point():
                    self.overflowed |= finite & ~x.isfinite().reshape(self._shape)
                    self._move(x, NARROW if x.dtype in (torch.bfloat16, torch.float16) else amount, within)
                    self._cancel(x, bound)
        return out

    def _cancelled(self, func: Any, args: Sequence[Any]) -> Iterator[Tensor | None]:
        """Bounds below which the sums that an operation computes may be 0; None for what is not a sum."""
        is_sum = _name(func).removeprefix("_foreach_") in _SUMS and not self._to_bf16
        given = [x for x in _tensors(args[:1]) if is_sum and x.is_floating_point()]
        return chain([CANCELLED * self._amount * x.abs() for x in given], repeat(None))

    def _cancel(self, x: Tensor, bound: Tensor | None) -> None:
        """Makes about half of the elements of `x` that are within a bound 0, in all copies but the first."""
        if bound is None or not (near := x.detach().abs() <= bound).any():
            return
        near &= torch.rand(x.shape, generator=self._generator, dtype=torch.float32, device="cpu") < 0.5
        self._change(x, torch.where(self._copies(near), -self._copies(x), 0.0))

    def _is_whole(self, x: Tensor) -> bool:
        """Returns True for a tensor of `shape`, or one of its elements in another shape."""
        return tuple(x.shape) == self._shape or (not self._stacked and x.numel() == self.overflowed.numel() > 1)

    def _finite(self, args: Any) -> Tensor:
        """The mask of elements where every operand is finite."""
        finite = torch.ones(self._shape, dtype=torch.bool, device="cpu")
        for x in _tensors(args):
            if x.is_floating_point() and (x.numel() == 1 or self._is_whole(x)):
                finite = finite & x.isfinite().reshape(self._shape if self._is_whole(x) else ())
        return finite

    def _note_overflow(self, finite: Tensor, out: Any) -> None:
        """Marks all elements if the sum of finite ones is not finite: torch squares and adds in fp32."""
        for x in [] if self._stacked else _tensors(out):
            if not self._is_whole(x) and x.is_floating_point() and not x.isfinite().all():
                self.overflowed |= finite.all()

    def _written(self, func: Any, args: Any) -> list[tuple[str, Tensor, Tensor]]:
        """The followed tensors that an operation writes in place: name, tensor, and a copy of the old value."""
        if not writes_first_argument(func):
            return []
        found = ((self._followed.get(storage_id(x.untyped_storage())), x) for x in _tensors(args[0]))
        return [(n, x, x.detach().clone()) for n, x in found if n is not None and self._is_whole(x)]

    def _amount_of(self, func: Any, out: Any) -> float:
        name = _name(func)
        narrowed = isinstance(out, Tensor) and out.dtype in (torch.bfloat16, torch.float16)
        if is_view(func) or (name in _COPIES and not narrowed) or (name in _EXACT and not self._to_bf16):
            return 0.0
        if name in _FILLS:
            return self._fills
        return max(self._amount, FUNCTION) if name in _FUNCTIONS else self._amount

    def _move(self, x: Tensor, amount: float, within: Tensor | None = None) -> None:
        """Perturbs each element of all copies of `x` but the first; in every other copy subnormal elements become zero.

        `within` is a larger number from which `x` was computed by one operation.
        """
        if not self._amount:
            return
        copies = self._copies(x)
        up = torch.rand(copies.shape, generator=self._generator, dtype=torch.float32, device="cpu") < 0.5
        change = torch.where(up, amount, -amount).to(x.dtype)
        change = change * (copies if within is None else copies.abs() + self._copies(within))
        if (copies.abs() < TINY).any():
            change = torch.where((copies.abs() < TINY) & up, -copies, change)
        if self._to_bf16:
            every = copies[::2] if self._stacked else copies
            part = change[::2] if self._stacked else change
            part.copy_((every + part).bfloat16().to(x.dtype) - every)
        self._change(x, torch.where(change.isfinite(), change, 0.0))

    def _copies(self, x: Tensor) -> Tensor:
        """All copies of `x` but the one that is not changed."""
        return x.detach()[1:] if self._stacked else x.detach()

    def _change(self, x: Tensor, change: Tensor) -> None:
        """Adds to the copies of `x`."""
        self._copies(x).add_(change)
        name = self._followed.get(storage_id(x.untyped_storage()))
        if name is not None:
            moved = self._copies(self.moved[name])
            moved.add_(change.reshape(moved.shape))


def _name(func: Any) -> str:
    return str(schema(func).name.removeprefix("aten::").rstrip("_"))


@cache
def is_view(func: Any) -> bool:
    """Returns True if what `func` returns shares the memory of an argument that it does not write."""
    infos = [r.alias_info for r in schema(func).returns]
    return any(info is not None and not info.is_write for info in infos)


def _within(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The operand that a lerp adds inside: with a weight near 1 it cancels most of the other operand."""
    if not schema(func).name.startswith("aten::lerp"):
        return None
    x, y, weight = (*args, kwargs.get("weight"))[:3]
    inside: Tensor = (y - x).abs() * abs(weight)
    return inside


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in _tensors(y)]
    return [x] if isinstance(x, Tensor) else []
