"""A kind of values that nobody inside knows has every rule, once it says how it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from one_operation import ONE_OP, expanded

from collage_neuron.numerics.formats import Format
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.ir.values import Fp32, Reader, Value
from collage_neuron.passes.rewrite import expand, rules
from collage_neuron.passes.rewrite.arithmetic import Fp32Arithmetic
from collage_neuron.passes.rewrite.rules import RULES, elementwise


@dataclass(frozen=True)
class Silent(Value):
    value: Fp32

    def read(self, a: Reader) -> Fp32:
        return self.value


class Unknown(Fp32Arithmetic):
    name = "unknown"

    def load(self, name: str, fmt: Format, components: Sequence[Fp32]) -> Any:
        value = super().load(name, fmt, components)
        return value if name == "param" else Silent(value)


def text(name: str, arithmetic: str, state: str) -> str:
    return format_graph(expanded(name, arithmetic, state).graph.graph)


@pytest.mark.parametrize("name", ONE_OP)
def test_a_value_materialises_by_default(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every operation that has a rule, stored in any format: the graph is that of a plain value."""
    monkeypatch.setitem(expand.ARITHMETICS, Unknown.name, Unknown)
    for state in ("bf16", "bf16x2", "fp32"):
        assert text(name, "unknown", state) == text(name, "fp32", state)


def test_a_kind_that_cannot_be_read_says_so() -> None:
    class Mute(Value):
        pass

    with pytest.raises(NotImplementedError, match="Mute does not say how it becomes a plain fp32 value: define read"):
        elementwise.sqrt(Fp32Arithmetic(lambda *_: None), Mute())


def kinds(base: type[Value] = Value) -> Iterator[type[Value]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_an_operation_that_a_kind_takes_over_exists() -> None:
    """A misspelt method would never be asked."""
    operations = {f"on_{f.__name__}" for f in (*RULES.values(), rules.add_to)}
    taken = {name for kind in kinds() if kind.__module__ != __name__ for name in dir(kind) if name.startswith("on_")}
    assert {"on_add", "on_lerp", "on_where"} <= taken <= operations
