"""Checks that an optimizer treats parameters independently.

A recording has one parameter. It cannot show that code depends on a parameter's position in its group, on other
parameters, on counters that advance from one parameter to the next, or on hidden state. So steps are run on stand-ins
for many parameters at once and compared with the recordings: before anything is changed, and again when the step takes
another branch, or when a group is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture import position_aware
from collage_neuron.passes.capture.capture import changed
from collage_neuron.passes.capture.closures import evaluated
from collage_neuron.passes.capture.host_state import untraced
from collage_neuron.passes.capture.joint import Joint, Mixed, Part
from collage_neuron.passes.capture.planes import is_plain
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import bare_shadow, settings_of, shown_after
from collage_neuron.recording import aliases
from collage_neuron.recording.bucketing import buckets, naming, record, recordings, shown_and_recorded
from collage_neuron.recording.visible import visible
from collage_neuron.states.bookkeeping import bookkeeping

if TYPE_CHECKING:
    from collage_neuron.recording.idle import Idle

Found = Mapping[Any, Recording]
_NONE: Idle = MappingProxyType({})


def check_step(
    base: type[Optimizer],
    optimizer: Optimizer,
    recordings: Sequence[Recording],
    found: Callable[[], Found],
    idle: Idle = _NONE,
) -> bool:
    """Compares the recordings of a step with a joint step, where that is needed; `found` has them by parameter.

    `idle` are those of groups without gradients.

    An update that was not there before is compared by `check`. The same update may have other numbers, from a branch
    that depends on a parameter's place: if the code has signs of that, every step is compared, and otherwise steps
    1, 2, 4, 8, ... Classes of torch.optim do not need it. Where objects change on the host, `trace` compares each step.

    Returns:
        True if it was needed.

    Raises:
        UnsupportedUpdate: they differ; nothing has been changed.
    """
    ours = bookkeeping(optimizer)
    keys = _keys(optimizer, recordings)
    is_new = not ours.alike.issuperset(keys)
    if is_new:
        check(base, optimizer)
        ours.alike |= keys
    ours.compared = ours.compared or _compared(base, optimizer)
    is_power = ours.steps & (ours.steps + 1) == 0  # this step is not counted yet
    is_due = ours.compared == "all" or (ours.compared == "doubling" and is_power)
    if is_due:
        check_numbers(base, optimizer, found(), idle)
    return is_new or is_due


def _compared(base: type[Optimizer], optimizer: Optimizer) -> str:
    """Which steps are compared with a joint step even if the update is known: "none", "doubling" or "all"."""
    if position_aware.is_of_torch(base):
        return "none"
    return "all" if position_aware.signs(base, optimizer) else "doubling"


def check_numbers(base: type[Optimizer], optimizer: Optimizer, found: Found, idle: Idle = _NONE) -> None:
    """Compares the recordings of a step, by parameter, with a joint step: their operations and their numbers.

    Raises:
        UnsupportedUpdate: they differ; nothing has been changed.
    """
    if (found or idle) and not any(recording.host for recording in (*found.values(), *idle.values())):
        with naming(base), untraced(base, optimizer) as host:
            alone = host_side(base, optimizer)
            host.instead_of(optimizer, alone)
            joint = Joint(base, alone, follow=True, made=bookkeeping(optimizer).makes_small)
            confirm(joint, optimizer, found, idle=idle)


def check(base: type[Optimizer], optimizer: Optimizer) -> None:
    """Compares joint steps on stand-ins with the recordings: two steps with one parameter of each kind, one with all.

    The second step shows state that the first has hidden. The last step has all parameters in their places, and the
    stand-ins have the hashes of their parameters, so that they are found in the user's dictionaries; steps that write
    to such dictionaries were rejected by then. The stand-ins of the first steps have exactly their parameters' classes.

    Raises:
        UnsupportedUpdate: they differ; nothing has been changed.
    """
    with naming(base):
        aliases.check(optimizer)
        for group in () if position_aware.is_of_torch(base) else optimizer.param_groups:
            recordings(base, optimizer, group, group["params"])  # they tell the host's numbers from computed ones
        seen = _compare(base, optimizer, steps=2, few=True) + _compare(base, optimizer, steps=1, follow=True)
    bookkeeping(optimizer).alike |= _keys(optimizer, seen)


def _keys(optimizer: Optimizer, found: Iterable[Recording]) -> set[Any]:
    """Keys that identify updates: the sizes of the groups, the presence of a closure, and the graph."""
    sizes = tuple(len(group["params"]) for group in optimizer.param_groups)
    closure = evaluated(optimizer) is not None
    return {(sizes, closure, recording.captured.text) for recording in found}


def _compare(
    base: type[Optimizer], optimizer: Optimizer, steps: int, few: bool = False, follow: bool = False
) -> list[Recording]:
    with untraced(base, optimizer) as host:
        alone = host_side(base, optimizer)
        host.instead_of(optimizer, alone)
        for group in alone.param_groups if few else ():
            group["params"] = [alike[0] for alike in buckets(alone, group["params"])]
        joint = Joint(base, alone, follow, few, bookkeeping(optimizer).makes_small)
        seen: list[Recording] = []
        for step in range(steps):
            found = _step_alone(base, alone)
            parts = _step_jointly(joint, optimizer)
            for problem in _differences(alone, joint, found, parts, _places(optimizer)):
                raise _refusal(problem + (" in the second step" if step else ""), _why(base, optimizer, found))
            joint.sync(alone)
            for p, part in parts.items():
                alone.state[p].update(part.scalars)
            seen += found.values()
    return seen


def confirm(
    joint: Joint,
    optimizer: Optimizer,
    found: Found,
    own: Callable[[Any, tuple[bool, ...]], Recording] | None = None,
    idle: Idle = _NONE,
) -> dict[torch.Tensor, Part]:
    """Takes a joint step of the parameters in `found`, and compares it with the recording of each.

    If the joint step has other answers than True (`Joint`), `own` gives the recording of a parameter for its answers.

    Raises:
        UnsupportedUpdate: they differ.
    """
    for p, stand_in in joint.stand_ins.items():
        stand_in.grad = stand_in.grad if p in found else None
    parts = _step_jointly(joint, optimizer)
    if own is not None:
        found = {p: own(p, part.answers) for p, part in parts.items()}
    for group in joint.optimizer.param_groups:
        for recording in [found[p] for p in group["params"] if p in found]:
            group.update(recording.group)
            vars(joint.optimizer).update(recording.attributes)
    for i, recording in idle.items():
        joint.optimizer.param_groups[i].update(recording.group)
        vars(joint.optimizer).update({} if found else recording.attributes)
    for problem in _differences(joint.optimizer, joint, found, parts, _places(optimizer), idle):
        raise _refusal(problem, _why(joint.base, optimizer, found))
    return parts


def _step_jointly(joint: Joint, optimizer: Optimizer) -> dict[torch.Tensor, Part]:
    try:
        return joint.step()
    except Mixed as mixed:
        places = _places(optimizer)
        raise _refusal(f"updates {places[mixed.args[1]]} with tensors of {places[mixed.args[0]]}") from None


def host_side(base: type[Optimizer], optimizer: Optimizer) -> Optimizer:
    """The optimizer with its parameters and copies of all its numbers, but without values of tensors."""
    copied = bare_shadow(base, optimizer)
    copied.param_groups = [settings_of(g) | {"params": g["params"]} for g in optimizer.param_groups]
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in optimizer.state:
                copied.state[p] = _shown(base, optimizer, group, p)
    return copied


def _shown(base: type[Optimizer], optimizer: Optimizer, group: dict[str, Any], p: Any) -> dict[str, Any]:
    if p.dim() == 0:  # only a recording can distinguish its states from numbers
        return shown_and_recorded(base, optimizer, group, p)[0]
    return visible(optimizer.state[p], p, bookkeeping(optimizer).small)


def _step_alone(base: type[Optimizer], optimizer: Optimizer) -> Found:
    """A step by recordings, one for all parameters that are alike: a compiled step without tensor values."""
    found = [(g, *one) for g in optimizer.param_groups for one in recordings(base, optimizer, g, g["params"])]
    for group, params, recording in found:
        group.update(recording.group)
        vars(optimizer).update(recording.attributes)
        for p in params:
            optimizer.state[p].update(recording.scalars | shown_after(recording.captured, p))
    return {p: recording for _, params, recording in found for p in params}


def _differences(
    alone: Optimizer,
    joint: Joint,
    found: Found,
    parts: Mapping[torch.Tensor, Part],
    places: Mapping[torch.Tensor, str],
    idle: Idle = _NONE,
) -> Iterator[str]:
    """Describes the differences, as the end of a sentence that begins with `step()`; `places` locate the parameters."""
    for i, (group, other) in enumerate(zip(alone.param_groups, joint.shadow.param_groups, strict=True)):
        if i in idle or not found.keys().isdisjoint(group["params"]):
            yield from (f"advances param_groups[{i}][{k!r}] from parameter to parameter" for k in changed(group, other))
    yield from (f"advances optimizer.{k} from parameter to parameter" for k in changed(vars(alone), vars(joint.shadow)))
    different = [places[p] for p in parts if not _equal(found[p], parts[p])]
    if different:
        yield (
            f"does something else to {', '.join(different[:3])}{', ...' if len(different) > 3 else ''} "
            "than to such a parameter alone"
        )


def _equal(alone: Recording, part: Part) -> bool:
    def told(x: Recording | Part) -> str:  # as text: equal for equal doubles, NaN among them
        scalars = {k: _number(v) for k, v in x.scalars.items() if is_plain(v) or isinstance(v, torch.Tensor)}
        return repr((x.captured.text, dict(x.captured.fresh), x.slots, scalars))

    return told(alone.compared or alone) == told(part)


def _number(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.tolist() if value.dim() else value.item()


def _places(optimizer: Optimizer) -> dict[torch.Tensor, str]:
    return {
        p: f"param_groups[{i}]['params'][{j}]"
        for i, group in enumerate(optimizer.param_groups)
        for j, p in enumerate(group["params"])
    }


_INDEPENDENT = (
    "What it does to a parameter must not depend on the parameter's place in its group, on other parameters, on "
    "type(p), or on what was kept or counted elsewhere: use parameter groups with settings of their own, count once a "
    "step or in optimizer.state[p], and keep all else in optimizer.state[p]"
)


def _why(base: type[Optimizer], optimizer: Optimizer, found: Found) -> str:
    """The cause of a difference and the remedy, as far as recordings show them."""
    seen = list(dict.fromkeys(where for recording in found.values() for where in recording.host))
    drawn = [where for where in seen if "random generator" in where]
    if not _is_repeatable(base, optimizer):
        return (
            "Two recordings of the same step have different numbers: they come from a clock, from the system's random "
            "numbers, or from another thread; read these before step(), and put what step() needs into param_groups"
        )
    if drawn:
        return (
            f"It draws random numbers on the host ({drawn[0]}), and not once a step: draw before the loop over the "
            "parameters, so that all have the same number, or add noise to the gradients before step()"
        )
    if seen:
        return f"It changes {seen[0]}, and not once a step: do that before the loop over the parameters. {_INDEPENDENT}"
    return _INDEPENDENT


def _is_repeatable(base: type[Optimizer], optimizer: Optimizer) -> bool:
    """Returns True if a step recorded twice has the same numbers."""
    group = next(group for group in optimizer.param_groups if group["params"])
    slots = [record(base, optimizer, group, group["params"][0]).slots for _ in range(2)]
    return repr(slots[0]) == repr(slots[1])  # as text: equal for equal doubles, NaN among them


def _refusal(problem: str, why: str = _INDEPENDENT) -> UnsupportedUpdate:
    return UnsupportedUpdate(f"its step() {problem}. {why}")
