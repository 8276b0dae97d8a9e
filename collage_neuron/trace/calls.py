"""A call of an operation that waits, written down so that the calls of two steps can be compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.functionalize.recorded_ops import (
    ALL_REDUCE,
    WAIT,
    Geometry,
    Place,
    functional_overload,
    is_constant_op,
    results_without_data,
)
from collage_neuron.torch_privates import schema
from collage_neuron.trace.placeholders import waits

NUMBER = None
"""How a call has a number: its value is in the vector of the step."""


WHOLE = "int"
"""How it has one that is an int: with booleans it makes another type than a float does."""


class HostNumber(NamedTuple):
    """How a call has a tensor of the host that is one number: its value is in the vector of the step too."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    def tensor(self, value: float) -> torch.Tensor:
        """Such a tensor."""
        return torch.full(self.shape, value, dtype=self.dtype, device="cpu")


Written = list[Any]
"""Arguments: a tensor is its place, a number is `NUMBER`, a list is a list, all else a tuple of its type and itself."""


class Uncompiled(Exception):
    """The calls of a step cannot be launched, for the reason given."""


class Rule(NamedTuple):
    """How an operation waits."""

    kind: str
    """What it returns: "new" tensors, a "view" of its first argument, or what it "writes", that argument itself."""
    is_constant: bool
    """True if its numbers belong to the operation."""
    is_list: bool = False
    """True if it returns several tensors, or writes several."""


# A view whose schema does not say so: torch makes one of a product of more than two dimensions (`x @ y`).
_VIEW = torch.ops.aten._unsafe_view.default


@cache
def rule_of(func: Any) -> Rule | None:
    """The rule of an operation; None if it has to run at once: it draws, or gives more than tensors of its own."""
    if not torch_privates.is_operation(func):  # one that takes functions
        return None
    s, told = schema(func), set(func.tags)
    returns = [str(r.type) for r in s.returns]
    # Draws have the order of the code; shapes that depend on values, and shapes that change, are no fixed geometry.
    at_once = {torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
    if func in (ALL_REDUCE, WAIT):
        return Rule("new", True)
    if func.namespace != "aten" or told & at_once:
        return None
    if written := torch_privates.written_arguments(func):
        in_place = [i for i, _ in written] == [0] and s.name.endswith("_") and returns in (["Tensor"], [])
        return Rule("writes", is_constant_op(func), not returns) if in_place else None
    if any(r.alias_info is not None for r in s.returns) or func is _VIEW:
        return Rule("view", True, returns != ["Tensor"]) if returns in (["Tensor"], ["List[Tensor]"]) else None
    if returns in (["Tensor"], ["Tensor[]"], ["List[Tensor]"]) or set(returns) == {"Tensor"}:
        return Rule("new", is_constant_op(func), returns != ["Tensor"])
    return None


@cache
def reads_values(func: Any) -> bool:
    """Returns True for an operation that gives Python's numbers, and changes nothing: `x.item()`, `torch.equal`."""
    if not torch_privates.is_operation(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    returns = {str(r.type) for r in schema(func).returns}
    changes = any(a.alias_info is not None for a in schema(func).arguments)
    return bool(returns) and returns <= {"number", "Scalar", "bool", "float", "int"} and not changes


@cache
def without_out(func: Any) -> Any:
    """The operation that returns what `func` writes to its `out`; None if there is none."""
    try:
        plain, written = functional_overload(func)
    except UnsupportedUpdate:
        return None
    return plain if written == "out" and rule_of(plain) is not None else None


NORMS = (torch.ops.aten.norm.Scalar, torch.ops.aten.norm.ScalarOpt_dim)
"""What `x.norm()` is on other devices than a CPU, where it is `linalg_vector_norm`."""


def vector_norm(x: Any, p: Any = 2, dim: Sequence[int] = (), keepdim: bool = False) -> tuple[Any, Any, dict[str, Any]]:
    """Returns the operation that a norm is on a CPU, with its arguments and its keywords."""
    own = [2 if p is None else p, list(dim) or None, keepdim]
    while own and own[-1] == (2, None, False)[len(own) - 1]:  # as torch writes it there
        own.pop()
    return torch.ops.aten.linalg_vector_norm.default, (x, *own), {}


SETS = Rule("writes", True)
"""That of `t.data = x`."""

MEETS = Rule("new", True)
"""That of a tensor with a value which meets values that wait (`trace/adopted_tensors.py`)."""


class Quick(NamedTuple):
    """What is called in a steady step, as it is looked at first."""

    asked: Any
    """The operation, or the name of the method."""
    places: list[int | None]
    """Those of its arguments; None for what is not a tensor that waits."""
    number: str | int | None
    """The name or the position of its only number, which is a float; None if it has none."""
    returns: int
    """The place of what it returns; -1 for its first argument."""
    calls: int = 1
    """How many operations it is: several have no number, which might be another one for each."""
    others: tuple[tuple[str | int, Any], ...] = ()
    """What is more than one float: the name or the position of each argument that has no place there, as written."""
    named: int = 0
    """How many keywords there are, with `others`."""

    def numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any], place: Callable[[int], int | None]) -> Any:
        """The numbers among the `others` of a call's arguments; None if it is another call."""
        if len(kwargs) != self.named:
            return None
        found: list[float] = []
        for where, how in self.others:
            x: Any = args[where] if isinstance(where, int) else kwargs.get(where, _MISSING)
            if how is NUMBER or how is WHOLE:
                if type(x) is not (float if how is NUMBER else int):
                    return None
                found.append(x)
            elif type(how) is HostNumber:
                if not (type(x) is torch.Tensor and x.is_cpu and (x.dtype, x.shape) == how and not x.requires_grad):
                    return None
                found.append(x.item())
            elif not _is_written(x, how, place):
                return None
        return found


