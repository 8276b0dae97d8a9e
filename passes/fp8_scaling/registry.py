"""The table of rules, one per operation, by which the size of a result follows from those of the operands.

An operation without a rule makes its result unknown, and so everything that is computed from it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from collage_neuron.passes.fp8_scaling.sizes import Size, of_number

Sizes = Size | tuple[Size, ...]


class Unknown(Exception):
    """A size that a rule asks for is not known."""


class Operands:
    """What a rule sees of an operation: its arguments, the sizes of those that are values, and shapes."""

    def __init__(self, node: Node, found: dict[Node, Sizes]) -> None:
        self.node = node
        self.args = node.args
        self._found = found

    def __getitem__(self, i: int) -> Size:
        """The size of argument `i`, a value or a number."""
        return self.size(self.args[i])

    def size(self, x: Any) -> Size:
        """The size of a value or number; Unknown if it has none."""
        if isinstance(x, (bool, int, float)):
            return of_number(float(x))
        found = self._found.get(x) if isinstance(x, Node) else None
        if not isinstance(found, Size):
            raise Unknown
        return found

    def given(self, i: int, default: Any = None) -> Any:
        """Argument `i` as written, or the default if it is left out."""
        return self.args[i] if len(self.args) > i else default

    def elements(self, x: Any = None) -> int:
        """The number of elements of a value, by default of the result."""
        return int((self.node if x is None else x).meta["val"].numel())

    def shape(self, x: Any = None) -> tuple[int, ...]:
        """The shape of a value, by default of the result."""
        return tuple((self.node if x is None else x).meta["val"].shape)


Rule = Callable[[Operands], Sizes]

RULES: dict[Any, Rule] = {}
"""The rule of each operation, all of its overloads."""


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for operations; an operation has one rule."""

    def register(f: Rule) -> Rule:
        for target in targets:
            if target in RULES:
                raise ValueError(f"{target} already has the rule {RULES[target].__name__}")
        RULES.update(dict.fromkeys(targets, f))
        return f

    return register
