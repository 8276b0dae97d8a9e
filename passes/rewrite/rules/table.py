"""The table of rules, and how an operand takes over an operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.ir.values import Value

Rule = Callable[..., Any]

RULES: dict[Any, Rule] = {}
"""The rule of each aten overload."""


def operation(f: Rule) -> Rule:
    """Makes `f`, which computes with plain values, ask its operands first, from left to right.

    An operand that is a `Value` and has a method called `on_` and the name of `f` is given what `f` is given, itself
    among it. Its result is the operation's; NotImplemented leaves the operation to the next operand, and at last to
    `f`, whose `a.read` makes a plain value of each.
    """
    name = f"on_{f.__name__}"

    @wraps(f)
    def asking(a: Any, *operands: Any, **options: Any) -> Any:
        for x in operands:
            if isinstance(x, Value) and hasattr(x, name):
                result = getattr(x, name)(a, *operands, **options)
                if result is not NotImplemented:
                    return result
        return f(a, *operands, **options)

    return asking


def registering(table: dict[Any, Rule], targets: Sequence[Any]) -> Callable[[Rule], Rule]:
    """Enters a function in a table for each target; ValueError if one has another."""

    def register(f: Rule) -> Rule:
        # All are looked at before any is entered, so that an error leaves the table as it was.
        for target in targets:
            if target in table:
                raise ValueError(f"{target} already has the rule {table[target].__name__}")
        table.update(dict.fromkeys(targets, f))
        return f

    return register


def rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Registers a rule for `targets`; an operation has one rule."""
    return lambda f: registering(RULES, targets)(operation(f))


def rule_for(target: Any, node: str) -> Rule:
    """The rule of `target`, used by the node called `node`; UnsupportedUpdate if it has none."""
    try:
        return RULES[target]
    except KeyError:
        raise UnsupportedUpdate(
            f"the update uses {target} (node {node}), which has no rule; write the update with elementwise operations "
            "that have one (the keys of collage_neuron.passes.rewrite.rules.RULES), or register one with `rule` of "
            "that module"
        ) from None
