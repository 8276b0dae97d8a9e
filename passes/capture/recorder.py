"""What a step did to one parameter: a list of operations on its tensors, with its numbers as slots."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from collage_neuron.passes.capture.source_location import Place
from collage_neuron.torch_privates import schema


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
                return names.setdefault(x.storage, len(names)), x[1:]
            if isinstance(x, tuple) and kind is not Slot:
                return tuple(map(canonical, x))
            return kind, x

        ops = ((op.target, canonical(op.args), canonical(op.kwargs), canonical(op.outs), op.place) for op in self.ops)
        return canonical(tuple(roles.items())), tuple(ops)


_POWERS = {"aten::pow", "aten::pow_", "aten::_foreach_pow", "aten::_foreach_pow_", "aten::linalg_vector_norm"}
"""An exponent, or the order of a norm, selects the operations that they become."""


@cache
def is_constant_op(func: Any) -> bool:
    """Returns True if the numbers of `func` are constants of the graph: exponents, sizes, memory formats, fills."""
    return schema(func).name in _POWERS or not any(
        str(a.type) in ("number", "Optional[number]", "List[number]", "Tensor", "Optional[Tensor]", "List[Tensor]")
        and a.name not in ("self", "fill_value")
        for a in schema(func).arguments
    )


@cache
def writes_first_argument(func: Any) -> bool:
    """Returns True if `func` is an in-place operation: `add_`, `copy_`, ..."""
    info = schema(func).arguments[0].alias_info if schema(func).arguments else None
    return info is not None and info.is_write and schema(func).name.endswith("_")
