"""The loop that a device runs, and its induction register: `nl.fori_loop` of the newer dialect.

Source: the reference of `nl.fori_loop` and the migration guide of SDK 2.32. The body is a function of the register,
which serves as a `scalar_offset` and for nothing else; it returns nothing; a tensor made in it does not leave it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from nki_standin.errors import fail, require


class Register:
    """The value of an iteration, which the device has and the kernel has not."""

    def __init__(self, value: int) -> None:
        self.value = value

    def _arithmetic(self, *_: Any) -> Any:
        fail("arithmetic on, or a decision by, the register of a compiled loop: it is a scalar_offset of `ap` only")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = __mod__ = __neg__ = _arithmetic
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = __int__ = __index__ = _arithmetic
    __hash__ = None  # type: ignore[assignment]


@dataclass
class Nest:
    """The loops that a kernel is in: which iterations are traced, and which iteration a tensor was made in."""

    repeats: list[bool] = field(default_factory=list)
    """For each loop that is no copies of its body: whether its body was traced before."""
    open: list[int] = field(default_factory=list)
    """The numbers of the compiled iterations that run."""
    count: int = 0
    turns: list[int] = field(default_factory=list)
    """Of each compiled loop that began, in order."""

    @property
    def traced(self) -> bool:
        """Whether what runs now is what a compiler reads: each loop is in its first iteration."""
        return not any(self.repeats)

    @contextmanager
    def repeated(self, values: Any) -> Iterator[Iterator[Any]]:
        """The values of a loop of which the body is traced once."""
        self.repeats.append(False)
        try:
            yield self._marked(values)
        finally:
            self.repeats.pop()

    def _marked(self, values: Any) -> Iterator[Any]:
        depth = len(self.repeats)
        for value in values:
            yield value
            self.repeats[depth - 1] = True

    def fori_loop(self, lower: int, upper: int, body_fun: Callable[[Any], Any], step: int = 1) -> None:
        """body_fun(i) for i from lower to upper, by step."""
        bounds = all(type(x) is int for x in (lower, upper, step))
        require(bounds and step > 0, f"nl.fori_loop({lower!r}, {upper!r}, step={step!r}): ints, and a positive step")
        require(lower >= 0 and upper <= 2**31, f"nl.fori_loop to {upper}: a register has 32 bits")
        self.turns.append(len(range(lower, upper, step)))
        with self.repeated(range(lower, upper, step)) as values:
            for value in values:
                self.count += 1
                self.open.append(self.count)
                returned = body_fun(Register(value))
                self.open.pop()
                require(returned is None, "the body of nl.fori_loop returns a value")
