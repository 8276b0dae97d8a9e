"""Numbers that stand for floats in an optimizer's code: what torch and Python ask of them beside arithmetic.

`tape.Traced` is one that can be computed again, `device_numbers.DeviceNumber` one without a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


class Node:
    """What torch asks a symbolic number for; it must not need the value."""

    def is_float(self) -> bool:
        """Returns True."""
        return True

    def is_int(self) -> bool:
        """Returns False."""
        return False

    is_bool = is_int

    def needs_value(self, what: str) -> Any:
        """Raises UnsupportedUpdate: code does `what`, for which it needs the value."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        self.needs_value("a conversion to a number of Python's")


class Symbolic(torch.SymFloat):
    """A float with a node. torch takes it wherever it takes a number, and shows it to modes as it is."""

    def __init__(self, node: Node) -> None:
        super().__init__(node)  # type: ignore[no-untyped-call]  # torch's own signature

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """For `isinstance`."""
        return float

    def __getattr__(self, name: str) -> Any:
        # Called for what SymFloat does not have: a float has it, or code asks whether this is a tensor.
        if hasattr(float, name):
            self.node.needs_value(name)
        raise AttributeError(name)


def _needing(name: str) -> Callable[..., Any]:
    return lambda self, *_: self.node.needs_value(name)


def take_value_in(cls: type[Symbolic], names: Iterable[str]) -> None:
    """Gives a class the methods in which its numbers need their value: `__<name>__`, and those that any float has."""
    for name in names:
        setattr(cls, f"__{name}__", _needing(f"__{name}__"))
    for name in ("is_integer", "as_integer_ratio", "hex", "conjugate"):  # SymFloat has some of them
        setattr(cls, name, _needing(name))
