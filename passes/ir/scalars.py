"""Host scalars: the numbers of an update, computed each step in double on the host and rounded once.

Every number that enters a captured update is a numbered slot (the learning rate, a bias correction, a beta). The expand
pass combines slots (`1 - s2`, `-s6`) and requests results as fp32, or as the high or low bf16 word. The list of
requests is a `ScalarProgram`, which turns the slots of a step into the entries of the one fp32 vector that goes to the
device.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from collage_neuron.passes.ir.values import Fp32, Reader, Value

Number = int | float


@dataclass(frozen=True)
class Scalar(Value):
    """A double known on the host when the update runs: a slot, a constant, or an operation on two of them.

    Or one of `DRAWING`, by its name, on which random bits depend.
    """

    op: str
    args: tuple[Scalar | Number, ...]

    @staticmethod
    def slot(index: int) -> Scalar:
        """The number that entered the captured update at place `index`."""
        return Scalar("slot", (index,))

    @staticmethod
    def constant(value: float) -> Scalar:
        """A number that is part of the update."""
        return Scalar("*", (value, 1))

    def value(self, slots: Sequence[float], drawing: Sequence[float] = ()) -> float:
        """The double, given the slots of this step, and `DRAWING` if the update draws random bits."""
        if self.op == "slot":
            return slots[int(self.args[0])]  # type: ignore[arg-type]  # a number
        if self.op in DRAWING:
            return drawing[DRAWING.index(self.op)]
        a, b = (x.value(slots, drawing) if isinstance(x, Scalar) else x for x in self.args)
        return _OPERATIONS[self.op](a, b)

    def constants(self) -> Iterator[Number]:
        """The numbers that are part of the update."""
        for x in self.args if self.op in _OPERATIONS else ():
            yield from x.constants() if isinstance(x, Scalar) else (x,)

    def read(self, a: Reader) -> Fp32:
        return a.scalar("fp32", self)

    def words(self, a: Reader) -> tuple[Fp32, Fp32]:
        return a.scalar("hi", self), a.scalar("lo", self)

    @property
    def host(self) -> Scalar:
        return self

    def __rsub__(self, other: Number) -> Scalar:
        return Scalar("-", (other, self))

    def __sub__(self, other: Number) -> Scalar:
        return Scalar("-", (self, other))

    def __rtruediv__(self, other: Number) -> Scalar:
        return Scalar("/", (other, self))

    def __str__(self) -> str:
        if self.op in DRAWING:
            return self.op
        if self.op == "slot":
            return f"s{self.args[0]}"
        return f"({self.args[0]} {self.op} {self.args[1]})"


DRAWING = ("seed", "step", "parameter", "first")
"""Names of the numbers that random bits depend on (`passes/rewrite/round_and_store.py`): given beside the slots."""


def _divide(a: float, b: float) -> float:
    return a / b if b else a * math.copysign(math.inf, b)  # as for tensors, division by zero is not an error


_OPERATIONS: dict[str, Callable[[float, float], float]] = {"-": operator.sub, "*": operator.mul, "/": _divide}


def round_double(x: float, bits: int) -> float:
    """The double `x` rounded to `bits` significant bits, to nearest even (normal range of the target)."""
    if not math.isfinite(x):
        return x
    # In double, so that a number is rounded once: by way of fp32 it would be rounded twice.
    mantissa, exponent = math.frexp(x)
    # Scaled so that the last of `bits` significant bits counts 1; Python's `round` rounds ties to even.
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


def high_word(x: float) -> float:
    """The bf16 nearest to the double `x`."""
    return round_double(x, 8)


def low_word(x: float) -> float:
    """The bf16 nearest to `x - high_word(x)`."""
    return round_double(x - high_word(x), 8)


def upper16(x: float) -> float:
    """The upper half of a 32-bit integer."""
    return float(int(x) >> 16 & 0xFFFF)


def lower16(x: float) -> float:
    """The lower half of a 32-bit integer."""
    return float(int(x) & 0xFFFF)


FORMS = {"fp32": lambda x: x, "hi": high_word, "lo": low_word, "upper16": upper16, "lower16": lower16}
"""How an entry of the vector is made of its double; `fp32` is rounded when the vector becomes a tensor."""


class _Flat:
    """Scalars as one list of operations, each once: nothing is called for them but the operations."""

    def __init__(self, entries: Sequence[tuple[str, Scalar]], slots: int, drawing: int) -> None:
        self.given = slots, drawing
        numbers = {repr(x): x for _, scalar in entries for x in scalar.constants()}  # as text: -0.0 is not 0.0
        self._constants = list(numbers.values())
        self._operations: list[tuple[Callable[[float, float], float], int, int]] = []
        self._places: dict[Any, int] = {text: slots + drawing + i for i, text in enumerate(numbers)}
        self.results = [(None if form == "fp32" else FORMS[form], self._place(scalar)) for form, scalar in entries]

    def _place(self, x: Scalar | Number) -> int:
        """Where the value of `x` is, among the numbers that are given, the constants and the results."""
        if not isinstance(x, Scalar):
            return self._places[repr(x)]
        if x.op == "slot":
            return int(x.args[0])  # type: ignore[arg-type]  # a number
        if x.op in DRAWING:
            return self.given[0] + DRAWING.index(x.op)
        a, b = map(self._place, x.args)
        if (key := (x.op, a, b)) not in self._places:
            self._places[key] = sum(self.given) + len(self._constants) + len(self._operations)
            self._operations.append((_OPERATIONS[x.op], a, b))
        return self._places[key]

    def run(self, slots: Sequence[float], drawing: Sequence[float]) -> list[float]:
        """The values of the entries."""
        values = [*slots, *drawing, *self._constants]
        for operation, a, b in self._operations:
            values.append(operation(values[a], values[b]))
        return [values[at] if form is None else form(values[at]) for form, at in self.results]


@dataclass
class ScalarProgram:
    """The entries of the scalar vector, in order: which scalar, in which form."""

    entries: list[tuple[str, Scalar]] = field(default_factory=list)
    _flat: _Flat | None = field(default=None, compare=False, repr=False)
    """The entries of the last run."""

    def index(self, form: str, scalar: Scalar) -> int:
        """The entry that holds `scalar` in `form`, appended if it is new."""
        entry = (form, scalar)
        if entry not in self.entries:  # equal scalars share an entry, however often passes ask for them
            self.entries.append(entry)
        return self.entries.index(entry)

    def run(self, slots: Sequence[float], drawing: Sequence[float] = ()) -> list[float]:
        """The values of the entries for the slots of one step, and for `DRAWING` if it draws random bits."""
        flat, given = self._flat, (len(slots), len(drawing))
        # Made anew if passes have added entries since, or the update has begun to draw.
        if flat is None or len(flat.results) != len(self.entries) or flat.given != given:
            flat = self._flat = _Flat(self.entries, *given)
        return flat.run(slots, drawing)

    def __str__(self) -> str:
        return "\n".join(f"c{i} = {form}({scalar})" for i, (form, scalar) in enumerate(self.entries))


def read_numbers(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The values of 0-d tensors: on a device in one call if they are of one type, since each call waits for it."""
    if not all(map(attrgetter("is_cpu"), tensors)) and len({(t.dtype, t.device) for t in tensors}) == 1:
        numbers: list[Any] = torch.stack([*tensors]).tolist()
        return numbers
    return list(map(torch.Tensor.item, tensors))
