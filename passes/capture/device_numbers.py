"""What `.item()` gives while a step is recorded: a number without a value, with which Python can only compute.

Given: `p.add_(u, alpha=-max(1e-3, p.norm().item()) * rate)`
Result: `norm`, `clone` of it, `mul` of that and the rate, `neg`, and `add_` with that number, all on the device

Arithmetic with it (`+ - * / **`, `abs`) is arithmetic of fp32 numbers on the device, each operation rounded once, where
Python has doubles; a division by zero is infinite or NaN, and no error. So that roundings stay small, and ranges do not
matter, sums are of numbers without one, and of two factors one is between 2**-32 and 2**32. What needs its value
(`if x > 1`, `x == y`, `float(x)`, `math.sqrt(x)`, a text, a hash) raises UnsupportedUpdate, and so such a step runs as
written. Only `max`, `min` and `sorted`, which return one of the numbers, may ask how it compares. They get an answer,
and the step is recorded again with the other one (`outcomes`).
"""

from __future__ import annotations

import dis
import math
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch

from collage_neuron.passes.capture import symbolic
from collage_neuron.passes.capture.handlers import is_caught
from collage_neuron.passes.capture.number_table import Made, Numbers

aten = torch.ops.aten


class Reading(NamedTuple):
    """What the numbers that one recording reads belong to."""

    numbers: Numbers
    refuse: Callable[[str], Any]
    """Raises UnsupportedUpdate; given for what a value was needed."""
    ask: Callable[[Made], bool]
    """Answers how a comparison comes out."""


class Node(symbolic.Node):
    """A number of the table, in one recording."""

    def __init__(self, reading: Reading, made: Made) -> None:
        self.reading, self.made = reading, made

    def needs_value(self, what: str) -> Any:
        """Refuses the step."""
        self.reading.refuse(what)


class DeviceNumber(symbolic.Symbolic):
    """A number that a step reads from a tensor."""


_SELECT = frozenset({"max", "min", "sorted"})
"""Names of functions that compare numbers and return one of them."""


class Comparison:
    """The result of comparing such a number, which only `max` and the like may ask for, and only of their own."""

    def __init__(self, reading: Reading, made: Made, frame: FrameType) -> None:
        self._reading, self._made, self._is_theirs = reading, made, _selects(frame)

    def __bool__(self) -> bool:
        if not (self._is_theirs and _selects(sys._getframe(1))):
            self._reading.refuse("a branch")
        return self._reading.ask(self._made)

    def _refuse(self, *_: Any) -> Any:
        return self._reading.refuse("a comparison as a value")

    __eq__ = __hash__ = __index__ = __repr__ = __str__ = __format__ = __and__ = __or__ = _refuse


def _selects(frame: FrameType) -> bool:
    """Returns True in the frame of Python code that calls `max` or the like: they are written in C, and have none.

    `x > y` is at another instruction there, also where `all` asks for it later.
    """
    is_call = dis.opname[frame.f_code.co_code[frame.f_lasti]].startswith(("CALL", "PRECALL"))
    return is_call and not _SELECT.isdisjoint(frame.f_code.co_names)


def is_device_number(x: object) -> bool:
    """Returns True for a number that a step has read from a tensor, in the form in which code or torch has it."""
    return isinstance(x, torch.SymFloat) and isinstance(x.node, Node)


def as_own(x: Any) -> Any:
    """A number as code gets it: torch makes its own symbolic number of what an operation returns."""
    return DeviceNumber(x.node) if is_device_number(x) else x


def _named(reading: Reading, x: Any) -> Made | None:
    """What a number is called in the table; None for what is no number."""
    if is_device_number(x):
        made: Made = x.node.made if x.node.reading is reading else reading.refuse("a number of another step")
        return made
    if not isinstance(x, (int, float)):
        return None
    if x and math.isfinite(x) and not 2.0**-126 <= abs(x) < 2.0**128:
        reading.refuse(f"arithmetic with {x:g}, which is no number of fp32's")
    return reading.numbers.host(x)


def _number(x: DeviceNumber, target: Any, *args: Any) -> DeviceNumber:
    reading = x.node.reading
    return DeviceNumber(Node(reading, reading.numbers.add(target, *args)))


def _with_another(target: Any, is_reflected: bool = False) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        y = _named(self.node.reading, other)
        if y is None:
            return NotImplemented  # a tensor's own method is next, which torch's modes see
        if target is aten.div.Tensor and is_caught(sys._getframe(1)):
            return self.node.reading.refuse("a division by it in a `try`, where Python raises if it is zero")
        if target in _SUMS and any(map(self.node.reading.numbers.is_rounded, (self.node.made, y))):
            return self.node.reading.refuse("a sum of what was computed, of which fp32 may cancel more than doubles")
        if target not in _SUMS and all(map(self.node.reading.numbers.is_far, (self.node.made, y))):
            return self.node.reading.refuse("factors far from 1, between which it may leave fp32's range")
        return _number(self, target, *((y, self.node.made) if is_reflected else (self.node.made, y)))

    return method


def _alone(target: Any) -> Callable[[Any], Any]:
    return lambda self: _number(self, target, self.node.made)


_LARGEST = 4
"""Of the exponents of powers, the largest that is a part of programs."""


def _power(self: Any, exponent: Any) -> Any:
    if is_device_number(exponent) or not isinstance(exponent, (int, float)):
        return self.node.reading.refuse("a power with an exponent that is no constant")
    if is_caught(sys._getframe(1)):
        return self.node.reading.refuse("a power in a `try`, where Python may raise")
    if abs(exponent) > _LARGEST or 2 * exponent != int(2 * exponent):  # it is part of the program, and may be 1 / step
        return self.node.reading.refuse(f"the power {exponent:g}, which is no multiple of a half")
    return _number(self, aten.pow.Tensor_Scalar, self.node.made, exponent)


def _compared(target: Any) -> Callable[[Any, Any], Any]:
    def method(self: Any, other: Any) -> Any:
        y = _named(self.node.reading, other)
        if y is None:
            return NotImplemented
        reading = self.node.reading
        return Comparison(reading, reading.numbers.add(target, self.node.made, y), sys._getframe(1))

    return method


_TWO = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor, "truediv": aten.div.Tensor}
_SUMS = frozenset({aten.add.Tensor, aten.sub.Tensor})
_ONE = {"neg": aten.neg.default, "abs": aten.abs.default}
_COMPARED = {"lt": aten.lt.Tensor, "le": aten.le.Tensor, "gt": aten.gt.Tensor, "ge": aten.ge.Tensor}
_NEED_THE_VALUE = (
    "bool", "float", "int", "index", "complex", "round", "trunc", "floor", "ceil", "mod", "rmod", "floordiv",
    "rfloordiv", "divmod", "rdivmod", "rpow", "eq", "ne", "hash", "str", "repr", "format", "reduce_ex",
)  # fmt: skip
for _name, _target in _TWO.items():
    setattr(DeviceNumber, f"__{_name}__", _with_another(_target))
    setattr(DeviceNumber, f"__r{_name}__", _with_another(_target, is_reflected=True))
for _name, _target in _ONE.items():
    setattr(DeviceNumber, f"__{_name}__", _alone(_target))
for _name, _target in _COMPARED.items():
    setattr(DeviceNumber, f"__{_name}__", _compared(_target))
symbolic.take_value_in(DeviceNumber, _NEED_THE_VALUE)
for _name in ("pos", "copy", "deepcopy"):
    setattr(DeviceNumber, f"__{_name}__", lambda self, *_: self)
DeviceNumber.__pow__ = _power  # type: ignore[method-assign]
