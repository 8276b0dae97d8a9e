"""Values: the numbers of an update in forms of their own, each of which answers for itself.

A plain value is one fp32 number an element as the expanded graph computes it: an `fx.Proxy`, an fp32 tensor, a Python
number. Whatever else an operand may be is a `Value`: two words, a sum that is still pending, a mask, a number of the
host. None of them is known to a rule, to an arithmetic or to this module. By default a value materialises: every
operation reads it as a plain value. A kind of value does better in two ways:

* it answers the questions below otherwise than by default;
* it takes over an operation: a method `on_add` is asked before the rule `add` computes with plain values
  (`passes/rewrite/rules/registry.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collage_neuron.passes.ir.scalars import Scalar

Fp32 = Any
"""A plain value."""

Increments = tuple[Callable[[], Fp32], ...]
"""What was added to the parameter so far; each is written into the graph only where the update is measured."""


class Reader(Protocol):
    """Who reads values into a graph: an arithmetic."""

    @property
    def scalar(self) -> Callable[[str, Scalar], Fp32]:
        """The graph's input for a number of the host, in one of the forms of `FORMS`."""


class Value:
    """A number of an update in a form of its own. Only `read` has no default."""

    def read(self, a: Reader) -> Fp32:
        """The value as one plain value: what operations compute with."""
        raise NotImplementedError(f"{type(self).__name__} does not say how it becomes a plain fp32 value: define read")

    def words(self, a: Reader) -> tuple[Fp32, Fp32]:
        """The value as two words, of which it is the sum."""
        return self.read(a), 0.0

    def off_path(self, a: Reader) -> Any:
        """What operations see that are not on the path from the old parameter to the new one."""
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
        """What was added to the parameter, if this is the parameter on its way from old to new."""
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
