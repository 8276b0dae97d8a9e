"""A tape: how the numbers of a step were computed from the settings and counts it started with, to compute them again.

Given: `step_size = lr / (1 - beta1**step_t.item())`, with lr, beta1 and the count `step_t` on the tape
Result: `item(i2)`, `pow(i1, v0)`, `rsub(v1, 1)`, `truediv(i0, v2)`, which runs again on the next step's numbers

A number on the tape is a `Traced`, and code computes with it as with a float. Comparisons are noted with their results:
`played_again` returns None if one has another result now. Code that takes the number where the tape cannot follow it
(`float(x)`, `math.sqrt(x)`, `f"{x}"`, a hash) makes the tape `lost`, so that nobody plays it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.trace import symbolic_floats


class Lost(UnsupportedUpdate):
    """Code took a number to where the tape cannot follow it."""


class _Played(NamedTuple):
    """One computation; numbers are known by their places on the tape."""

    function: Callable[..., Any]
    args: tuple[int, ...]
    into: int
    """Where on the tape the result goes; of one that is written in place, behind the end."""
    told: bool | None
    """The result of a comparison, which has to be the same again; None for all else."""


class Tape:
    """The computations of one step on numbers and 0-d tensors."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        """Inputs, constants and results as they are in this step."""
        self.inputs: list[int] = []
        self.inputs_given: list[Any] = []
        """The inputs as they were given; code may have written to the tensors since."""
        self.lost = False
        self._constants: dict[int, Any] = {}
        self._played: list[_Played] = []
        self._tensors: dict[int, tuple[torch.Tensor, int]] = {}
        """0-d tensors on the tape, by their ids."""

    def give(self, value: Any) -> Any:
        """Puts an input on the tape: a float, for which code gets the result, or a 0-d tensor, which code may write."""
        place = self._place(value)
        self.inputs.append(place)
        # A copy: code counts in place, and the program is tried with what it began with.
        self.inputs_given.append(value.clone() if isinstance(value, torch.Tensor) else value)
        if isinstance(value, torch.Tensor):
            self._tensors[id(value)] = value, place
            return value
        return Traced(Node(self, place))

    def constant(self, value: Any) -> int:
        """The place of a number that is in the code."""
        place = self._place(value)
        # A copy, as of an input: code may go on to count in what it has made.
        self._constants[place] = value.clone() if isinstance(value, torch.Tensor) else value
        return place

    def place_of(self, x: Any) -> int | None:
        """The place of a number or 0-d tensor on the tape; None if it is not there."""
        if isinstance(x, torch.SymFloat):
            node = x.node
            return node.place if isinstance(node, Node) and node.tape is self else self.lose()
        return self._tensors[id(x)][1] if id(x) in self._tensors else None

    def apply(self, function: Callable[..., Any], *args: Any) -> Any:
        """Calls a function of numbers and 0-d tensors, some on the tape; its result is there too."""
        places = [self.given(x) for x in args]
        with torch_privates.unseen():  # or the mode that has called this would put it on the tape again
            value = function(*(self.values[i] for i in places))
        if isinstance(value, torch.Tensor):
            return self._tensor(function, places, value)
        if function in _TELL:
            self._note(function, places, value, bool(value))
            return bool(value)
        if not isinstance(value, float):
            self.lose()
        return Traced(Node(self, self._note(function, places, value, None)))

    def lose(self) -> Any:
        """Raises Lost; if code catches that, the tape is `lost` still."""
        self.lost = True
        raise Lost("a number of the step was taken to where it cannot be followed")

    def given(self, x: Any) -> int:
        """The place of what a computation is given, or leaves: of a constant too."""
        place = self.place_of(x)
        if place is None:  # what depends on a number of the tape is there too, so this is the same in each step
            return self.constant(x) if is_number(x) else self.lose()
        return place

    def _tensor(self, function: Callable[..., Any], places: list[int], value: torch.Tensor) -> torch.Tensor:
        known = self._tensors.get(id(value))
        if value.dim() or value.device.type != "cpu":
            self.lose()
        if known is not None:  # written in place: what is noted happens in this order again
            self._played.append(_Played(function, tuple(places), -1, None))
            return value
        self._tensors[id(value)] = value, self._note(function, places, value, None)
        return value

    def _note(self, function: Callable[..., Any], places: list[int], value: Any, told: bool | None) -> int:
        place = self._place(value)
        self._played.append(_Played(function, tuple(places), place, told))
        return place

    def _place(self, value: Any) -> int:
        self.values.append(value)
        return len(self.values) - 1

    def played(self) -> Program:
        """What can be played again."""
        begin = [self._constants.get(place) for place in range(len(self.values))]
        tensors = [place for place, x in enumerate(begin) if isinstance(x, torch.Tensor)]
        return Program(tuple(self.inputs), [*begin, None], tensors, tuple(self._played))


def is_number(x: Any) -> bool:
    """Returns True for a number of Python's, or a 0-d tensor on the host."""
    return isinstance(x, (bool, int, float)) or (type(x) is torch.Tensor and not x.dim() and x.is_cpu)


class Program(NamedTuple):
    """The computations on a tape."""

    inputs: tuple[int, ...]
    constants: list[Any]
    """The constants in their places, None in all others, and a place behind the end."""
    tensors: list[int]
    """The places of constants that are tensors."""
    played: tuple[_Played, ...]


class Node(symbolic_floats.Node):
    """A place on a tape."""

    def __init__(self, tape: Tape, place: int) -> None:
        self.tape, self.place = tape, place

    def needs_value(self, what: str) -> Any:
        """Loses the tape."""
        self.tape.lose()


def _forward(function: Callable[..., Any]) -> Any:
    def method(self: Any, *others: Any) -> Any:
        if any(isinstance(x, torch.Tensor) for x in others):
            return NotImplemented  # the tensor's own method is next, which torch's modes see
        return self.node.tape.apply(function, self, *others)

    return method


def _reflected(function: Callable[..., Any]) -> Any:
    def method(self: Any, other: Any) -> Any:
        return NotImplemented if isinstance(other, torch.Tensor) else self.node.tape.apply(function, other, self)

    return method


class Traced(symbolic_floats.Symbolic):
    """A float on a tape."""


_TWO = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_ONE = ("neg", "pos", "abs")
_COMPARED = ("lt", "le", "gt", "ge", "eq", "ne")
_NOT_FOLLOWED = ("float", "int", "index", "complex", "round", "trunc", "floor", "ceil", "divmod", "rdivmod", "hash",
                 "str", "repr", "format", "reduce_ex", "copy", "deepcopy")  # fmt: skip
# Operations whose results are True or False, and have to be the same again: code branches by them.
_TELL = frozenset({operator.truth, *(getattr(operator, name) for name in _COMPARED)})
for _name in (*_TWO, *_ONE, *_COMPARED):
    setattr(Traced, f"__{_name}__", _forward(getattr(operator, _name)))
for _name in _TWO:
    setattr(Traced, f"__r{_name}__", _reflected(getattr(operator, _name)))
symbolic_floats.take_value_in(Traced, _NOT_FOLLOWED)
Traced.__bool__ = _forward(operator.truth)  # type: ignore[method-assign]
