"""Builds the functional graph of an update with reductions over rows or columns, or with states of their shapes.

Given (a parameter of shape [n, m], a state `row` of shape [n])::

    mean = aten.mean.dim(square, [-1])                   # of shape [n]
    lerp_ = aten.lerp_.Scalar(row, mean, s0)
    unsqueeze = aten.unsqueeze.default(lerp_, -1)        # of shape [n, 1]
    div = aten.div.Tensor(grad, unsqueeze)

Result::

    mean_to = mean_to(square, row)
    lerp = aten.lerp.Scalar(row, mean_to, s0)
    div = aten.div.Tensor(grad, lerp)

Every value there has an extent (`numerics.matrix_sums`), and operations broadcast by it. That is what the step means
only if each dimension of each tensor runs along one dimension of the parameter. A square matrix has rows and columns of
one shape, so shapes do not tell: it is found out from how tensors are combined, beginning with the parameter and its
gradient. A state of another shape has dimensions that are not known until it meets something that is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.matrix_sums import ENDINGS, MATRIX, NUMBER, extent_of, mean_to, norm_to, sum_to
from collage_neuron.passes.functionalize.graph_builder import Builder, arguments, dimensions, fills, functional_overload
from collage_neuron.passes.functionalize.recorded_ops import ALL_REDUCE, WAIT, Op, Ref, is_outer, is_reduction

aten = torch.ops.aten

Label = Any
"""What a dimension of a tensor runs along: the number of one of the parameter, a `_Size`, or None (one element)."""

Axes = tuple[Label, ...]

_REDUCED = {
    aten.sum.default: sum_to,
    aten.sum.dim_IntList: sum_to,
    aten.mean.default: mean_to,
    aten.mean.dim: mean_to,
    aten.linalg_vector_norm.default: norm_to,
}


class _Size:
    """A dimension of so many elements, of which it is not known yet what it runs along."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.known: Label = self


def _settled(label: Label) -> Label:
    """What a label is in the end: a dimension of one element that met nothing else runs along none."""
    label = _resolved(label)
    return None if isinstance(label, _Size) and label.size == 1 else label


def _resolved(label: Label) -> Label:
    while isinstance(label, _Size) and label.known is not label:
        label = label.known
    return label


