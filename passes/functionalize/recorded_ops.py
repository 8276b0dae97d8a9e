"""What a step did to one parameter: a list of operations on its tensors, with its numbers as slots."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from collage_neuron.torch_privates import all_reduce, schema, wait_tensor

aten = torch.ops.aten


class Place(NamedTuple):
    """A line in a file."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


class Slot(NamedTuple):
    """A number of the scalar plane."""

    number: int


class Ref(NamedTuple):
    """A tensor of the tensor plane, known by its storage and the window it shows of it."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Op(NamedTuple):
    """One recorded operation; its arguments are Refs, Slots, constants, and tuples of those."""

    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outs: tuple[Ref | None, ...]
    place: Place | None = None
    """The line that called the operation."""


class Recorder:
    """The operations of an update, in order."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.slots: list[float] = []

    def signature(self, roles: dict[str, Ref]) -> tuple[Any, ...]:
        """A cache key: the recording without the values of the slots and the addresses of the tensors.

        `roles` names the tensors that are the parameter, the gradient and the states.
        """
        names: dict[int, int] = {}

        def canonical(x: Any) -> Any:
            kind = type(x)
            if kind is Ref:
                # Storages are numbered as they occur: their addresses differ in each step.
                return names.setdefault(x.storage, len(names)), x[1:]
            if isinstance(x, tuple) and kind is not Slot:
                return tuple(map(canonical, x))
            # With its type, since 1, 1.0 and True are equal, and are other operands of an operation.
            return kind, x

        ops = ((op.target, canonical(op.args), canonical(op.kwargs), canonical(op.outs), op.place) for op in self.ops)
        return canonical(tuple(roles.items())), tuple(ops)


@cache
def writes_first_argument(func: Any) -> bool:
    """Returns True if `func` is an in-place operation: `add_`, `copy_`, ..."""
    info = schema(func).arguments[0].alias_info if schema(func).arguments else None
    return info is not None and info.is_write and schema(func).name.endswith("_")


_REDUCTIONS = frozenset(
    {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim, aten.linalg_vector_norm.default}
)
"""They make one number of all elements of a tensor, if they are not given some of its dimensions."""


def is_reduction(func: Any) -> bool:
    """Returns True for a sum, a mean or a norm."""
    return func in _REDUCTIONS


ALL_REDUCE, WAIT = all_reduce(), wait_tensor()
"""Operations between processes that have parts of a parameter: one that adds up numbers, and one that waits for it."""

_OUTER = (aten.mm.default, aten.bmm.default)
"""Products of matrices; of a column and a row they are those of all pairs of elements."""


def is_outer(func: Any) -> bool:
    """Returns True for a product of matrices, of which that of a column and a row is understood."""
    return func in _OUTER
