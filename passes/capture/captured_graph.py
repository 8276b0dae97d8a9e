"""The captured graph of a recording: what one parameter's step computed, as a function of its tensors and numbers."""

from __future__ import annotations

from typing import Any

import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.passes.capture.functionalize import Builder, filled, is_reduction, number_fills
from collage_neuron.passes.capture.planes import NO_DIMENSIONS
from collage_neuron.passes.capture.recorder import Op, Recorder, Ref
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

    States of one number come after the others, in whatever order a state has them.
    """
    builder = Builder(roles["param"].shape, len(recorder.slots))
    after = dict(sorted(after.items(), key=_is_number))
    for name, ref in sorted((roles | {name: after[name] for name in fresh}).items(), key=_is_number):
        builder.place(name, ref)
    builder.place_slots()
    skip = {id(op) for op, _ in fresh.values()}
    for op in recorder.ops:
        if id(op) not in skip:
            with pointing_at(op.place):
                builder.add(op)
    for name, ref in after.items():
        _check_shape(name, ref, builder.shape)
    small = tuple(name for name, ref in after.items() if not ref.shape)
    outputs = {name: builder.value_of(ref) for name, ref in ({"param": now["param"]} | after).items()}
    builder.graph.output(outputs | _new_gradient(builder, now))
    builder.graph.eliminate_dead_code()
    text = builder.graph.python_code("self").src + (f"# {', '.join(small)}: one number each" if small else "")
    reduces = bool(small) or any(is_reduction(node.target) for node in builder.graph.nodes)
    states = tuple(name for name in after if name not in small)
    fills = {k: v for k, (_, v) in fresh.items()}
    return Captured(builder.graph, states, fills, text, "grad" not in now, reduces, small)


def _is_number(named: tuple[str, Ref]) -> bool:
    return not named[1].shape


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