class MatrixBuilder(Builder):
    """Builds such a graph; `axes` says of each tensor what its dimensions run along."""

    def __init__(self, shape: tuple[int, ...], slots: int) -> None:
        super().__init__(shape, slots)
        self._axes: dict[Ref, Axes] = {}
        self._of_nodes: dict[fx.Node, Axes] = {}

    def place(self, name: str, ref: Ref) -> None:
        """Adds a placeholder, which becomes the current value of the tensor `ref`."""
        self._axes[ref] = self._new(ref)
        super().place(name, ref)
        self._of_nodes[self.cells[ref.storage]] = self._axes[ref]

    def _new(self, ref: Ref) -> Axes:
        return tuple(range(len(ref.shape))) if ref.shape == self.shape else tuple(map(_Size, ref.shape))

    def add(self, op: Op) -> None:
        """The node of one recorded operation."""
        target, written = functional_overload(op.target)
        if len(op.outs) != 1 or op.outs[0] is None or op.target in (ALL_REDUCE, WAIT):
            raise self._refusal(op)
        out = op.outs[0]
        if is_reduction(op.target):
            self._reduce(op, out)
            return
        if written is None and any(isinstance(x, Ref) and x.storage == out.storage for x in op.args):
            self._axes[out] = self._view(op, out)
            return
        # A column times a row is the product of all pairs, which is what an operation that broadcasts makes of them.
        axes = self._combined(op, out)
        self._keep(op, out, self._call(aten.mul.Tensor if is_outer(target) else target, op), axes)

    def _keep(self, op: Op, out: Ref, node: fx.Node, axes: Axes) -> None:
        if out in self._axes:  # written: what it shows is known
            axes = tuple(self._same(op, x, y) for x, y in zip(self._axes[out], axes, strict=True))
        node.meta["place"] = op.place
        self._axes[out] = self._of_nodes[node] = axes
        self.cells[out.storage] = node

    def _axes_of(self, op: Op, ref: Ref) -> Axes:
        if ref not in self._axes:
            self.value_of(ref)  # says what is wrong with a tensor that nobody knows
            raise self._refusal(op)
        return self._axes[ref]

    def _combined(self, op: Op, out: Ref) -> Axes:
        """The axes of the result of an operation that broadcasts its operands."""
        refs = self._refs(op)
        if fills(op) and not (refs and refs[0].shape == out.shape):
            return self._new(out)
        if is_outer(op.target):
            return self._outer(op, *refs)
        if not refs or tuple(torch.broadcast_shapes(*(x.shape for x in refs))) != out.shape:
            raise self._refusal(op)
        axes: list[Label] = [None] * len(out.shape)
        for ref in refs:
            first = len(out.shape) - len(ref.shape)
            for i, label in enumerate(self._axes_of(op, ref), start=first):
                if ref.shape[i - first] == out.shape[i]:
                    axes[i] = self._same(op, axes[i], label)
        return tuple(axes)

    def _outer(self, op: Op, x: Ref, y: Ref) -> Axes:
        if x.shape[-1] != 1:
            raise self._refusal(op)
        first, second = self._axes_of(op, x), self._axes_of(op, y)
        same = (self._same(op, a, b) for a, b in zip(first[:-2], second[:-2], strict=True))
        return (*same, first[-2], second[-1])

    def _same(self, op: Op, x: Label, y: Label) -> Label:
        """What two dimensions run along that lie beside each other."""
        x, y = _resolved(x), _resolved(y)
        if x is None or y is None or x == y:
            return y if x is None else x
        if not isinstance(x, _Size):
            x, y = y, x
        if not isinstance(x, _Size) or x.size != (y.size if isinstance(y, _Size) else self.shape[y]):
            raise self._refusal(op)
        x.known = y  # for all tensors that have this label, those of before too
        return y

    def _reduce(self, op: Op, out: Ref) -> None:
        x = op.args[0]
        axes, count = self._axes_of(op, x), len(x.shape)
        gone = {d % count for d in dimensions(op)} or set(range(count))
        given = arguments(op)
        if given.get("ord", 2) != 2 or given.get("dtype") not in (None, torch.float32, torch.float64):
            raise self._refusal(op)
        if out.shape == x.shape and _REDUCED[op.target] is not norm_to:  # each of one element: the second moment of a
            # matrix with one row is kept for each of its elements, and is recognised as that of a vector is
            self._axes[out], self.cells[out.storage] = axes, self.value_of(x)
            return
        keeps_rank = len(out.shape) == count
        left = tuple((None if i in gone else a) for i, a in enumerate(axes) if keeps_rank or i not in gone)
        self._keep(op, out, self.graph.call_function(_REDUCED[op.target], (self.value_of(x), left)), left)

    def _view(self, op: Op, out: Ref) -> Axes:
        """The axes of a view that adds or removes dimensions of one element, or none."""
        (x, *_) = op.args
        axes = self._axes_of(op, x)
        if out == x:
            return axes
        if op.target is aten.unsqueeze.default:
            at = op.args[1] % len(out.shape)
            return (*axes[:at], None, *axes[at:])
        long = [(a, n) for a, n, stride in zip(axes, x.shape, x.stride, strict=True) if n != 1]
        if [n for _, n in long] != [n for n in out.shape if n != 1] or x.offset != out.offset:
            raise self._refusal(op)
        strides = [[s for s, n in zip(r.stride, r.shape, strict=True) if n != 1] for r in (x, out)]
        # Equal lengths are not enough: a transposed square matrix has them too.
        if strides[0] != strides[1]:
            raise self._refusal(op)
        labels = iter(a for a, _ in long)
        return tuple(next(labels) if n != 1 else None for n in out.shape)

    def _refusal(self, op: Op) -> UnsupportedUpdate:
        return UnsupportedUpdate(
            f"the update is not elementwise: {op.target} combines tensors whose dimensions do not run along those of "
            f"the parameter, of shape {list(self.shape)}; such an optimizer (matrix products, statistics of blocks) "
            "cannot be rewritten: leave it uncompiled"
        )

    # --- what was found out -------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Writes the extents of the results of reductions, once everything is known."""
        for node, axes in self._of_nodes.items():
            extent = self._extent(axes)
            if node.target in ENDINGS:
                node.args = (node.args[0], extent)

    def axes_of_state(self, name: str, ref: Ref) -> tuple[int | None, ...]:
        """The dimensions of the parameter along which those of a state run, counted from the last one, which is -1."""
        axes = tuple(map(_settled, self._axes[ref]))
        if any(isinstance(a, _Size) for a in axes) or self._extent(axes) in (NUMBER, MATRIX):
            raise UnsupportedUpdate(
                f"the update keeps optimizer.state[p][{name!r}], a tensor of shape {list(ref.shape)}, which is neither "
                "the parameter's shape, nor that of its rows or its columns, nor one number"
            )
        return tuple(None if a is None else a - len(self.shape) for a in axes)

    def _extent(self, axes: Axes) -> str:
        """The extent of values with these axes."""
        rank = len(self.shape)
        # All dimensions before the last two are one, that of matrices: a value runs along all of them or none.
        along = {a for a in map(_resolved, axes) if isinstance(a, int)}
        over = {a for a in along if a < rank - 2}
        if (over and len(over) < rank - 2) or (rank > 2 and not over and along):
            raise UnsupportedUpdate(
                f"the update reduces other dimensions of a parameter of shape {list(self.shape)} than its last two; "
                "leave it uncompiled"
            )
        both = {a - rank + 3 for a in along - over}
        return extent_of({0, *both} if over or both else ())


def states_in(builder: MatrixBuilder, after: dict[str, Ref]) -> Iterator[tuple[str, tuple[int | None, ...]]]:
    """The states of another shape than the parameter's that are more than one number, and their axes."""
    for name, ref in after.items():
        if ref.shape and ref.shape != builder.shape:
            yield name, builder.axes_of_state(name, ref)
