"""The captured graph of a recording: what one parameter's step computed, as a function of its tensors and numbers."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.numerics.matrix_sums import ENDINGS
from collage_neuron.passes.capture.functionalize import Builder, filled, number_fills
from collage_neuron.passes.capture.matrices import MatrixBuilder, may_have_rows, states_in
from collage_neuron.passes.capture.planes import NO_DIMENSIONS
from collage_neuron.passes.capture.recorder import Op, Recorder, Ref
from collage_neuron.passes.capture.reductions import is_reduction
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
    shape = roles["param"].shape

    def is_small(named: tuple[str, Ref]) -> bool:
        return named[1].shape != shape

    after = dict(sorted(after.items(), key=is_small))
    inputs = dict(sorted((roles | {name: after[name] for name in fresh}).items(), key=is_small))
    skip = {id(op) for op, _ in fresh.values()}
    builder, ops = Builder(shape, len(recorder.slots)), [op for op in recorder.ops if id(op) not in skip]
    axes: dict[str, tuple[int | None, ...]] = {}
    try:
        _fill(builder, inputs, ops)
        for name, ref in after.items():
            _check_shape(name, ref, shape)
    except UnsupportedUpdate:
        if not may_have_rows(shape):
            raise
        found = _with_rows(MatrixBuilder(shape, len(recorder.slots)), inputs, ops, after)
        if found is None:
            raise
        builder, axes = found
    small = tuple(name for name, ref in after.items() if is_small((name, ref)))
    outputs = {name: builder.value_of(ref) for name, ref in ({"param": now["param"]} | after).items()}
    builder.graph.output(outputs | _new_gradient(builder, now))
    builder.graph.eliminate_dead_code()
    told = [f"{name}: {axes[name]}" if name in axes else name for name in small]
    text = builder.graph.python_code("self").src + (f"# {', '.join(told)}: not one for each element" if small else "")
    reductions = (is_reduction(node.target) or node.target in ENDINGS for node in builder.graph.nodes)
    states = tuple(name for name in after if name not in small)
    fills = {k: v for k, (_, v) in fresh.items()}
    return Captured(builder.graph, states, fills, text, "grad" not in now, bool(small) or any(reductions), small, axes)


def _fill(builder: Builder, inputs: dict[str, Ref], ops: list[Op]) -> None:
    for name, ref in inputs.items():
        builder.place(name, ref)
    builder.place_slots()
    for op in ops:
        with pointing_at(op.place):
            builder.add(op)


def _with_rows(
    builder: MatrixBuilder, inputs: dict[str, Ref], ops: list[Op], after: dict[str, Ref]
) -> tuple[Builder, dict[str, tuple[int | None, ...]]] | None:
    """The graph with reductions over rows and columns, and the axes of states; None if it cannot be one."""
    try:
        _fill(builder, inputs, ops)
        builder.finish()
        return builder, dict(states_in(builder, after))
    except UnsupportedUpdate:
        return None


def _check_shape(name: str, ref: Ref, shape: tuple[int, ...]) -> None:
    """Raises for a state of another shape than the parameter's, but for one number (the 0-d result of a reduction).

    A 0-d parameter may not have such a number: all of its states are 0-d, and nothing would tell which are which.
    """
    if ref.shape != shape and (ref.shape or shape == NO_DIMENSIONS):
        raise UnsupportedUpdate(
            f"the update keeps optimizer.state[p][{name!r}], a tensor of shape {list(ref.shape)}"
            f"{'' if ref.shape else ' beside a 0-d parameter'}; states have the parameter's shape, or are one number "
            "of a parameter with dimensions: keep it as torch.full_like(p, value), or leave the optimizer uncompiled"
        )


def _new_gradient(builder: Builder, now: dict[str, Ref]) -> dict[str, fx.Node]:
    """The gradient after the step, if the step writes to it: a loop that does not clear it accumulates into it."""
    node = builder.value_of(now["grad"]) if "grad" in now else None
    return {} if node is None or (node.op == "placeholder" and node.target == "grad") else {"grad": node}
