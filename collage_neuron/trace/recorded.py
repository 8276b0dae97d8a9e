"""Records the next step of torch's own elementwise classes: a step of a copy with one parameter.

What such a step does depends on the settings of a group, on the numbers in a state, and on what kind of tensors there
are. So one parameter shows what happens to all that are alike, and the optimizer's own step need not run.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.analysis.first_moments import unread_states
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.recording.visible import ParamShaped, visible
from collage_neuron.states import kept_formats
from collage_neuron.trace.calls import Uncompiled
from collage_neuron.trace.copied import Copied, Stepped, attributes_of_torch
from collage_neuron.trace.library_code import is_of_library
from collage_neuron.trace.placeholders import waits

CLASSES = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""The elementwise ones, whose step evaluates a closure once, first, and counts nothing outside of states."""
SWITCHES = ("foreach", "fused", "capturable")
"""Their options that select another implementation of the same update: a copy takes the plain one."""


def is_recorded(base: type[Optimizer], optimizer: Optimizer | None = None) -> bool:
    """Returns True for these classes, unless somebody has put code of another kind in the place of theirs."""
    if base not in CLASSES or not is_of_library(base):
        return False
    if optimizer is not None and not _has_no_code_of_its_own(base, tuple(vars(optimizer))):  # type: ignore[arg-type]
        return False
    return all(map(is_of_library, code_of(base)))


@lru_cache
def _has_no_code_of_its_own(base: Any, attributes: tuple[str, ...]) -> bool:
    """Returns True if no attribute of the object is in the place of one of its class."""
    own = (k for k in attributes if k not in attributes_of_torch() and not k.startswith("_collage") and k != "step")
    return not any(hasattr(base, k) for k in own)


def code_of(base: type[Optimizer]) -> list[Any]:
    """What the code of a class is, and what it refers to: the classes, and what is in their modules."""
    return list(chain.from_iterable(names.values() for names in places_of_code(base)))


def places_of_code(base: type[Optimizer]) -> list[Mapping[str, Any]]:
    """Where that is."""
    classes = base.__mro__[:-1]
    return [*map(vars, classes), *(vars(sys.modules[name]) for name in dict.fromkeys(c.__module__ for c in classes))]


def record(base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], p: Any) -> Recording:
    """The recording of the next step for a parameter of a group.

    Raises:
        UnsupportedUpdate: it cannot be compiled.
    """
    shown = visible(optimizer.state.get(p, {}), p, ())
    try:
        try:
            return _record(base, optimizer, group, p, shown)
        except UnsupportedUpdate:
            if p.dim():
                raise
            return _record(base, optimizer, group, p, _as_numbers(optimizer.state.get(p, {}), shown))
    except Uncompiled as error:
        raise UnsupportedUpdate(f"{base.__name__} cannot be compiled: {error}") from error
    except UnsupportedUpdate:
        kept_formats.require_known(optimizer)  # a word of an unknown format looks like a state of the user's
        raise


def _as_numbers(state: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    """The same with all tensors as numbers: torch loads a number of a 0-d bf16 parameter in bf16, as it does states."""
    return {k: state[k].float() if isinstance(state[k], Tensor) else v for k, v in shown.items()}


def _record(
    base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], p: Any, shown: dict[str, Any]
) -> Recording:
    while True:
        copied = alone(base, optimizer, group, p, shown)
        stepped = copied.step()
        left, written = state_of(copied), {k for each in stepped.kind.planned for k in each.recording.captured.states}
        # All states of a 0-d parameter are 0-d. Those that the step writes with what waits are its own, and no numbers.
        tensors = {k for k in shown if not isinstance(shown[k], ParamShaped) and (k in written or waits(left.get(k)))}
        if not tensors:
            break
        shown |= dict.fromkeys(tensors, ParamShaped(p))
    found = recording_of(copied, stepped)
    if unread_states(found.captured.graph):
        return replace(found, following=recording_of(copied, copied.step()))
    return found


def alone(
    base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], p: Any, shown: Mapping[str, Any]
) -> Copied:
    """A copy with one parameter, and its state; all numbers are on the host."""
    copied = Copied(base, optimizer, torch.device("cpu"))
    copied.add_params(0, [p])
    own = {k: v for k, v in group.items() if k != "params" and not str(k).startswith("collage_")}
    settings = {k: copied.copies.of(on_host(v)) for k, v in own.items()} | {k: False for k in SWITCHES if k in group}
    copied.optimizer.param_groups = [settings | {"params": list(copied.params.values())}]
    if shown:
        copied.add_state(p, {k: on_host(v) for k, v in shown.items()})
    return copied


def on_host(value: Any) -> Any:
    """A number that is a tensor on a device (a rate, a count), on the host."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def state_of(copied: Copied) -> dict[str, Any]:
    """The state of its only parameter."""
    (p,) = copied.params.values()
    found: dict[str, Any] = copied.optimizer.state.get(p, {})
    return found


def recording_of(copied: Copied, stepped: Stepped) -> Recording:
    """What a step of a copy with one parameter has done.

    Raises:
        UnsupportedUpdate: it has left the parameter as it is.
    """
    if len(stepped.kind.planned) != 1 or stepped.kind.reads:
        raise UnsupportedUpdate("step() does nothing to a parameter")
    (planned,) = stepped.kind.planned
    scalars = {k: _copy(v) for k, v in state_of(copied).items() if not waits(v)}
    return replace(planned.recording, scalars=scalars, kind=stepped.kind, numbers=list(stepped.numbers))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
