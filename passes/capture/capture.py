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

import keyword
import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.fx as fx
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.passes.capture.cells import MISSING
from collage_neuron.passes.capture.closures import evaluated, own_step
from collage_neuron.passes.capture.functionalize import Builder, filled, number_fills
from collage_neuron.passes.capture.host_state import HostState, check_no_stand_ins
from collage_neuron.passes.capture.planes import (
    all_detached,
    check_floating,
    differing,
    holder_of_meta,
    is_meta,
    is_plain,
    meta_in,
    same_number,
    scalars_in,
    uncarried,
)
from collage_neuron.passes.capture.reach import OF_TORCH
from collage_neuron.passes.capture.recorder import Op, Recorder, Ref, ShapeWatch, refs_of
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import SWITCHES, Shadow, StandIn, shadow_of
from collage_neuron.passes.capture.source_location import raised_at
from collage_neuron.passes.ir.update import Captured

_captures: dict[Any, Captured] = {}


def capture(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: Mapping[str, Any],
    param: torch.Tensor,
    state: Mapping[str, Any],
) -> Recording:
    """Records the step that `base.step` would take for `param` with `state` (see `shadow_of`).

    Raises:
        UnsupportedUpdate: the update is not elementwise, or reads a tensor's value.
    """
    own = dict(state)
    with HostState(base, optimizer, {"optimizer.state[p]": own}) as host:
        shadow = shadow_of(base, optimizer, group, param, own)
        host.instead_of(optimizer, shadow.optimizer)
        return _record(base, shadow, host)


def _record(base: type[Optimizer], shadow: Shadow, host: HostState) -> Recording:
    """The recording of a shadow's step; it does not change when the host objects are restored afterwards."""
    held = [
        Held(names) for names in (vars(shadow.optimizer), shadow.group, shadow.optimizer.state.get(shadow.param, {}))
    ]
    roles = tensors_of(shadow.optimizer, shadow.param)
    recorder, watch = Recorder(), ShapeWatch()
    recorder.keep(kept_by(shadow.optimizer, shadow.param))
    run_step(base, shadow.optimizer, watch, recorder)
    host.check()
    _check_kept(shadow)
    attributes, group, state = held
    state.now = shadow.state
    _check_not_dropped(state)
    rebound = [
        *attributes.rebound("optimizer."),
        *group.rebound("param_groups[...]."),
        *state.rebound("optimizer.state[p]."),
    ]
    recording = Recording(
        captured=captured_of(recorder, roles, tensors_of(shadow.optimizer, shadow.param)),
        slots=recorder.slots,
        scalars=scalars_in(shadow.state),
        group=group.changed(),
        attributes=attributes.changed(),
        host=(*rebound, *host.changes(carried=False)),
        asked=frozenset(shadow.param.asked | ({"shape"} if watch.asked else set())),
    )
    if recording.host:
        check_no_stand_ins(base, shadow.optimizer)
    return recording


