"""Takes a step again on a sample in fp32, and estimates how much rounding may change its results.

That is Monte Carlo arithmetic: the code runs on several copies of its inputs. The first copy is not changed; in
the others every floating-point result is perturbed, up or down at random, by a small relative amount. The differences
between the copies show how much the roundings of another order of operations can change, and where a comparison, a sign
or a `where` may go either way. Parker, "Monte Carlo Arithmetic", 1997.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from typing import Any, NamedTuple

import torch
from torch import Tensor

from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.underflow import rounding
from collage_neuron.passes.functionalize.recorded_ops import writes_first_argument
from collage_neuron.torch_privates import DispatchMode, schema, storage_id
from collage_neuron.validation.sample import Expected, Sample

RUNS = 12
"""Number of perturbed copies of a sample that are stepped."""
AMOUNT = {"fp32": 2.0**-20, "bf16": 2.0**-6}
"""Relative perturbation of a result: 16 roundings of fp32, or 4 of bf16. The rewritten update rounds at most three
times for one operation of the user's, torch once or twice; the rest allows for the sum of roundings of several
operations, which some of the copies show only in part."""
SPREAD = {"fp32": 2.0, "bf16": 4.0}
"""Factor on the largest deviation among the copies. Copies are independent: the largest of 12 is below half of a
standard deviation once in 10**5 elements, and the perturbations are 4 to 16 times the real roundings. In bf16
arithmetic a cancellation may lead to a value that no copy has reached."""
NEGLIGIBLE = {"fp32": 2, "bf16": 16}
"""Limit of a useful bound, in roundings of the format; a quarter of the change of a value is useful too. Values with a
wider bound are left out."""
OWN = {"fp32": 2.0**-21, "bf16": 2.0**-6}
"""Relative rounding of additions to the value itself; `PAIR` for expansions in bf16 arithmetic."""
PAIR = 2.0**-13


def expected(twin: InFp32) -> Expected:
    """The results of a step in fp32 for its sample, with bounds from perturbed copies."""
    taken = twin.taken
    arithmetic, before = taken.job.settings.arithmetic, taken.values()
    plain, copies = twin.run(), twin.perturbed()
    values, bounds, unsure = {}, {}, {}
    for name, fmt in taken.formats.items():
        new, old = plain.after[name], before[name]
        # The perturbation of a value itself is subtracted: only its effect through the step counts.
        off = (copies.after[name] - new - copies.moved[name]).abs().amax(dim=0)
        own = _own(arithmetic, fmt) * torch.maximum(old.abs(), new.abs()) + AMOUNT[arithmetic] * plain.added[name]
        bound = SPREAD[arithmetic] * off + own
        values[name], bounds[name] = new, bound
        stored = NEGLIGIBLE[arithmetic] * rounding(fmt, new.abs()) + 2.0**-15 * new.abs()
        small = (bound <= (new - old).abs() / 4) | (bound <= stored)
        unsure[name] = new.isfinite() & ~small & (bound != 0)
    return Expected(values, bounds, unsure, plain.overflowed | copies.overflowed.any(dim=0))


class Ran(NamedTuple):
    """A step of the twin; of several copies, one after the other in a first dimension."""

    after: Mapping[str, Tensor]
    moved: Mapping[str, Tensor]
    """The perturbation of each value itself (`Perturbation.moved`)."""
    added: Mapping[str, Tensor]
    overflowed: Tensor


def _joined(runs: Sequence[Ran]) -> Ran:
    after, moved, added, overflowed = zip(*runs, strict=True)
    each = [{k: torch.stack([run[k] for run in of_runs]) for k in of_runs[0]} for of_runs in (after, moved, added)]
    return Ran(each[0], each[1], each[2], torch.stack(overflowed))


def _own(arithmetic: str, fmt: Format) -> float:
    return PAIR if arithmetic == "bf16" and len(fmt.components) > 1 else OWN[arithmetic]


class NoSample(Exception):  # a result rather than an error
    """The step cannot run on a sample, whose shape is another one: code may name sizes (`grad.view(12, -1)`)."""


Replayed = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Runs the calls of the user's step on values by name (`param`, `grad`, states), which it may write; returns them.

It raises NoSample where they cannot run on a sample.
"""


class InFp32:
    """Takes the step of a sample again: in fp32, on copies of its values, without the compiler."""

    def __init__(
        self, taken: Sample, g: torch.Generator, names: Iterable[str], replayed: Replayed, by_element: bool = False
    ) -> None:
        """With `by_element`, each element of a flat sample is stepped as if it were alone."""
        self.taken, self._generator, self._replayed, self._by_element = taken, g, replayed, by_element
        values = taken.values() | {"grad": taken.grad.float()}
        self._values = {name: values[name] for name in names}

    def run(self) -> Ran:
        """Takes the step.

        Raises:
            NoSample: the step cannot run on a sample.
        """
        return self._run(1, perturbed=False)

    def perturbed(self) -> Ran:
        """Takes it on `RUNS` copies, which are perturbed: in one run where no element depends on another one."""
        if not self._by_element:
            return _joined([self._run(1, perturbed=True) for _ in range(RUNS)])
        ran = self._run(RUNS, perturbed=True)
        each = [{name: x.reshape(RUNS, -1) for name, x in found.items()} for found in (ran.after, ran.moved, ran.added)]
        return Ran(each[0], each[1], each[2], ran.overflowed.reshape(RUNS, -1))

    def _run(self, count: int, perturbed: bool) -> Ran:
        values = {name: x.repeat(count) if count > 1 else x.clone() for name, x in self._values.items()}
        with torch.no_grad():
            mode = self._perturbation(values, perturbed)
            with mode:
                values = self._replayed(values)
        after = {name: values[name].detach().float() for name in self.taken.formats}
        moved, added = ({k: x.get(k, torch.zeros_like(v)) for k, v in after.items()} for x in (mode.moved, mode.added))
        return Ran(after, moved, added, mode.overflowed)

    def _perturbation(self, inputs: Mapping[str, Any], perturbed: bool) -> Perturbation:
        """The mode in which the step runs, which follows the parameter, its gradient and its states among `inputs`."""
        arithmetic, seen = self.taken.job.settings.arithmetic, self.taken.job.recording.captured.shapes
        amount, shape = AMOUNT[arithmetic] if perturbed else 0.0, inputs["param"].shape
        mode = Perturbation(shape, amount, self._fills(), self._generator, arithmetic == "bf16")
        for name, x in inputs.items():
            if isinstance(x, Tensor) and (x.shape == shape or name in seen) and x.is_floating_point():
                mode.follow(name, x)
        return mode

    def _fills(self) -> float:
        """The relative error of storing a number with which a state is filled."""
        recording, formats = self.taken.job.recording, self.taken.formats
        lost = [0.0]
        for name, value in recording.captured.fresh.items():
            x = torch.tensor([value], dtype=torch.float32, device="cpu")
            stored = float(formats[name].decode(formats[name].encode(x)))
            lost.append(abs(stored - value) / abs(value) if value and math.isfinite(stored / value) else 0.0)
        return 1.01 * max(lost)


