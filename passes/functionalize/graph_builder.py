"""Turns a recording, where operations write in place, into a functional graph, where each value is one node."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.tensor_sums import across
from collage_neuron.passes.functionalize.recorded_ops import ALL_REDUCE, WAIT, Op, Recorder, Ref, Slot, is_reduction
from collage_neuron.torch_privates import schema

aten = torch.ops.aten

_FILLS = {
    aten.zeros_like.default: 0.0,
    aten.new_zeros.default: 0.0,
    aten.ones_like.default: 1.0,
    aten.new_ones.default: 1.0,
}
"""Factories of a constant tensor; `full` and its kin carry their value. What `zeros(n)` makes is recorded as `full`."""

_FULLS = {aten.full_like.default: 1, aten.full.default: 1, aten.new_full.default: 2}
"""The index of the argument that is the value."""


def fill_value(op: Op) -> float | None:
    """The value with which `op` fills a new tensor; None for other operations."""
    return float(op.args[_FULLS[op.target]]) if op.target in _FULLS else _FILLS.get(op.target)


def fills(op: Op) -> bool:
    """Returns True if `op` fills a new tensor with one value, which may be a slot by now."""
    return op.target in _FULLS or op.target in _FILLS


def filled(created: dict[str, Ref], ops: Sequence[Op]) -> dict[str, tuple[Op, float]]:
    """Of the states that a step created, those that started as a tensor filled with a number: how, and with which."""
    if not created:
        return {}
    # By the storage, which in-place operations on the new tensor keep.
    fills = {op.outs[0].storage: (op, value) for op in ops if op.outs[0] and (value := fill_value(op)) is not None}
    return {name: fills[ref.storage] for name, ref in created.items() if ref.storage in fills}


def number_fills(recorder: Recorder, fresh: set[int]) -> None:
    """Numbers that fill tensors become the last slots, but for those that a new state starts with."""
    for i, op in enumerate(recorder.ops):
        at = _FULLS.get(op.target)
        if at is not None and id(op) not in fresh:
            recorder.ops[i] = op._replace(args=(*op.args[:at], Slot(len(recorder.slots)), *op.args[at + 1 :]))
            recorder.slots.append(float(op.args[at]))


def functional_overload(func: Any) -> tuple[Any, int | str | None]:
    """The functional form of `func`, and the argument to which the original writes (an index, "out", or None)."""
    written = [i for i, a in enumerate(schema(func).arguments) if a.alias_info is not None and a.alias_info.is_write]
    if not written:
        return func, None
    name = schema(func).name.split("::")[1]
    if schema(func).arguments[written[0]].name == "out":
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


def arguments(op: Op) -> dict[str, Any]:
    """What an operation is given, by name."""
    return dict(zip([a.name for a in schema(op.target).arguments], op.args, strict=False)) | dict(op.kwargs)


def dimensions(op: Op) -> Any:
    """The dimensions that a reduction is given, if it is given any: then its meaning depends on the tensor's shape."""
    return arguments(op).get("dim") or ()


def reduces_all(op: Op) -> bool:
    """Returns True if a reduction is over all dimensions of its tensor."""
    given, count = dimensions(op), len(op.args[0].shape)
    return not given or {d % count for d in given} == set(range(count))


