"""Captures an optimizer's update as a functional graph of one parameter, by recording `step()` of a shadow.

Given: `torch.optim.AdamW.step`
Result::

    mul = param * s0
    lerp = aten.lerp.Scalar(exp_avg, grad, s1)
    mul_1 = exp_avg_sq * s2
    addcmul = aten.addcmul.default(mul_1, grad, grad, value=s3)
    ...
    return {"param": addcdiv, "exp_avg": lerp, "exp_avg_sq": addcmul}

The slots s0, s1, ... are the numbers of this step, in double: changing the learning rate does not change the graph. A
branch on the step count selects another graph, and each graph is built once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.passes.capture.captured_graph import captured_of
from collage_neuron.passes.capture.cells import MISSING
from collage_neuron.passes.capture.closures import evaluated, own_step
from collage_neuron.passes.capture.exact_types import check_types
from collage_neuron.passes.capture.functionalize import dimensions
from collage_neuron.passes.capture.host_state import HostState, check_no_stand_ins
from collage_neuron.passes.capture.number_table import Numbers
from collage_neuron.passes.capture.other_shapes import refs_in
from collage_neuron.passes.capture.outcomes import Traced, recorded, written
from collage_neuron.passes.capture.planes import (
    all_detached,
    differing,
    is_meta,
    is_plain,
    meta_in,
    scalars_in,
    uncarried,
)
from collage_neuron.passes.capture.reach import of_torch
from collage_neuron.passes.capture.recorder import Recorder, Ref, refs_of
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.reductions import is_reduction
from collage_neuron.passes.capture.shadow import SWITCHES, Shadow, shadow_of
from collage_neuron.passes.capture.shape_watch import ShapeWatch
from collage_neuron.passes.capture.source_location import raised_at
from collage_neuron.passes.capture.state_checks import check_kept


def capture(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: Mapping[str, Any],
    param: torch.Tensor,
    state: Mapping[str, Any],
    made: int = 0,
    answers: tuple[bool, ...] | None = None,
    idle: bool = False,
) -> Recording:
    """Records the step that `base.step` would take for `param` with `state` (see `shadow_of`).

    With `made`, 0-d tensors that it makes on the parameter's device are no numbers of the host (`Recorder`); with 2,
    not even those that it makes with `torch.tensor` (`ShapeWatch`). With `answers`, it is that for these answers to
    comparisons of numbers that are read from tensors, and not for all. With `idle`, the parameter has no gradient.

    Raises:
        UnsupportedUpdate: the update is not elementwise, or reads a tensor's value.
    """

    def take(numbers: Numbers, answers: tuple[bool, ...]) -> Traced:
        own = dict(state)
        with HostState(base, optimizer, {"optimizer.state[p]": own}) as host:
            shadow = shadow_of(base, optimizer, group, param, own)
            host.instead_of(optimizer, shadow.optimizer)
            if idle:
                shadow.param.grad = None
                shadow.group["params"] = shadow.group["params"] if group["params"] else []
            watch = ShapeWatch(made, [param])
            traced = _traced(base, shadow, host, Recorder(bool(made), numbers, answers), watch)
            return _of_touched(traced) if idle else traced

    if answers is not None:
        traced = take(Numbers(), answers)
        return _recording(traced._replace(recorder=written(traced.recorder)))
    found, compared = recorded(take)
    recording = _recording(found)
    return recording if compared is None else replace(recording, compared=_recording(compared))


def _traced(base: type[Optimizer], shadow: Shadow, host: HostState, recorder: Recorder, watch: ShapeWatch) -> Traced:
    """A shadow's step; it does not change when the host objects are restored afterwards."""
    held = [
        Held(names) for names in (vars(shadow.optimizer), shadow.group, shadow.optimizer.state.get(shadow.param, {}))
    ]
    named = _named(shadow.optimizer, shadow.param)
    roles = refs_of(named)
    recorder.keep([t.untyped_storage() for t in named.values()])
    returned = run_step(base, shadow.optimizer, watch, recorder)
    host.check()
    check_kept(shadow)
    check_returned(returned)
    if recorder.reads:
        check_types(base)
    attributes, group, state = held
    state.now = shadow.state
    _check_not_dropped(state)
    rebound = [
        *attributes.rebound("optimizer."),
        *group.rebound("param_groups[...]."),
        *state.rebound("optimizer.state[p]."),
    ]
    others = {
        "scalars": scalars_in(shadow.state),
        "group": group.changed(),
        "attributes": attributes.changed(),
        "reads": bool(recorder.reads),
        "host": (*rebound, *host.changes(carried=False)),
        "asked": sorted(shadow.param.asked | watch.asked),
    }
    if others["host"]:
        check_no_stand_ins(base, shadow.optimizer)
    return Traced(recorder, roles, tensors_of(shadow.optimizer, shadow.param), others)


