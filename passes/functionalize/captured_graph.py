"""The captured graph of a recording: what one parameter's step computed, as a function of its tensors and numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.numerics.matrix_sums import ENDINGS
from collage_neuron.numerics.tensor_sums import across
from collage_neuron.passes.functionalize.graph_builder import Builder, filled, number_fills
from collage_neuron.passes.functionalize.matrices import MatrixBuilder, states_in
from collage_neuron.passes.functionalize.one_shape import Step, in_one_shape, without_idle_views
from collage_neuron.passes.functionalize.recorded_ops import Op, Recorder, Ref, is_reduction
from collage_neuron.passes.ir.update import Captured

_captures: dict[Any, Captured] = {}


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