_MISSING = object()


def _is_written(x: Any, how: Any, place: Callable[[int], int | None]) -> bool:
    """Returns True for an argument that a call has without numbers: a tensor, a constant, or a list of these."""
    if type(how) is int:
        return place(id(x)) == how
    if type(how) is list:
        is_alike = isinstance(x, (list, tuple)) and len(x) == len(how)
        return is_alike and all(_is_written(own, each, place) for own, each in zip(x, how, strict=True))
    return (type(x), x) == how and (x != 0.0 or math.copysign(1.0, x) > 0.0)  # no call has -0.0 (`_number`)


def quick(asked: Any, args: Written, kwargs: Mapping[str, Any], returns: int, calls: int = 1) -> Quick | None:
    """The first look at a call; None if it has to be compared in full."""
    others = [(i, x) for i, x in enumerate(args) if type(x) is not int] + list(kwargs.items())
    if not all(_is_quick(x, calls == 1) for _, x in others):
        return None
    places = [x if type(x) is int else None for x in args]
    if len(others) > 1 or any(x is not NUMBER for _, x in others):
        return Quick(asked, places, None, returns, calls, tuple(others), len(kwargs))
    return Quick(asked, places, others[0][0] if others else None, returns, calls)  # most: `again` has no loop for these


_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""The types of constants that are the same argument whenever they are equal, but for -0.0."""


def _is_quick(how: Any, has_numbers: bool) -> bool:
    """Returns True for what can be looked at first; it may be a number of the step, or not."""
    if type(how) is list:
        return all(_is_quick(each, has_numbers=False) for each in how)
    return has_numbers if is_number(how) else type(how) is int or how[0] in _CONSTANTS


class Call(NamedTuple):
    """One call."""

    func: Any
    rule: Rule
    args: Written
    kwargs: dict[str, Any]
    makes: list[Geometry] | None
    """The tensors that it returns; None if that is its argument."""
    first: int
    """The place of the first tensor that it returns, if that is not its argument."""
    method: Quick | None = None
    """The method that was called, and has made this call, and as many more as it says."""
    line: Place | None = None
    """The line of the code that has made it first."""

    @property
    def is_new_view(self) -> bool:
        """Returns True if torch does not allow the tensor that it returns to be returned once more, as a view."""
        # What `detach` returns is no view for torch, which calls it for each tensor that `torch.zeros` and others make.
        return self.rule.kind == "view" and self.func is not torch.ops.aten.detach.default

    @property
    def returns(self) -> range:
        """The places of the tensors that it returns."""
        return range(self.first, self.first + len(self.makes or ()))

    def places(self) -> Iterator[int]:
        """The places of its arguments."""
        return _places_in([*self.args, *self.kwargs.values()])

    def numbers(self) -> int:
        """How many numbers it has."""
        return _numbers_in([*self.args, *self.kwargs.values()])

    def is_written(self, args: Written, kwargs: Mapping[str, Any]) -> bool:
        """Returns True if a method has the call's arguments, in their order, which numbers have too; by name or not."""
        if args == self.args and list(kwargs.items()) == list(self.kwargs.items()):
            return True
        if self.kwargs or not torch_privates.is_operation(self.func):
            return False
        names = [x.name for x in schema(self.func).arguments[len(args) : len(args) + len(kwargs)]]
        return list(kwargs) == names and [*args, *kwargs.values()] == self.args

    def quick(self) -> Quick | None:
        """How it is looked at; of lists, and where torch has to make a view anew, in full."""
        if self.rule.is_list or self.is_new_view:
            return None
        return quick(self.func, self.args, self.kwargs, -1 if self.rule.kind == "writes" else self.first)


def _places_in(written: Sequence[Any]) -> Iterator[int]:
    for x in written:
        if type(x) is int:
            yield x
        elif type(x) is list:
            yield from _places_in(x)


def _numbers_in(written: Sequence[Any]) -> int:
    return sum(_numbers_in(x) if type(x) is list else is_number(x) for x in written)


