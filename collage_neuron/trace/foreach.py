"""`torch._foreach_*`: the operations on single tensors to which those on lists are equivalent."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.functionalize.recorded_ops import Op, Ref, Slot
from collage_neuron.torch_privates import schema

aten = torch.ops.aten

# On lists the two are one operation; on single tensors only the second takes numbers, and has an in-place form.
_CLAMPS = {"maximum": "clamp_min", "minimum": "clamp_max"}

_WRAPPED = {"add", "sub", "mul", "div"}  # called with a number, torch records these as it does for a tensor

_OF_THREE = {"addcmul", "addcdiv"}  # two of their tensors may be numbers


def is_foreach(func: Any) -> bool:
    """Returns True for a `torch._foreach_*` operation, on lists."""
    return str(schema(func).name).startswith("aten::_foreach_")


def unrolled(op: Op) -> Iterator[Op]:
    """The operations on single tensors to which a `torch._foreach_*` operation on lists is equivalent."""
    name = schema(op.target).name.removeprefix("aten::_foreach_")
    pure, suffix = name.rstrip("_"), "_" if name.endswith("_") else ""
    count = next(len(x) for x in op.args if _is_list(x))  # of `pow`, the first argument may be a number
    for i in range(count):
        args = tuple(_at(x, i) for x in op.args)
        outs = (op.args[0][i],) if suffix else (op.outs[i],)
        kwargs = tuple((k, _at(x, i)) for k, x in op.kwargs)
        if pure in _OF_THREE:  # the value is a keyword of the operation on one tensor
            args, kwargs = args[:3], (*kwargs, *(("value", value) for value in args[3:]))
        wrapped = range(1, 3) if pure in _OF_THREE else range(1, 2) if pure in _WRAPPED else ()
        tensors = tuple(isinstance(x, Ref) or k in wrapped for k, x in enumerate(args))
        yield Op(_overload(_CLAMPS.get(pure, pure) + suffix, tensors), args, kwargs, outs, op.place)


@cache
def _overload(name: str, tensors: tuple[bool, ...]) -> Any:
    """The overload of `aten.<name>` that needs so many arguments, and tensors where `tensors` says so."""
    packet = getattr(aten, name, None)
    names = [overload for overload in (packet.overloads() if packet else ()) if not overload.endswith("out")]
    for found in (getattr(packet, overload) for overload in names):
        own = schema(found).arguments
        given, rest = own[: len(tensors)], own[len(tensors) :]
        if tuple(str(a.type) == "Tensor" for a in given) == tensors and all(a.has_default_value() for a in rest):
            return found
    raise UnsupportedUpdate(f"the update calls torch._foreach_{name}, which has no form for a single tensor")


def _at(x: Any, i: int) -> Any:
    return x[i] if _is_list(x) else x


def _is_list(x: Any) -> bool:
    return isinstance(x, tuple) and not isinstance(x, (Ref, Slot))
