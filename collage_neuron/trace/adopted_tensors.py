"""Tensors with values that meet values that wait: memory that a step makes, and states that are not kept in words.

`torch.zeros(n)` is no operation on anything that waits, so it is there at once; and what is done with it alone is done.
A tensor becomes a placeholder when an operation has it and something that waits: it has one value in all its elements
then (`torch.zeros`), so that a number says what it is, or it is a state (of rows, or one number), which a launch reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import torch

from collage_neuron import torch_privates
from collage_neuron.passes.functionalize.recorded_ops import Geometry
from collage_neuron.states.sharding import ORDINARY
from collage_neuron.trace.calls import MEETS, NUMBER, Call, Uncompiled, Written
from collage_neuron.trace.placeholders import STEP, WAITS, give, placeholder, present, stands_for, waits, withdraw

if TYPE_CHECKING:
    from collage_neuron.trace.structure_guard import CallSequence
    from collage_neuron.trace.tensor_places import TensorPlaces

aten = torch.ops.aten

Name = tuple[int, str]
"""The number of a parameter, and the name of a state."""


def state(name: Name) -> None:
    """Stands for an operation: a state meets values that wait."""


def written(
    x: torch.Tensor,
    name: Name | None,
    device: torch.device,
    is_like_value: bool,
    expected: Call | None = None,
    may_be_narrow: bool = False,
) -> tuple[Any, Written, list[float]]:
    """The operation that made a tensor of the state with a name, how its call is written, and the numbers of that.

    One element is a number of the step, unless a value is of that shape: of a 0-d parameter it may be one.

    Raises:
        Uncompiled: it is neither a state nor made of one number, or something else has its memory.
    """
    if x.dtype != torch.float32 and not (may_be_narrow and name is not None and x.dtype == torch.bfloat16):
        raise Uncompiled(f"a tensor of {x.dtype} is neither a parameter, a gradient nor a state in fp32")
    if not _may_wait(x, device, name is not None):
        raise Uncompiled(f"a tensor of shape {list(x.shape)} is neither a parameter, a gradient nor a state")
    if name is not None:
        of_state: Written = [(tuple, name)]
        # One that was a state in the last step is not asked for its values: comparing them takes a pass over memory.
        is_expected = expected is not None and expected.func is state and expected.args == of_state
        if is_expected or x.numel() == 1 or not x.is_cpu or x.dtype != torch.float32:
            return state, of_state, []
    value = float(x.reshape(-1)[0]) if x.numel() else 0.0
    if bool((x == value).all()) and (value or math.copysign(1.0, value) > 0):  # -0.0 is no constant of a call
        sizes = [(int, n) for n in x.shape]
        if x.numel() == 1 and value and not is_like_value:  # one that was computed, and is another one in each step
            return aten.full.default, [sizes, NUMBER], [value]
        return aten.full.default, [sizes, (float, value)], []
    if name is not None:
        return state, [(tuple, name)], []
    raise Uncompiled(f"a tensor of shape {list(x.shape)} has values, and is no state")


def _may_wait(x: torch.Tensor, device: torch.device, is_state: bool) -> bool:
    """Returns True for a tensor of which nothing else has the memory: no view, and no array of numpy's."""
    if type(x) not in ORDINARY or x.device != device:
        return False
    if x.layout is not torch.strided or not x.is_contiguous() or x.requires_grad or x.is_inference():
        return False
    # XLA would have to wait for the value, which of a state nobody needs.
    return torch_privates.holders(x) <= 1 and (x.untyped_storage().resizable() if x.is_cpu else is_state)


class Returned(torch.Tensor):
    """What has the value of a tensor that waits now.

    torch returns it from the operation in which they were exchanged, if that has an `out`. It stands for the other one.
    """

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function with what it stands for."""
        return func(*stood_for(args), **dict(zip(kwargs or {}, stood_for((kwargs or {}).values()), strict=True)))


def stands_for_another(x: object) -> bool:
    """Returns True for what torch may have returned for a tensor."""
    return type(x) is Returned or stands_for(x)


def stood_for(given: Any) -> list[Any]:
    """Arguments, with the tensors that they stand for."""
    return [_stood_for(x) for x in given]


def _stood_for(x: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return stood_for(x)
    if type(x) is not Returned:
        return x
    step = STEP.get()
    while step is not None:
        if (found := step.original(x)) is not None:
            return found
        step = step.outer
    raise RuntimeError(WAITS)


def exchanged(x: torch.Tensor) -> torch.Tensor:
    """Makes a tensor a placeholder; what has its value."""
    other = placeholder(x.shape, x.stride(), torch.float32, x.device)
    exchange(x, other)
    return other


def exchange_all(states: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """The same of states that are like those of the last step, with the `others` of that; False if some may not wait.

    Then nothing is done.
    """
    # What else `_may_wait` asks for they have still: it is part of the structure of the step.
    if not (all(map(waits, others)) and torch_privates.are_held_once(states)):
        return False
    if not all(x.untyped_storage().resizable() for x in states):
        return False
    pairs = list(zip(states, others, strict=True))
    torch_privates.exchange_all(pairs)
    present(pairs)
    for other in others:
        other.__class__ = Returned
    return True


def exchange(x: torch.Tensor, other: torch.Tensor) -> None:
    """Makes it wait, with what is inside another one."""
    torch_privates.exchange(x, other)
    present([(x, other)])
    other.__class__ = Returned


def copied(other: torch.Tensor) -> torch.Tensor:
    """A copy of what has the value of a tensor that waits."""
    return value_in(other).to(torch.float32, copy=True)


def value_in(other: torch.Tensor) -> torch.Tensor:
    """What has that value, as a tensor of torch's own class."""
    other.__class__ = torch.Tensor
    found = other.detach()
    other.__class__ = Returned
    return found