# --- Monte Carlo arithmetic -------------------------------------------------------------------------------------------


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
# Operations that do not round in fp32; code may compare their result with the operand that they selected.
_EXACT = {"where", "masked_fill", "index_put", "sign", "sgn", "abs", "neg", "maximum", "minimum", "clamp", "clamp_min",
          "clamp_max", "nan_to_num"}  # fmt: skip
# What is in their memory is no result: it may be infinite, and the next operation writes it (`out=`).
_UNWRITTEN = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
_FILLS = {"full", "full_like", "new_full", "fill", "ones", "ones_like", "new_ones"}


class Perturbation(DispatchMode):
    """A mode under which elementwise code runs with perturbed results; it perturbs tensors of `shape`.

    A tensor may have its elements in another shape. `amount` is the relative change of a result, `fills` that of a
    tensor filled with a number. With `to_bf16` results are rounded to bf16 besides: there, values that are close become
    equal, and their difference 0. Without it, half of the differences of numbers that are equal but for what is
    perturbed become 0: code may divide by the norm of such a difference, and only 0 gives another result then.
    """

    def __init__(
        self,
        shape: Sequence[int],
        amount: float,
        fills: float,
        generator: torch.Generator,
        to_bf16: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self._shape, self._amount, self._fills = tuple(shape), amount, fills
        self._generator, self._to_bf16 = generator, to_bf16
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
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        finite = self._finite(args)
        # All before the operation, which may write its operands.
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
        """Makes about half of the elements of `x` that are within a bound 0."""
        if bound is None or not (near := x.detach().abs() <= bound).any():
            return
        near &= torch.rand(x.shape, generator=self._generator, dtype=torch.float32, device="cpu") < 0.5
        self._change(x, torch.where(near, -x.detach(), 0.0))

    def _is_whole(self, x: Tensor) -> bool:
        """Returns True for a tensor of `shape`, or one of its elements in another shape."""
        return tuple(x.shape) == self._shape or x.numel() == self.overflowed.numel() > 1

    def _finite(self, args: Any) -> Tensor:
        """The mask of elements where every operand is finite."""
        finite = torch.ones(self._shape, dtype=torch.bool, device="cpu")
        for x in _tensors(args):
            if x.is_floating_point() and (x.numel() == 1 or self._is_whole(x)):
                finite = finite & x.isfinite().reshape(self._shape if self._is_whole(x) else ())
        return finite

    def _note_overflow(self, finite: Tensor, out: Any) -> None:
        """Marks all elements if the sum of finite ones is not finite: torch squares and adds in fp32."""
        for x in _tensors(out):
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
        """Perturbs each element of `x`; about half of the subnormal elements become zero.

        `within` is a larger number from which `x` was computed by one operation.
        """
        if not self._amount:
            return
        old = x.detach()
        up = torch.rand(old.shape, generator=self._generator, dtype=torch.float32, device="cpu") < 0.5
        change = torch.where(up, amount, -amount).to(x.dtype)
        change = change * (old if within is None else old.abs() + within)
        if (old.abs() < TINY).any():
            change = torch.where((old.abs() < TINY) & up, -old, change)
        if self._to_bf16:
            change = (old + change).bfloat16().to(x.dtype) - old
        self._change(x, torch.where(change.isfinite(), change, 0.0))

    def _change(self, x: Tensor, change: Tensor) -> None:
        x.detach().add_(change)
        name = self._followed.get(storage_id(x.untyped_storage()))
        if name is not None:
            self.moved[name].add_(change.reshape(self.moved[name].shape))


def _name(func: Any) -> str:
    return str(schema(func).name.removeprefix("aten::").rstrip("_"))


@cache
def is_view(func: Any) -> bool:
    """Returns True if what `func` returns shares the memory of an argument that it does not write."""
    infos = [r.alias_info for r in schema(func).returns]
    return any(info is not None and not info.is_write for info in infos)


def _within(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    # What a lerp adds inside: with a weight near 1 it cancels most of the other operand, and the result hides that.
    if not schema(func).name.startswith("aten::lerp"):
        return None
    x, y, weight = (*args, kwargs.get("weight"))[:3]
    inside: Tensor = (y - x).abs() * abs(weight)
    return inside


def _tensors(x: Any) -> list[Tensor]:
    if isinstance(x, (list, tuple)):
        return [t for y in x for t in _tensors(y)]
    return [x] if isinstance(x, Tensor) else []
