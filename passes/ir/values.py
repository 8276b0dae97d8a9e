"""Values: the operands of an update that are not plain fp32 numbers, each with its own behaviour.

A plain value is one fp32 number per element as the expanded graph computes it: an `fx.Proxy`, an fp32 tensor, a Python
number. Any other operand is a `Value`: two words, a pending sum, a mask, a host scalar. No rule, no arithmetic and
nothing in this module knows a kind of value. By default a value materialises: every operation reads it as a plain
value. A kind of value can change that in two ways:

* it overrides the methods below;
* it takes over an operation: its method `on_add` is called before the rule `add` computes with plain values
  (`passes/rewrite/rules/table.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

# Not imported when it runs: `scalars` imports this file.
if TYPE_CHECKING:
    from collage_neuron.passes.ir.scalars import Scalar

Fp32 = Any
"""A plain value."""

Increments = tuple[Callable[[], Fp32], ...]
"""The increments of the parameter so far; each is written into the graph only if the update is measured."""


class Reader(Protocol):
    """The interface of an arithmetic, which reads values into a graph."""

    @property
    def scalar(self) -> Callable[[str, Scalar], Fp32]:
        """The graph's input for a number of the host, in one of the forms of `FORMS`."""


class Value:
    """An operand that is not a plain value. Only `read` has no default."""

    def read(self, a: Reader) -> Fp32:
        """The value as one plain value, with which operations compute."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it becomes a plain fp32 value: define read")

    def words(self, a: Reader) -> tuple[Fp32, Fp32]:
        """The value as two words, of which it is the sum."""
        # A plain value is its own high word: nothing is left for the low one.
        return self.read(a), 0.0

    def off_path(self, a: Reader) -> Any:
        """The form in which operations off the path from the old parameter to the new one read the value."""
        return self

    @property
    def host(self) -> Scalar | None:
        """The double that it is, if the host knows it when the update runs."""
        return None

    def kept(self, components: int) -> Sequence[Fp32]:
        """The numbers that it is kept in, if a format of so many components can hold them as they are; else none."""
        return ()

    @property
    def mask(self) -> Fp32 | None:
        """Its elements as truth values, if it is the result of a comparison."""
        return None

    @property
    def increments(self) -> Increments:
        """The increments so far, if this is the parameter between its old and its new value."""
        return ()


@dataclass(frozen=True)
class Plain(Value):
    """A plain value, or a literal number, to be asked like any other."""

    value: Fp32

    def read(self, a: Reader) -> Fp32:
        return self.value

    def off_path(self, a: Reader) -> Fp32:
        return self.value


def lift(x: Any) -> Value:
    """Any operand as a value."""
    return x if isinstance(x, Value) else Plain(x)
