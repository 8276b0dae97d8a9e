"""The objects that states have after a launched step: those that the step has left there, with the words of now.

While updates are launched, states have the objects of before the step, whose words are written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron import torch_privates
from collage_neuron.trace.placeholders import are_marked, has_value, wait

if TYPE_CHECKING:
    from collage_neuron.trace.deferred_calls import DeferredCalls
    from collage_neuron.trace.step_kinds import StepKind

States = Mapping[int, dict[Any, Any]]
"""The states of parameters, by the numbers of these."""


def put_back(states: States, kind: StepKind, objects: Sequence[Any]) -> None:
    """States have the objects of before the step again, whose words are written."""
    for i, name, before, _ in kind.changed:
        if before is None:
            del states[i][name]
        else:
            states[i][name] = objects[before]


def keep_met(states: States, kind: StepKind, mode: DeferredCalls) -> None:
    """Puts the words of states that were in none into their objects."""
    changed = {(i, name) for i, name, *_ in kind.changed}
    for (i, name), own in mode.adopted.states():
        if (i, name) not in changed and states[i][name] is not own:
            torch_privates.exchange(own, states[i][name])
            states[i][name] = own


def keep_objects(
    states: States, kind: StepKind, left: Sequence[torch.Tensor], temporaries: list[torch.Tensor], first: int
) -> list[torch.Tensor]:
    """Puts the words of states into the objects that the step has `left` there, which may have traded places.

    `temporaries` are what the step has made, from the place `first` on; returns those that the next one can have.
    """
    stays, changed = kind.left.places(), kind.changed
    words = [
        states[i][name] if before not in stays else states[i][name].detach()  # it is a state still, of another name
        for i, name, before, _ in changed
    ]
    for (i, name, _, place), word, t in zip(changed, words, left, strict=True):
        has_value(t)
        torch_privates.exchange(t, word)
        states[i][name] = t
        if temporaries and place >= first:
            # What the state was before has no value: whoever has kept it gets an error. It is the placeholder that the
            # next step makes in the place of what is a state now.
            if type(word) is not torch.Tensor or are_marked([word]):
                temporaries = []
            else:
                wait(word)
                temporaries[place - first] = word
    return temporaries


def put_in_order(states: States, kind: StepKind) -> None:
    """States have their names in the order in which the step has left them; further words follow."""
    for i, state in states.items():
        names = kind.left.keys[i]
        for name in [*names, *(name for name in state if name not in names)]:
            state[name] = state.pop(name)  # to the end
