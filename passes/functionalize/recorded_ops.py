"""What a step did to one parameter: a list of operations on its tensors, with its numbers as slots.

And what is known of operations: which write, reduce, or return what on tensors without data.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.torch_privates.distributed import all_reduce, wait_tensor
from collage_neuron.torch_privates.operations import schema, written_arguments

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


def functional_overload(func: Any) -> tuple[Any, int | str | None]:
    """The functional form of `func`, and the argument to which the original writes (an index, "out", or None)."""
    written = written_arguments(func)
    if not written:
        return func, None
    name = schema(func).name.split("::")[1]
    if written[0][1] == "out":
        return _pure_overload(name, func), "out"
    # ATen's in-place operations are called as the functional ones, with an underscore behind.
    if len(written) > 1 or not name.endswith("_"):
        raise UnsupportedUpdate(
            f"the update calls {func}, which writes to several tensors at once; use plain operations"
        )
    return _pure_overload(name[:-1], func), 0


def _pure_overload(name: str, func: Any) -> Any:
    """The overload of `aten.<name>` that takes the arguments of `func` and writes to none of them."""
    packet = getattr(aten, name, None)
    wanted = [str(a.type) for a in schema(func).arguments if a.name != "out"]
    for overload in packet.overloads() if packet else ():
        pure = getattr(packet, overload)
        if [str(a.type) for a in schema(pure).arguments] == wanted:  # add_.Tensor and add.Tensor share no object
            return pure
    raise UnsupportedUpdate(f"the update calls {func}, which has no form that writes to nothing; use plain operations")


@cache
def writes_first_argument(func: Any) -> bool:
    """Returns True if `func` is an in-place operation: `add_`, `copy_`, ..."""
    return any(i == 0 for i, _ in written_arguments(func)) and schema(func).name.endswith("_")


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


# --- results on tensors without data ----------------------------------------------------------------------------------


class Geometry(NamedTuple):
    """All that a tensor without data is."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    """Where it begins in its memory."""


_results: dict[Any, list[Geometry]] = {}


def results_without_data(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Geometry]:
    """The tensors that an operation returns, whatever is in those that it is given; raises what torch would."""
    # torch's code for tensors without data is in Python, and a step is recorded each time. The result of an operation
    # on each element, or of a sum, a mean or a norm, has no property but its geometry. That depends on the geometry of
    # the tensors and on the types of the numbers; of a reduction on the numbers too.
    key: Any = None
    if _makes_one(func):
        told = _told if torch.Tag.pointwise in func.tags else _told_with_numbers  # the dimensions of a reduction
        key = func, *map(told, args), *((k, told(v)) for k, v in kwargs.items())
    known = None if key is None else _results.get(key)
    if known is None:
        out = func(*_without_data(args), **{k: _without_data(x) for k, x in kwargs.items()})
        known = [_geometry(x) for x in (out if isinstance(out, (list, tuple)) else [out]) if x is not None]
        if key is not None:
            _results[key] = known
    return known


def _without_data(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        offset = int(x.storage_offset())  # views that are made of it begin from there (`Geometry.offset`)
        reach = 1 + offset + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True))
        return torch.empty(max(reach, 0), dtype=x.dtype, device="meta").as_strided(x.shape, x.stride(), offset)
    return [_without_data(y) for y in x] if isinstance(x, (list, tuple)) else x


@cache
def _makes_one(func: Any) -> bool:
    """Returns True if `func` computes one tensor, element by element, or reduces one, or fills one; in place too."""
    s = schema(func)
    is_known = torch.Tag.pointwise in func.tags or is_reduction(func) or func is aten.full.default
    is_view = any(x.alias_info is not None and not x.alias_info.is_write for x in (*s.arguments, *s.returns))
    return is_known and not is_view and [str(r.type) for r in s.returns] == ["Tensor"]


def _geometry(x: torch.Tensor) -> Geometry:
    return Geometry(tuple(x.shape), x.stride(), x.dtype, int(x.storage_offset()))


def _told(x: Any) -> Any:
    """What a result depends on: not on the value of a number, which differs from step to step."""
    if isinstance(x, torch.Tensor):
        return _geometry(x)
    if isinstance(x, (int, float, complex)):
        return type(x)
    return (list, *map(_told, x)) if isinstance(x, (list, tuple)) else x


def _told_with_numbers(x: Any) -> Any:
    """What a result depends on, the values of numbers included."""
    if isinstance(x, torch.Tensor):
        return _told(x)
    return (list, *map(_told_with_numbers, x)) if isinstance(x, (list, tuple)) else (type(x), x)


# An exponent, or the order of a norm, selects the operations that they become.
_POWERS = {"aten::pow", "aten::pow_", "aten::_foreach_pow", "aten::_foreach_pow_", "aten::linalg_vector_norm"}


@cache
def is_constant_op(func: Any) -> bool:
    """Returns True if the numbers of `func` are constants of the graph: exponents, sizes, memory formats, fills."""
    return schema(func).name in _POWERS or not any(
        str(a.type) in ("number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]", "List[Tensor]")
        and a.name not in ("self", "fill_value")
        for a in schema(func).arguments
    )