def give_back(x: torch.Tensor, other: torch.Tensor) -> None:
    """Gives it its value, in a step that is computed."""
    other.__class__ = torch.Tensor
    give(x, other.float())


def exchange_back(x: torch.Tensor, other: torch.Tensor) -> None:
    """Gives it its value again."""
    other.__class__ = torch.Tensor
    withdraw([(x, other)])
    torch_privates.exchange(x, other)


class Adopted:
    """The tensors with values that have met values that wait, in one step."""

    def __init__(
        self,
        places: TensorPlaces,
        course: CallSequence,
        state_of: Callable[[torch.Tensor], Name | None],
    ) -> None:
        """`state_of` says which state a tensor is."""
        self._places, self._course, self._state_of = places, course, state_of
        self.others: dict[int, torch.Tensor] = {}
        """What is inside them, with their own values, by their places."""
        self.has_any = False
        """True if there were some."""
        self._states = list[Call]()
        """The calls by which states are known that were."""
        self.just_now: list[int] = []
        """The ids of those of the operation that is under way: torch returns what was inside when it began."""
        self._like_values: set[torch.Size] | None = None
        """The shapes of the values that the step begins with."""

    def meet(self, x: torch.Tensor, may_be_narrow: bool = False) -> int:
        """Makes a tensor wait that has a value; its place. One that may be narrow is fp32 from now on if it is bf16."""
        tensors = self._places.tensors
        if self._like_values is None:
            self._like_values = {t.shape for t in tensors[: self._places.first]}
        name, is_like_value = self._state_of(x), x.shape in self._like_values
        func, own, numbers = written(x, name, tensors[0].device, is_like_value, self._course.expected, may_be_narrow)
        makes = [Geometry(tuple(x.shape), x.stride(), torch.float32, 0)]
        call = self._course.known(func, own, {}) or Call(func, MEETS, own, {}, makes, self._places.next())
        self._places.note(call, numbers)
        self.others[call.first] = exchanged(x)
        self._states += [call] if func is state else []
        self.just_now.append(id(x))
        self.has_any = True
        self._places.put(call.first, [x])
        return call.first

    def meet_again(self, states: Iterable[torch.Tensor], may_be_narrow: bool = False) -> None:
        """Makes states wait that do not yet, in so far as they can."""
        for x in states:
            if self._places.of(id(x)) is None:
                with suppress(Uncompiled):
                    self.meet(x, may_be_narrow)

    def meet_all(self, names: Sequence[Name], states: Sequence[torch.Tensor]) -> bool:
        """Makes the states with these names wait that have met values in the last step, which began with the same.

        False, and nothing is done, if that step has not begun with their calls.
        """
        calls, first = self._course.whole[: len(names)], self._places.first
        if [call.args for call in calls] != [[(tuple, name)] for name in names] or not self._places.has_spare:
            return False
        if any(call.func is not state for call in calls):
            return False
        if not exchange_all(states, self._places.tensors[first : first + len(states)]):
            return False
        others = self._places.replace(first, states)  # what is inside the states was inside the others
        self.others, self._states, self.has_any = dict(enumerate(others, first)), calls, True
        self._course.at += len(states)
        return True

    def meet_states(
        self, p: torch.Tensor, states: Mapping[Any, Any], as_made: Collection[str], only_narrow: bool
    ) -> None:
        """Makes the states of a parameter wait that are not in words, before the step.

        Those in bf16 are of training in bf16, but for those that a step has `as_made`, and are fp32 afterwards.
        """
        # On XLA an operation gets another object than the state has, so it would not be known when it meets values.
        # What is done with a state in bf16 alone, before it meets anything, would be done in bf16; and one in fp32
        # of which nobody knew the format when it was loaded, would not show what it is for.
        tensors = {name: x for name, x in states.items() if isinstance(x, torch.Tensor)}
        found = (
            x
            for name, x in tensors.items()
            if (x.dim() > 0 and x.shape == p.shape and x.dtype == torch.float32)
            or (x.shape != p.shape and not (name in as_made if x.dtype == torch.bfloat16 else only_narrow))
        )
        self.meet_again(found, may_be_narrow=True)

    def compute(self, place: int) -> None:
        """Gives one its own value, in a step that is computed."""
        give_back(self._places.tensors[place], self.others.pop(place))

    def copy_into(self, into: Mapping[int, torch.Tensor]) -> None:
        """Copies the values of some into tensors, by their places."""
        torch_privates.copy_each([*into.values()], [value_in(self.others[i]) for i in into])

    def undo(self) -> None:
        """All have their own values again."""
        for place, other in self.others.items():
            exchange_back(self._places.tensors[place], other)
            self._places.tensors[place] = other  # a placeholder as before
        self.others = {}

    def exchange_states(self, exchange: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Exchanges what is inside states: their values are there while updates are launched."""
        for call in self._states:
            exchange(self._places.tensors[call.first], self.others[call.first])

    def states(self) -> Iterator[tuple[Name, torch.Tensor]]:
        """The states, with their names."""
        return ((call.args[0][1], self._places.tensors[call.first]) for call in self._states)

    def original(self, returned: torch.Tensor) -> torch.Tensor | None:
        """The tensor for which torch has returned another object."""
        return next((self._places.tensors[place] for place, t in self.others.items() if t is returned), None)
