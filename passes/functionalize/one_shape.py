"""Sees tensors of the parameter's elements in one shape: `grad.view(heads, n)`, and states of that shape (Adam-mini).

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

from collage_neuron.passes.functionalize.graph_builder import dimensions, functional_overload
from collage_neuron.passes.functionalize.recorded_ops import Op, Ref, is_outer, is_reduction

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
