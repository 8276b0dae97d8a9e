"""The loop that a device runs, and its induction register: `nl.fori_loop` of the newer dialect.

Source: the reference of `nl.fori_loop` and the migration guide of SDK 2.32. The body is a function of the register,
which serves as a `scalar_offset` and for nothing else; it returns nothing; a tensor made in it does not leave it.

The older dialect has indices instead: affine expressions over `nl.arange`, and loop variables: sums, differences,
products with an int. Comparing one makes a mask in the real dialect, which the stand-in does not have, and control flow
on one is an error there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import zip_longest
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


def _compared(self: Any, other: Any) -> bool:
    fail("an index is compared: masks, and control flow that depends on an index, are not in the stand-in")


@dataclass(frozen=True, eq=False)
class Index:
    """offset + sum of strides[k] * i_k, for i_k below shape[k]."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _compared
    __hash__ = None  # type: ignore[assignment]

    @property
    def first(self) -> int:
        """The smallest value."""
        return self.offset + sum(min(0, s * (n - 1)) for s, n in zip(self.strides, self.shape, strict=True))

    @property
    def last(self) -> int:
        """The largest value."""
        return self.offset + sum(max(0, s * (n - 1)) for s, n in zip(self.strides, self.shape, strict=True))

    def __getitem__(self, keys: Any) -> Index:
        keys = keys if isinstance(keys, tuple) else (keys,)
        require(all(k is None or k == slice(None) for k in keys), f"an index is indexed with None and `:`, got {keys}")
        require(sum(k is not None for k in keys) == len(self.shape), f"{keys} for an index of shape {self.shape}")
        dims = iter(zip(self.shape, self.strides, strict=True))
        made = [(1, 0) if k is None else next(dims) for k in keys]
        return Index(self.offset, tuple(n for n, _ in made), tuple(s for _, s in made))

    def __add__(self, other: Any) -> Index:
        if isinstance(other, int):
            return Index(self.offset + int(other), self.shape, self.strides)
        require(isinstance(other, Index), f"an index plus {other!r} is not affine")
        pairs = list(zip_longest(self._dims(), other._dims(), fillvalue=(1, 0)))[::-1]
        fit = all(a == b or 1 in (a, b) for (a, _), (b, _) in pairs)
        require(fit, f"indices of shapes {self.shape} and {other.shape} do not broadcast")
        shape = tuple(max(a, b) for (a, _), (b, _) in pairs)
        return Index(self.offset + other.offset, shape, tuple(s + t for (_, s), (_, t) in pairs))

    def __mul__(self, other: Any) -> Index:
        require(isinstance(other, int), f"an index times {other!r} is not affine")
        return Index(self.offset * int(other), self.shape, tuple(s * int(other) for s in self.strides))

    def __sub__(self, other: Any) -> Index:
        return self.__add__(other * -1)

    def _dims(self) -> list[tuple[int, int]]:
        return list(zip(self.shape, self.strides, strict=True))[::-1]

    __radd__, __rmul__ = __add__, __mul__


def arange(*args: int) -> Index:
    """0 to stop, or start to stop, as an index of one dimension."""
    start, stop = (0, *args) if len(args) == 1 else args
    require(start < stop, f"nl.arange({start}, {stop}) is empty")
    return Index(int(start), (int(stop) - int(start),), (1,))


class LoopIndex(int):
    """A loop variable: an int while the body is traced once, so that it cannot decide anything."""

    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __bool__ = _compared  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __add__(self, other: Any) -> Any:
        return LoopIndex(int(self) + int(other)) if isinstance(other, int) else other + int(self)

    def __mul__(self, other: Any) -> Any:
        return LoopIndex(int(self) * int(other)) if isinstance(other, int) else other * int(self)

    def __sub__(self, other: Any) -> Any:
        return self + other * -1

    def __rsub__(self, other: Any) -> Any:
        return self * -1 + other

    def _not_affine(self, *_: Any) -> Any:
        fail("a loop variable is used in an expression that is not affine")

    __radd__, __rmul__ = __add__, __mul__
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __pow__ = __rpow__ = _not_affine


@dataclass
class Loops:
    """The iterators of the dialect, and how deep in them the kernel is."""

    machine: Any
    """A `Machine`."""
    depth: int = field(default=0)

    def affine(self, *args: int, **kwargs: Any) -> Iterator[LoopIndex]:
        """Iterations in any order: here the last one first, so that a kernel that needs the order fails."""
        require(not kwargs, "nl.affine_range has no documented argument by name")
        return self._run(reversed(range(*map(int, args))))

    def _run(self, values: Iterator[int]) -> Iterator[LoopIndex]:
        self.depth += 1
        try:
            with self.machine.trace.nest.repeated(values) as repeated:
                for i in repeated:
                    yield LoopIndex(i)
        finally:
            self.depth -= 1