class Builder:
    """Builds the functional graph of a recording; `cells` maps a storage to the node with its current value."""

    def __init__(self, shape: tuple[int, ...], slots: int) -> None:
        self.graph = fx.Graph()
        self.shape = shape
        self.cells: dict[int, fx.Node] = {}
        self._geometry: dict[int, tuple[Any, ...]] = {}
        self._slot_count = slots
        self._slots: list[fx.Node] = []

    def place(self, name: str, ref: Ref) -> None:
        """Adds a placeholder, which becomes the current value of the tensor `ref`."""
        self._bind(ref, self.graph.placeholder(name))

    def place_slots(self) -> None:
        """The placeholders of the slots, after those of the tensors."""
        self._slots = [self.graph.placeholder(f"s{i}") for i in range(self._slot_count)]

    def value_of(self, ref: Ref) -> fx.Node:
        """The node with the current value of `ref`."""
        if ref.storage not in self.cells:
            raise UnsupportedUpdate(
                "the update reads a tensor that is neither the parameter, its gradient, nor one of its states; "
                "keep it in optimizer.state[p], shaped like the parameter"
            )
        return self.cells[ref.storage]

    def add(self, op: Op) -> None:
        """The node of one recorded operation."""
        target, written = functional_overload(op.target)
        self._check_elementwise(op)
        if written is None and len(op.outs) != 1:
            raise UnsupportedUpdate(
                f"the update uses {op.target}, which returns several tensors and has no rule; write the update with "
                "operations that return one"
            )
        if written is None and any(isinstance(x, Ref) and x == op.outs[0] for x in op.args):
            return  # a view of the same elements (detach, alias, view_as): its storage has a value already
        if op.target is WAIT:
            self._bind(op.outs[0], self.value_of(op.args[0]))
            return
        self._bind(op.outs[0], self._call(across if op.target is ALL_REDUCE else target, op), op)

    def _call(self, target: Any, op: Op) -> fx.Node:
        """The node that does with the operands of a recorded operation what `target` does."""
        kwargs = {k: self._argument(x) for k, x in op.kwargs}
        node = self.graph.call_function(target, tuple(map(self._argument, op.args)), kwargs)
        node.meta["place"] = op.place
        return node

    def _bind(self, ref: Ref | None, node: fx.Node, op: Op | None = None) -> None:
        if ref is None:
            return
        # A value of the graph has all elements in one order, so all tensors of a storage must show it alike.
        if self._geometry.setdefault(ref.storage, ref[1:]) != ref[1:]:
            # Its shape is the parameter's, as the transpose of a square matrix has it.
            raise UnsupportedUpdate(
                f"the update is not elementwise: {op and op.target} takes the elements of a tensor of shape "
                f"{list(self.shape)} in another order (a transpose, a flip), or a part of a larger one; such an "
                "optimizer (matrix products, statistics of blocks) cannot be rewritten: leave it uncompiled"
            )
        self.cells[ref.storage] = node

    def _argument(self, x: Any) -> Any:
        if isinstance(x, Slot):
            return self._slots[x.number]
        if isinstance(x, Ref):
            return self.value_of(x)
        return tuple(map(self._argument, x)) if isinstance(x, tuple) else x

    def _refs(self, op: Op) -> list[Ref]:
        return [x for x in (*op.args, *(x for _, x in op.kwargs)) if isinstance(x, Ref)]

    def _check_elementwise(self, op: Op) -> None:
        for out in op.outs:
            if out is not None and not self._is_understood(op, out):
                outside = (
                    "clip (torch.nn.utils.clip_grad_norm_) and log outside step(), or "
                    if math.prod(out.shape) == 1
                    else ""
                )
                raise UnsupportedUpdate(
                    f"the update is not elementwise: {op.target} {self._change(op)} {list(out.shape)}; such an "
                    "optimizer (row or column means, norms, matrix products) cannot be rewritten: "
                    f"{outside}leave it uncompiled"
                )

    def _is_understood(self, op: Op, out: Ref) -> bool:
        """Returns True for an operation on each element, for a reduction of all elements, and for one on its results.

        And for one number that is made on the tensor plane (`Recorder`).
        A tensor of one element whose shape is the parameter's is one of the parameter's shape.
        """
        if is_reduction(op.target):
            return op.args[0].shape == self.shape and reduces_all(op) and math.prod(out.shape) == 1
        if op.target is ALL_REDUCE and (out.shape or not self.shape):
            return False
        if out.shape == self.shape or (not out.shape and fills(op)):
            return True
        read = self._refs(op)
        return bool(read) and all(x.shape != self.shape and math.prod(x.shape) == 1 for x in (*read, out))

    def _change(self, op: Op) -> str:
        """Describes for an error message how a non-elementwise operation relates to the parameter's shape."""
        if any(isinstance(x, Ref) and x.shape == self.shape for x in op.args):
            return f"turns the parameter's shape {list(self.shape)} into"
        return f"works, beside the parameter of shape {list(self.shape)}, on a tensor of shape"
