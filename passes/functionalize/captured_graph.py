"""The captured graph of a recording: what one parameter's step computed, as a function of its tensors and numbers.

An update with reductions over rows or columns, or with states of their shapes, has a builder of its own
(`MatrixBuilder`).

Given (a parameter of shape [n, m], a state `row` of shape [n])::

    mean = aten.mean.dim(square, [-1])                   # of shape [n]
    lerp_ = aten.lerp_.Scalar(row, mean, s0)
    unsqueeze = aten.unsqueeze.default(lerp_, -1)        # of shape [n, 1]
    div = aten.div.Tensor(grad, unsqueeze)

Result::

    mean_to = mean_to(square, row)
    lerp = aten.lerp.Scalar(row, mean_to, s0)
    div = aten.div.Tensor(grad, lerp)

Every value there has an extent (`numerics.reductions`), and operations broadcast by it. That is what the step means
only if each dimension of each tensor runs along one dimension of the parameter. A square matrix has rows and columns of
one shape, so shapes do not tell: it is found out from how tensors are combined, beginning with the parameter and its
gradient. A state of another shape has dimensions that are not known until it meets something that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.numerics.reductions import ENDINGS, MATRIX, NUMBER, across, extent_of, mean_to, norm_to, sum_to
from collage_neuron.passes.functionalize.graph_builder import (
    Builder,
    Step,
    arguments,
    dimensions,
    filled,
    fills,
    in_one_shape,
    number_fills,
    without_idle_views,
)
from collage_neuron.passes.functionalize.recorded_ops import (
    ALL_REDUCE,
    WAIT,
    Op,
    Recorder,
    Ref,
    functional_overload,
    is_outer,
    is_reduction,
)
from collage_neuron.passes.ir.update import Captured

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


_captures: dict[Any, Captured] = {}


# --- the graph of a recording -----------------------------------------------------------------------------------------


def captured_of(recorder: Recorder, before: dict[str, Ref], now: dict[str, Ref]) -> Captured:
    """The update of a parameter whose tensors are `before` and `now`, after the step; each graph is built once."""
    after = {name: ref for name, ref in now.items() if name not in ("param", "grad")}
    fresh = filled({name: ref for name, ref in after.items() if name not in before}, recorder.ops)
    number_fills(recorder, {id(op) for op, _ in fresh.values()})
    news = {f"new {name}": ref for name, ref in now.items()}
    key = recorder.signature(before | news)
    if key not in _captures:
        _captures[key] = _build(recorder, before, now, after, fresh)
    return _captures[key]


def _build(
    recorder: Recorder,
    roles: dict[str, Ref],
    now: dict[str, Ref],
    after: dict[str, Ref],
    fresh: dict[str, tuple[Op, float]],
) -> Captured:
    """The functional graph. A state that the step itself created and filled (`fresh`) becomes an input.

    States of one number, and of rows and columns, come after the others, in whatever order a state has them.
    """
    skip = {id(op) for op, _ in fresh.values()}
    inputs = roles | {name: after[name] for name in fresh}
    given = Step(roles["param"].shape, inputs, now, [op for op in recorder.ops if id(op) not in skip])
    step, builder, axes = _graph_of(given, len(recorder.slots))
    seen_as = step.shape if step.is_seen else None
    states = _states(step)
    _check_same_shapes(roles, after)
    # With `seen_as`, that is the shape in which all are seen, and not the parameter's own.
    small = tuple(name for name, ref in states.items() if ref.shape != step.shape)
    outputs = {name: builder.value_of(ref) for name, ref in ({"param": step.now["param"]} | states).items()}
    builder.graph.output(outputs | _new_gradient(builder, step.now))
    builder.graph.eliminate_dead_code()
    reduced = [f"{name}: {axes[name]}" if name in axes else name for name in small]
    # Updates are found by this text, so it has what the code of the graph does not show: extents of states, and shapes.
    text = builder.graph.python_code("self").src + (
        f"# {', '.join(reduced)}: not one for each element" if small else ""
    )
    shapes = {name: after[name].shape for name in states if name not in small and after[name].shape != given.shape}
    if seen_as:
        text += f"# seen as {seen_as}, {shapes}"
    reductions = (is_reduction(n.target) or n.target in ENDINGS or n.target is across for n in builder.graph.nodes)
    reduces = bool(small) or any(reductions)
    fills = {k: v for k, (_, v) in fresh.items()}
    of_elements = tuple(name for name in states if name not in small)
    return Captured(
        builder.graph, of_elements, fills, text, "grad" not in now, reduces, small, axes, seen_as=seen_as, shapes=shapes
    )


class _Graph(NamedTuple):
    """The graph of a step, before its outputs."""

    step: Step
    builder: Builder
    axes: dict[str, tuple[int | None, ...]]
    """Those of states of rows and columns."""


def _graph_of(step: Step, slots: int) -> _Graph:
    """The graph of a step: elementwise, by rows, or one of these of tensors that are all seen in one shape."""
    try:
        return _elementwise(step, slots)
    except UnsupportedUpdate:
        with suppress(UnsupportedUpdate):  # of an operation that is understood in no shape
            for attempt in _other_graphs(step, slots):
                with suppress(UnsupportedUpdate):
                    return attempt()
        raise  # the reason of the first attempt, which speaks of the shapes that the user's code has


def _other_graphs(step: Step, slots: int) -> Iterator[Callable[[], _Graph]]:
    if not step.shape:
        return
    step = without_idle_views(step)
    steps = [step, *in_one_shape(step)]
    yield from (partial(_elementwise, each, slots) for each in steps)
    yield from (partial(_with_rows, each, slots) for each in steps if len(each.shape) > 1)


def _states(step: Step) -> dict[str, Ref]:
    """The states after a step: first those of its shape."""
    states = {name: ref for name, ref in step.now.items() if name not in ("param", "grad")}
    return dict(sorted(states.items(), key=lambda named: named[1].shape != step.shape))


def _fill(builder: Builder, step: Step) -> None:
    for name, ref in sorted(step.inputs.items(), key=lambda named: named[1].shape != step.shape):
        builder.place(name, ref)
    builder.place_slots()
    for op in step.ops:
        with pointing_at(op.place):
            builder.add(op)


def _elementwise(step: Step, slots: int) -> _Graph:
    """The graph without reductions over rows and columns."""
    builder = Builder(step.shape, slots)
    _fill(builder, step)
    for name, ref in _states(step).items():
        _check_shape(name, ref, step.shape)
    return _Graph(step, builder, {})


def _with_rows(step: Step, slots: int) -> _Graph:
    """The graph with reductions over rows and columns, and the axes of states."""
    builder = MatrixBuilder(step.shape, slots)
    _fill(builder, step)
    builder.finish()
    return _Graph(step, builder, dict(states_in(builder, _states(step))))


def _check_shape(name: str, ref: Ref, shape: tuple[int, ...]) -> None:
    """Raises for a state of another shape than the parameter's, but for one number (the 0-d result of a reduction)."""
    if ref.shape != shape and ref.shape:
        raise UnsupportedUpdate(
            f"the update keeps optimizer.state[p][{name!r}], a tensor of shape {list(ref.shape)}; states have the "
            "parameter's shape, or are one number of a parameter with dimensions: keep it as torch.full_like(p, "
            "value), or leave the optimizer uncompiled"
        )


def _check_same_shapes(before: Mapping[str, Ref], after: Mapping[str, Ref]) -> None:
    """Raises for a state that has another shape after the step: what is kept of it is found by its shape."""
    for name, ref in after.items():
        if name in before and before[name].shape != ref.shape:
            raise UnsupportedUpdate(
                f"the update changes the shape of optimizer.state[p][{name!r}] from {list(before[name].shape)} to "
                f"{list(ref.shape)}; keep it in one shape, and give it another where it is used"
            )


def _new_gradient(builder: Builder, now: Mapping[str, Ref]) -> dict[str, fx.Node]:
    """The gradient after the step, if the step writes to it."""
    # A loop that does not clear its gradients adds the next ones to what the step has left there.
    node = builder.value_of(now["grad"]) if "grad" in now else None
    return {} if node is None or (node.op == "placeholder" and node.target == "grad") else {"grad": node}