def written_by(rule: Rule, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments to which an operation writes."""
    if rule.kind != "writes":
        return ()
    return args[0] if isinstance(args[0], (list, tuple)) else args[:1]


class Writing(NamedTuple):
    """Writes arguments down; their numbers are added to `numbers`."""

    numbers: list[float]
    is_constant: bool
    place: Callable[[int], int | None]
    """Knows tensors by their ids."""
    meet: Callable[[torch.Tensor], int]
    """Makes a tensor that is not known wait."""

    def each(self, given: Iterable[Any]) -> Written:
        """How a call has these arguments."""
        return list(map(self._one, given))

    def _one(self, x: Any) -> Any:
        place = self.place(id(x))
        if place is not None:
            return place
        if isinstance(x, (list, tuple)):
            return self._list(x)
        how: Any = NUMBER
        if isinstance(x, torch.Tensor):
            is_number = x.numel() == 1 and x.is_cpu and x.dtype != torch.bool and not (x.requires_grad or waits(x))
            if self.is_constant or not is_number:
                return self.meet(x)
            how, x = HostNumber(x.dtype, tuple(x.shape)), x.item()
        return _number(x, how, self.numbers, self.is_constant)

    def _list(self, x: Sequence[Any]) -> Written:
        # Those of a step over lists are long: tensors alone, and floats alone, take one pass in C.
        places = list(map(self.place, map(id, x)))
        if None not in places:
            return places
        if not self.is_constant and {float}.issuperset(map(type, x)):
            self.numbers.extend(x)
            return [NUMBER] * len(x)
        return self.each(x)


def _number(x: Any, how: Any, numbers: list[float], is_constant: bool) -> Any:
    """How a call has what is no tensor; `how`, if it is a number of the step."""
    if is_constant or type(x) not in (int, float):  # a bool is a constant, though it is an int
        if type(x) is float and x == 0.0 and math.copysign(1.0, x) < 0.0:  # it equals 0.0
            raise Uncompiled("a constant is -0.0")
        return type(x), x
    numbers.append(x)
    return WHOLE if how is NUMBER and type(x) is int else how


def arguments(
    written: Sequence[Any], tensors: Sequence[Any] | Mapping[int, Any], numbers: Iterator[float]
) -> list[Any]:
    """The arguments of a call, with tensors by their places, and the next numbers of a step."""
    return [
        tensors[x]
        if type(x) is int
        else next(numbers)
        if x is NUMBER or x is WHOLE
        else x.tensor(next(numbers))
        if type(x) is HostNumber
        else arguments(x, tensors, numbers)
        if type(x) is list
        else x[1]
        for x in written
    ]


def memories_of(calls: Iterable[Call], count: int) -> list[int]:
    """For each place the one whose memory it has: its own, or that of what it is a view of."""
    memories = list(range(count))
    for call in calls:
        for place in call.returns if call.rule.kind == "view" else ():
            memories[place] = memories[call.args[0]]
    return memories


def made_of_values(calls: Iterable[Call], memories: Sequence[int], first: int) -> set[int]:
    """The memory that depends on the first values, or on what a step meets; by the places that `memories_of` gives."""
    found = set(range(first))
    for call in calls:
        if call.rule is MEETS or not found.isdisjoint(memories[place] for place in call.places()):
            found.update(memories[place] for place in (*call.returns, *written_by(call.rule, call.args)))
    return found


def is_number(x: Any) -> bool:
    """Returns True if a call has a number of the vector there."""
    return x is NUMBER or x is WHOLE or type(x) is HostNumber


def geometries(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Geometry]:
    """The tensors that a call returns; Uncompiled if torch cannot tell without values, or would raise."""
    try:
        return results_without_data(func, args, kwargs)
    except (RuntimeError, NotImplementedError, TypeError) as error:  # if it is wrong, torch says so when it runs
        raise Uncompiled(str(error)) from error


def made_by(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Geometry]:
    """The same of a call whose results are new placeholders: Uncompiled for others than these can be."""
    made = geometries(func, args, kwargs)
    if others := {each.dtype for each in made} - {torch.float32, torch.bool}:
        raise Uncompiled(f"{func} makes a tensor of {others.pop()}: updates are compiled in fp32")
    return made


def users_of(calls: Sequence[Call], tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each tensor is referred to in C++ after calls: by itself, and by the views of its memory."""
    bases, expected = dict[int, int](), [1] * len(tensors)
    for call in calls:
        for place in call.returns if call.rule.kind == "view" else ():
            if torch_privates.base_of(tensors[place]) is not None:  # it is not detached
                # torch's autograd has what a view is of twice, and a view that it was made of once.
                of: Any = call.args[0]
                bases[place] = bases.get(of, of)
                expected[bases[place]] += 2
                expected[of] += of in bases
    return expected


def check_written(func: Any, rule: Rule, written: Written) -> None:
    """Raises Uncompiled if an operation writes to what does not wait."""
    if not all(type(x) is int for x in written_by(rule, written)):
        raise Uncompiled(f"{func} writes to a tensor that is neither a parameter, a gradient nor a state")
