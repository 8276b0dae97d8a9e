"""Calls of several parameters that run as one operation, on tensors in which what is alike lies together.

One call of torch for a hundred small tensors costs what one for one of them does. It is made where the bits are known
to be the same as those of calls for each: of elementwise operations, and of reductions of what each parameter has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import is_
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collage_neuron.trace.materialize import Prepared

OF_NUMBERS = frozenset({"clamp", "clamp_max", "clamp_min", "lerp"})
ELEMENTWISE = frozenset({
    "abs", "add", "addcdiv", "addcmul", "copy", "div", "eq", "ge", "gt", "le", "lt", "mul", "ne", "neg", "reciprocal",
    "rsqrt", "rsub", "sign", "sqrt", "square", "sub", "where",
})  # fmt: skip
"""Operations that give an element the same bits wherever it lies (the first ones, if they have numbers). At the end of
a tensor, which is no whole vector, torch computes `exp` and `pow` otherwise, and signs of zeros in `maximum`, and in
`lerp` by a weight of 1."""

_aten: Any = torch.ops.aten
WHOLE = {_aten.sum.default: _aten.sum.dim_IntList, _aten.mean.default: _aten.mean.dim}
"""Reductions of a whole tensor, and of dimensions."""

DIMS_AT = {_aten.sum.dim_IntList: 1, _aten.mean.dim: 1, _aten.linalg_vector_norm.default: 2}
"""Which argument of a reduction has the dimensions."""

Places = tuple[int, ...]
Column = tuple[type | None, tuple[Any, ...]]
"""An argument of several calls: places of tensors (int), positions of numbers (float), these with what tensors of the
host they are (`HostNumber`), or a constant (None)."""

_EACH: Any = object()
"""Instead of an argument that is not one for all calls."""


class There:
    """Values that were computed, by their places; those of parameters that are alike lie in one tensor, too."""

    def __init__(self, stacks: Mapping[Places, torch.Tensor]) -> None:
        self._tensors: dict[int, torch.Tensor] = {}
        self._stacks = dict(stacks)
        self._whole: dict[Places, torch.Tensor] = {}
        """Those whose rows nobody has asked for yet."""

    def put(self, places: Places, stack: torch.Tensor) -> None:
        """The rows of a tensor are at places."""
        self._stacks[places] = self._whole[places] = stack

    def put_each(self, places: Sequence[int], tensors: Sequence[torch.Tensor]) -> None:
        """Tensors are at places."""
        self._tensors.update(zip(places, tensors, strict=True))

    def at(self, places: Places) -> list[torch.Tensor]:
        """The tensors at places."""
        if (stack := self._whole.pop(places, None)) is not None:
            self.put_each(places, stack.unbind())
        elif not all(map(self._tensors.__contains__, places)):
            self.by_places()
        return [*map(self._tensors.__getitem__, places)]

    def by_places(self) -> dict[int, torch.Tensor]:
        """All of them."""
        for places, stack in self._whole.items():
            self.put_each(places, stack.unbind())
        self._whole.clear()
        return self._tensors

    def first(self, kind: type | None, x: Any, numbers: Sequence[float]) -> Any:
        """An argument of one call alone."""
        if kind is int:
            return self._tensors[x] if x in self._tensors else self.by_places()[x]
        return x if kind is None else numbers[x] if kind is float else x[0].tensor(numbers[x[1]])

    def one(self, column: Column, numbers: Sequence[float]) -> Any:
        """The argument of all calls at once, if there is one: a tensor with those of all, or the same number."""
        kind, values = column
        if kind is int:
            return self._stacks.get(values, _EACH)
        if kind is not float:
            return values[0] if kind is None else _EACH
        found = {numbers[at] for at in values}
        # 0.0 equals -0.0, and 1 may be a weight of `lerp`.
        return found.pop() if len(found) == 1 and found.isdisjoint((0.0, 1.0)) else _EACH

    def each(self, column: Column, numbers: Sequence[float]) -> Sequence[Any]:
        """Those of each."""
        kind, values = column
        return self.at(values) if kind is int else [self.first(kind, x, numbers) for x in values]


class Batch:
    """One operation of several parameters of one shape, none of which needs what another one gives."""

    def __init__(self, calls: Sequence[Prepared], is_elementwise: bool, shape: tuple[int, ...]) -> None:
        """`shape` is that of the first argument."""
        first, rows = calls[0].call, [each.plain or [] for each in calls]
        columns: list[Column] = [(column[0][0], tuple(x for _, x in column)) for column in zip(*rows, strict=True)]
        self.columns, self._names, self._count = columns, [*first.kwargs], len(first.args)
        self._function, self._is_elementwise = calls[0].function, is_elementwise
        self._returns = tuple(i for each in calls for i in each.returns)
        self._is_alone = len(calls) == 1
        self._of_rows = None if is_elementwise else reduction(calls[0], shape, len(calls))
        """What reduces all of them at once, but for that argument."""

    def run(self, there: There, numbers: Sequence[float]) -> None:
        """Runs it: once for all of them, if that gives the same bits."""
        if self._is_alone:
            self._run_alone(there, numbers)
            return
        given = [there.one(column, numbers) for column in self.columns]
        if self._of_rows is not None and given[0] is not _EACH:
            there.put(self._returns, self._of_rows(given[0]))
            return
        if self._is_elementwise and not any(x is _EACH for x in given):
            out = self._function(*given[: self._count], **dict(zip(self._names, given[self._count :], strict=True)))
            if self._returns:
                there.put(self._returns, out)
            return
        made = self._each(given, there, numbers)
        if self._returns:
            there.put_each(self._returns, made)

    def _run_alone(self, there: There, numbers: Sequence[float]) -> None:
        own = [there.first(kind, values[0], numbers) for kind, values in self.columns]
        named = dict(zip(self._names, own[self._count :], strict=True)) if self._names else {}
        out = self._function(*own[: self._count], **named)
        if self._returns:
            there.put_each(self._returns, (out.detach() if out is own[0] else out,))

    def _each(self, given: Sequence[Any], there: There, numbers: Sequence[float]) -> list[torch.Tensor]:
        rows = [there.each(column, numbers) for column in self.columns[: self._count]]
        named = dict(zip(self._names, given[self._count :], strict=True))
        if not any(x is _EACH for x in named.values()):
            made = [*map(partial(self._function, **named), *rows)]
        else:
            more = zip(*(there.each(column, numbers) for column in self.columns[self._count :]), strict=True)
            own = zip(zip(*rows, strict=True), more, strict=True)
            made = [self._function(*args, **dict(zip(self._names, x, strict=True))) for args, x in own]
        # It may return its argument itself: two places, two objects.
        return [x.detach() for x in made] if self._returns and any(map(is_, made, rows[0])) else made


def is_elementwise(call: Prepared, shapes: Mapping[int, tuple[int, ...]]) -> bool:
    """Returns True for an operation that may run once for several parameters; `shapes` are those at places."""
    name, (_, *others) = str(getattr(call.call.func, "__name__", "")).partition(".")[0], call.call.args
    has_numbers, kwargs = not {int}.issuperset(map(type, others)), call.call.kwargs
    if name.rstrip("_") not in (ELEMENTWISE | OF_NUMBERS if has_numbers else ELEMENTWISE):
        return False
    # `x.add(2.0, alpha=0.1)` rounds the product of its numbers, or not.
    is_other = "rounding_mode" in kwargs or (has_numbers and "alpha" in kwargs)
    return not is_other and len({shapes[place] for place in (*call.needs, *call.returns)}) == 1


def reduction(prepared: Prepared, shape: tuple[int, ...], count: int) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """What reduces each row of a tensor as a call does one of `count` tensors of this shape; None for other calls."""
    func, plain = prepared.call.func, prepared.plain or []
    of_dims = WHOLE.get(func, func)
    if of_dims not in DIMS_AT or not shape or prepared.call.kwargs or any(kind is not None for kind, _ in plain[1:]):
        return None
    given, at = tuple(tuple(x) if isinstance(x, list) else x for _, x in plain[1:]), DIMS_AT[of_dims] - 1
    dims = given[at] if func is of_dims and len(given) > at else None
    inner = tuple(dim - len(shape) if dim >= 0 else dim for dim in dims or range(len(shape)))
    first = given[:at] or (2,) * at  # the kind of a norm
    each, rows = (func, given), (of_dims, (*first, inner, *given[at + 1 :]))
    return partial(_applied, rows) if _are_alike(each, rows, shape, count) else None


Applied = tuple[Any, tuple[Any, ...]]
"""An operation, and its arguments after the first."""


def _applied(what: Applied, x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = what[0](x, *what[1])
    return made


@lru_cache
def _are_alike(each: Applied, rows: Applied, shape: tuple[int, ...], count: int) -> bool:
    """Returns True if `rows` gives what `each` does, bit for bit."""
    # torch adds up what lies one after the other in the same order, whatever is beside it. This holds it to that.
    random = torch.Generator().manual_seed(0)
    x = torch.randn((count, *shape), generator=random, dtype=torch.float32, device="cpu")
    both = torch.stack([_applied(each, row) for row in x.unbind()]), _applied(rows, x)
    return torch.equal(*(own.view(torch.int32) for own in both))
