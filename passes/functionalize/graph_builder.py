"""Turns a recording, where operations write in place, into a functional graph, where each value is one node.

First tensors of the parameter's elements are seen in one shape (`in_one_shape`): `grad.view(heads, n)`, and states of
that shape (Adam-mini).

Given (a parameter of shape [6, 10])::

    view = aten.view.default(grad, [4, 15])
    mul = aten.mul.Tensor(view, view)
    mean = aten.mean.dim(mul, [1])                       # of shape [4]
    ...
    view_1 = aten.view.default(mul_1, [6, 10])
    add_ = aten.add_.Tensor(param, view_1)

Result: the same, in which the parameter, its gradient and whatever has one value for each of their elements have the
shape [4, 15], so that these views are no operations.

A contiguous view of all elements has them in the same order. So it does not matter in which shape an operation on each
element sees them, as long as all its operands have this order. What depends on the shape (sums over dimensions,
operands that are broadcast) must have the shape that is chosen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.reductions import across
from collage_neuron.passes.functionalize.recorded_ops import (
    ALL_REDUCE,
    WAIT,
    Op,
    Recorder,
    Ref,
    Slot,
    functional_overload,
    is_outer,
    is_reduction,
)
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


# --- one shape for all tensors of the elements ------------------------------------------------------------------------


Shape = tuple[int, ...]


class Step(NamedTuple):
    """The tensors and operations of a recorded step."""

    shape: Shape
    """The parameter's."""
    inputs: Mapping[str, Ref]
    """The parameter, its gradient and its states before the step."""
    now: Mapping[str, Ref]
    """The same after it."""
    ops: Sequence[Op]
    is_seen: bool = False
    """True if `shape` is that in which all tensors of the parameter's elements are seen (`in_one_shape`)."""


def in_one_shape(step: Step) -> Iterator[Step]:
    """The step with all tensors of its elements in one shape: the parameter's first, then others that occur in it.

    None, if none of its tensors has another shape, or if an operation depends on the shape that it has.
    """
    count = math.prod(step.shape)
    refs = [*step.inputs.values(), *step.now.values(), *(ref for op in step.ops for ref in refs_in(op))]
    shapes = dict.fromkeys((step.shape, *(ref.shape for ref in refs if _is_whole(ref, count))))
    for shape in shapes if len(shapes) > 1 and count > 1 else ():
        view = _Seen(shape, count)
        if all(map(view.may_be, step.ops)):
            yield Step(shape, view.refs(step.inputs), view.refs(step.now), [view.op(x) for x in step.ops], True)


def without_idle_views(step: Step) -> Step:
    """The step without views that nothing reads or writes, such as `state["m"][:4, :1]` in `zeros_like`."""
    needed, used = set(step.now.values()), list[Op]()
    # From the last operation back: a view is idle if no later one reads it, and no result is it.
    for op in reversed(step.ops):
        if not _shows(op) or needed.intersection(x for x in op.outs if x is not None):
            needed.update(refs_in(op))
            used.append(op)
    return step._replace(ops=used[::-1])


def _is_whole(ref: Ref, count: int) -> bool:
    """Returns True if a tensor shows `count` elements from the first on, one after the other."""
    if math.prod(ref.shape) != count or ref.offset:
        return False
    after = 1
    for n, stride in zip(reversed(ref.shape), reversed(ref.stride), strict=True):
        # The stride of a dimension of one element says nothing.
        if n != 1 and stride != after:
            return False
        after *= n
    return True


def refs_in(x: Any) -> Iterator[Ref]:
    """The tensors of an operation: its operands, and its results."""
    if isinstance(x, Ref):
        yield x
    elif isinstance(x, tuple):
        for y in (x.args, x.kwargs, x.outs) if isinstance(x, Op) else x:
            yield from refs_in(y)


def _shows(op: Op) -> bool:
    """Returns True for a view: its result shows an operand's memory, and nothing is written."""
    storages = {x.storage for x in refs_in(op.args)}
    return any(x is not None and x.storage in storages for x in op.outs) and functional_overload(op.target)[1] is None


class _Seen(NamedTuple):
    """One shape for all tensors that have one value for each of so many elements, in their order."""

    shape: Shape
    elements: int

    def may_be(self, op: Op) -> bool:
        """Returns True if an operation gives the same elements in that shape."""
        refs = list(refs_in(op))
        if all(x.shape == self.shape or not _is_whole(x, self.elements) for x in refs):
            return True
        # A view of all elements has them in their order, in whatever shape.
        if _shows(op):
            return all(_is_whole(x, self.elements) for x in refs)
        # A sum over given dimensions, or a product of matrices, means something else in another shape.
        if is_outer(op.target) or (is_reduction(op.target) and (dimensions(op) or any(x.shape for x in op.outs if x))):
            return False
        values = [x for x in refs if math.prod(x.shape) != 1]  # others are numbers
        return len({x.shape for x in values}) == 1 and all(_is_whole(x, self.elements) for x in values)

    def op(self, op: Op) -> Op:
        """The operation on tensors of that shape."""
        return op._replace(args=self._of(op.args), kwargs=self._of(op.kwargs), outs=self._of(op.outs))

    def refs(self, named: Mapping[str, Ref]) -> dict[str, Ref]:
        """Tensors of that shape, by name."""
        return {name: self._of(ref) for name, ref in named.items()}

    def _of(self, x: Any) -> Any:
        if isinstance(x, Ref):
            return x._replace(shape=self.shape, stride=_strides(self.shape)) if _is_whole(x, self.elements) else x
        # Slots are named tuples, and stay as they are.
        return tuple(map(self._of, x)) if type(x) is tuple else x


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
