"""Host scalars: the numbers of an update, computed each step in double on the host and rounded once.

Every number that enters a captured update is a numbered slot (the learning rate, a bias correction, a beta). The expand
pass combines slots (`1 - s2`, `-s6`) and requests results as fp32, or as the high or low bf16 word. The list of
requests is a `ScalarProgram`, which turns the slots of a step into the entries of the one fp32 vector that goes to the
device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

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
        (found,) = _function(f"{self.source()},")(slots, drawing)
        return found

    def source(self) -> str:
        """The double as an expression of Python."""
        if self.op == "slot":
            return f"slots[{self.args[0]}]"
        if self.op in DRAWING:
            return f"drawing[{DRAWING.index(self.op)}]"
        a, b = (x.source() if isinstance(x, Scalar) else f"({float(x)!r})" for x in self.args)
        return f"_divide({a}, {b})" if self.op == "/" else f"({a} {self.op} {b})"

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


@cache
def _function(results: str) -> Callable[[Sequence[float], Sequence[float]], tuple[float, ...]]:
    """The function of slots and of `DRAWING` that returns these expressions."""
    # Compiled, since every step runs it for each group: to walk over the scalars takes six times as long.
    known = {**FORMS, "_divide": _divide, "inf": math.inf, "nan": math.nan}
    made: Any = eval(f"lambda slots, drawing: ({results})", known)
    return made  # type: ignore[no-any-return]


@dataclass
class ScalarProgram:
    """The entries of the scalar vector, in order: which scalar, in which form."""

    entries: list[tuple[str, Scalar]] = field(default_factory=list)
    _compiled: Any = field(default=(0, lambda slots, drawing: ()), compare=False, repr=False)
    """How many entries were compiled, and their function."""

    def index(self, form: str, scalar: Scalar) -> int:
        """The entry that holds `scalar` in `form`, appended if it is new."""
        entry = (form, scalar)
        if entry not in self.entries:  # equal scalars share an entry, however often passes ask for them
            self.entries.append(entry)
        return self.entries.index(entry)

    def run(self, slots: Sequence[float], drawing: Sequence[float] = ()) -> list[float]:
        """The values of the entries for the slots of one step, and for `DRAWING` if it draws random bits."""
        if len(self.entries) != self._compiled[0]:  # passes have added some
            results = "".join(f"{form}({scalar.source()}), " for form, scalar in self.entries)
            self._compiled = len(self.entries), _function(results)
        return [*self._compiled[1](slots, drawing)]

    def __str__(self) -> str:
        return "\n".join(f"c{i} = {form}({scalar})" for i, (form, scalar) in enumerate(self.entries))