def _of_touched(traced: Traced) -> Traced:
    """The recording without the states that no operation mentions, and that stay what they are, of whatever shape."""
    touched = {ref.storage for op in traced.recorder.ops for ref in refs_in(op)}
    left = {
        name
        for name, ref in traced.before.items()
        if name not in ("param", "grad") and ref.storage not in touched and traced.now.get(name) == ref
    }
    before, now = ({k: v for k, v in refs.items() if k not in left} for refs in (traced.before, traced.now))
    return traced._replace(before=before, now=now)


def _recording(traced: Traced) -> Recording:
    captured = captured_of(traced.recorder, traced.before, traced.now)
    has_shape = captured.axes or captured.seen_as or _names_dimensions(traced.recorder)
    asked = frozenset(traced.others["asked"]) | ({"shape"} if has_shape else set())
    others = {**traced.others, "asked": asked, "recordings": traced.recordings}
    return Recording(captured=captured, slots=traced.recorder.slots, **others)


class Held:
    """A snapshot of attributes, settings or a state before a step, to find out what the step changes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.now = names
        self.objects = dict(names)
        self._numbers = all_detached({k: v for k, v in names.items() if k not in _skipped()})

    def changed(self) -> dict[str, Any]:
        """The numbers, and lists or dictionaries of numbers, that have changed."""
        new = changed(self._numbers, self.now)
        return all_detached(new) if new else new

    def rebound(self, where: str) -> list[str]:
        """The names that were deleted, or that now hold another object that is not a number."""
        objects = uncarried(self.now).keys() - _skipped()
        gone = {k for k, v in self.objects.items() if k not in self.now and not is_meta(v)}
        other = {k for k in objects if self.objects.get(k, MISSING) is not self.now[k] or is_plain(self._numbers[k])}
        return [where + str(k) for k in sorted(gone | other, key=str)]


def _names_dimensions(recorder: Recorder) -> bool:
    """Returns True if a reduction is given dimensions, which are all of them for some shapes only."""
    return any(is_reduction(op.target) and dimensions(op) for op in recorder.ops)


def run_step(base: type[Optimizer], shadow: Optimizer, watch: ShapeWatch, recorder: Recorder) -> Any:
    """Records `base.step` on a shadow; returns what it returns, if that is not the loss of its closure."""
    try:
        with own_step(base, shadow, recorder.ops) as step, torch.no_grad(), watch, recorder:
            returned = step()
        if recorder.refused is not None:  # code has caught it
            raise recorder.refused
        return None if returned is step.loss else returned
    except UnsupportedUpdate as error:
        with pointing_at(raised_at(error)):
            raise
    except Exception as error:  # whatever user code raises when its tensors have no data
        mode = "; call optimizer.train() before compiling" if callable(getattr(shadow, "train", None)) else ""
        closure = "with a closure that returns the loss alone" if evaluated(shadow) else "without a closure"
        with pointing_at(raised_at(error)):
            raise UnsupportedUpdate(
                f"{base.__name__}.step() cannot be captured: run on a stand-in for the parameter, "
                f"which has no data and another id, and {closure}, it raised "
                f"{type(error).__name__}: {_first_sentence(error)}{mode}. A step should look at no values "
                "(torch.equal, numpy(), tolist(): branch with torch.where), take parameters and gradients from "
                "optimizer.param_groups, and call a closure only if there is one"
            ) from error


def check_returned(returned: Any) -> None:
    """Raises for what a step returns beside the loss of its closure."""
    if returned is not None:
        raise UnsupportedUpdate(
            f"step() returns a {type(returned).__name__}, which a recording of it cannot give: it has no values. "
            "Return nothing, or the loss of the closure; keep what else is to be known in param_groups, or in an "
            "attribute of the optimizer"
        )


def _first_sentence(error: Exception) -> str:
    """The first sentence of an error: torch appends advice about its own extensions."""
    return str(error).partition("\n")[0].partition(". ")[0].rstrip(".")


def tensors_of(shadow: Optimizer, param: torch.Tensor) -> dict[str, Ref]:
    """The tensors that a shadow has for a parameter, by name. Code may replace them: `p.data = ...`."""
    return refs_of(_named(shadow, param))


def kept_by(shadow: Optimizer, param: torch.Tensor) -> list[Any]:
    """The storages of these tensors, which identify them in a recording; kept alive, since code may drop them."""
    return [t.untyped_storage() for t in _named(shadow, param).values()]


def _named(shadow: Optimizer, param: torch.Tensor) -> dict[str, Any]:
    return meta_in({"param": param, "grad": param.grad} | shadow.state.get(param, {}))


@cache
def _skipped() -> frozenset[str]:
    return frozenset({"params", *SWITCHES, *of_torch()})  # the list of a 0-d parameter is plain too


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Plain entries of a group, or plain attributes, that a step changed: schedules and counters kept there."""
    return differing(before, {k: v for k, v in after.items() if k not in _skipped()})


def _check_not_dropped(state: Held) -> None:
    """Raises if the step deletes a state tensor."""
    dropped = [k for k in meta_in(state.objects) if not isinstance(state.now.get(k), torch.Tensor)]
    if dropped:
        raise UnsupportedUpdate(
            f"the update deletes optimizer.state[p][{dropped[0]!r}], a tensor that it kept until now; leave it there, "
            "or set it to zeros"
        )