class Held:
    """A snapshot of attributes, settings or a state before a step, to find out what the step changes."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.now = names
        self.objects, self._numbers = dict(names), all_detached(names)

    def changed(self) -> dict[str, Any]:
        """The numbers, and lists or dictionaries of numbers, that have changed."""
        return all_detached(changed(self._numbers, self.now))

    def rebound(self, where: str) -> list[str]:
        """The names that were deleted, or that now hold another object that is not a number."""
        objects = uncarried(self.now).keys() - _SKIPPED
        gone = {k for k, v in self.objects.items() if k not in self.now and not is_meta(v)}
        other = {k for k in objects if self.objects.get(k, MISSING) is not self.now[k] or is_plain(self._numbers[k])}
        return [where + str(k) for k in sorted(gone | other, key=str)]


def run_step(base: type[Optimizer], shadow: Optimizer, watch: ShapeWatch, recorder: Recorder) -> None:
    """Records `base.step` on a shadow."""
    try:
        with own_step(base, shadow, recorder.ops) as step, torch.no_grad(), watch, recorder:
            step()
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
    """The functional graph. A state that the step itself created and filled (`fresh`) becomes an input."""
    builder = Builder(roles["param"].shape, len(recorder.slots))
    for name, ref in (roles | {name: after[name] for name in fresh}).items():
        builder.place(name, ref)
    builder.place_slots()
    skip = {id(op) for op, _ in fresh.values()}
    for op in recorder.ops:
        if id(op) not in skip:
            with pointing_at(op.place):
                builder.add(op)
    outputs = {name: builder.value_of(ref) for name, ref in ({"param": now["param"]} | after).items()}
    builder.graph.output(outputs | _new_gradient(builder, now))
    builder.graph.eliminate_dead_code()
    text = builder.graph.python_code("self").src
    return Captured(builder.graph, tuple(after), {k: v for k, (_, v) in fresh.items()}, text, "grad" not in now)


def _new_gradient(builder: Builder, now: dict[str, Ref]) -> dict[str, fx.Node]:
    """The gradient after the step, if the step writes to it: a loop that does not clear it accumulates into it."""
    node = builder.value_of(now["grad"]) if "grad" in now else None
    return {} if node is None or (node.op == "placeholder" and node.target == "grad") else {"grad": node}


_SKIPPED = {"params", *SWITCHES, *OF_TORCH}  # the list of a 0-d parameter is plain too


def changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """Plain entries of a group, or plain attributes, that a step changed: schedules and counters kept there."""
    return differing(before, {k: v for k, v in after.items() if k not in _SKIPPED})


_RESERVED = re.compile(r"param|grad|index|scalars|[sc]\d+")


def _check_kept(shadow: Shadow) -> None:
    """Raises if the step stores something in a place that is not carried to the next step."""
    state = shadow.state
    if not isinstance(state, dict):
        raise UnsupportedUpdate(
            f"the update keeps an object of type {type(state).__name__} as optimizer.state[p]; keep a "
            "dictionary of tensors and numbers, as torch's optimizers do"
        )
    tensors = meta_in(state)
    places = {f"optimizer.state[p][{k!r}]": v for k, v in state.items() if k not in tensors}
    places |= {f"param_groups[...][{k!r}]": v for k, v in shadow.group.items() if k != "params"}
    places |= {f"optimizer.{k}": v for k, v in vars(shadow.optimizer).items() if k not in ("state", "param_groups")}
    place = holder_of_meta(places)
    if place is not None:
        raise UnsupportedUpdate(
            f"the update keeps tensors in {place}; keep each in optimizer.state[p] under a name of its own, shaped "
            "like the parameter"
        )
    for name, value in tensors.items():
        check_floating(name, value.dtype)
    _check_single(shadow, state)
    kept = [k for k, v in shadow.param.attributes().items() if not _shown(shadow.param, k, v)]
    if kept:
        raise UnsupportedUpdate(
            f"the update keeps something in p.{kept[0]}, an attribute of the parameter; keep it in optimizer.state[p]"
        )
    for name in state:
        _check_name(name, state)
    other = [key for key in shadow.optimizer.state if key is not shadow.param]
    if other:
        raise UnsupportedUpdate(
            f"the update uses optimizer.state[{other[0]!r}], which belongs to no parameter; keep numbers in the "
            "parameter group or as attributes of the optimizer"
        )


def _check_name(name: Any, state: Mapping[Any, Any]) -> None:
    """Raises for a name that cannot be the name of a state in the rewritten update, or is reserved in it."""
    what = None
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        what = "which is not a valid variable name"
    elif _RESERVED.fullmatch(name):
        what = "a name that the rewritten update uses itself"
    for suffix in {c.suffix for fmt in FORMATS.values() for c in fmt.components if c.suffix}:
        stem = str(name).removesuffix(suffix)
        if stem != name and (stem == "param" or stem in state):
            what = f"which is what the further word of {stem!r} is called"
    if what and (is_meta(state[name]) or what.endswith("called")):
        raise UnsupportedUpdate(f"the update has a state called {name!r}, {what}; rename it")


def _check_single(shadow: Shadow, state: Mapping[str, Any]) -> None:
    """Raises if two states are the same tensor, or one is the parameter or gradient: each needs its own words."""
    named: dict[str, Any] = {"the parameter": shadow.param, "its gradient": shadow.param.grad}
    named |= {f"optimizer.state[p][{k!r}]": v for k, v in state.items()}
    found: dict[Ref, str] = {}
    for where, ref in refs_of(meta_in(named)).items():
        other = found.setdefault(ref, where)
        if other != where:
            raise UnsupportedUpdate(
                f"after the update {other} and {where} are one tensor, and a compiled optimizer keeps each in memory "
                "of its own: what is written to the one would not be seen in the other; keep it under one name, or "
                "clone() it"
            )


def _check_not_dropped(state: Held) -> None:
    """Raises if the step deletes a state tensor."""
    dropped = [k for k in meta_in(state.objects) if not isinstance(state.now.get(k), torch.Tensor)]
    if dropped:
        raise UnsupportedUpdate(
            f"the update deletes optimizer.state[p][{dropped[0]!r}], a tensor that it kept until now; leave it there, "
            "or set it to zeros"
        )


def _shown(param: StandIn, name: str, value: Any) -> bool:
    """Returns True if an attribute of a stand-in still equals that of its parameter."""
    return hasattr(param.stands_for, name) and same_number(getattr(param.stands_for, name), value)
