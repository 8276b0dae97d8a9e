"""Open values: kinds of values that nobody inside knows, and what every kind gets without a line of its own."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.fx as fx
from one_operation import ONE_OP, SLOT, captured, op
from updates import rewritten

from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.passes.ir import values
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.update import Update
from collage_neuron.passes.ir.values import Fp32, Reader, Value, lift
from collage_neuron.passes.ir.verify import verify
from collage_neuron.passes.rewrite import arithmetic, expand, rules
from collage_neuron.passes.rewrite.fp32_arithmetic import Fp32Arithmetic
from collage_neuron.passes.rewrite.rules import RULES, elementwise, masks, registry, tensors

aten = torch.ops.aten
ARITHMETICS = expand.ARITHMETICS


# Two kinds from outside: each is one class, and an arithmetic that starts a state or the gradient as one.


class Zero(Value):
    """A tensor that is known to be 0, as a momentum is in the first step: sums lose it, products are it."""

    @property
    def host(self) -> Scalar:
        return Scalar.constant(0.0)

    def read(self, a: Reader) -> Fp32:
        return a.scalar("fp32", self.host)

    def on_mul(self, a: Any, x: Any, y: Any) -> Value:
        return self

    def on_add(self, a: Any, x: Any, y: Any, alpha: Any = 1) -> Any:
        return x if y is self else y if alpha == 1 else rules.elementwise.mul(a, y, alpha)

    def on_add_to(self, a: Any, x: Any, increment: Fp32) -> Fp32:
        return a.round(increment)

    def on_sqrt(self, a: Any, x: Any) -> Value:
        return self


@dataclass(frozen=True)
class Scaled(Value):
    """A value times a number of the host that is not multiplied yet: all factors become one, in double."""

    base: Fp32
    factor: Scalar

    def read(self, a: Reader) -> Fp32:
        return self.base * a.scalar("fp32", self.factor)

    def on_mul(self, a: Any, x: Any, y: Any) -> Any:
        host = lift(y if x is self else x).host
        return NotImplemented if host is None else Scaled(self.base, Scalar("*", (self.factor, host)))

    def on_neg(self, a: Any, x: Any) -> Scaled:
        return Scaled(self.base, -self.factor)


class FirstStep(Fp32Arithmetic):
    """States are 0, whatever their memory holds."""

    name = "first step"

    def load(self, name: str, fmt: Format, components: Sequence[Fp32]) -> Any:
        return super().load(name, fmt, components) if name in ("param", "grad") else Zero()


class LazilyScaled(Fp32Arithmetic):
    """The gradient is `Scaled`."""

    name = "lazily scaled"

    def load(self, name: str, fmt: Format, components: Sequence[Fp32]) -> Any:
        value = super().load(name, fmt, components)
        return Scaled(value, Scalar.constant(1.0)) if name == "grad" else value


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    for made in (FirstStep, LazilyScaled, Unknown):
        monkeypatch.setitem(ARITHMETICS, made.name, made)


SQUARES = op(aten.addcmul.default, op(aten.mul.Tensor, "x", "s"), "g", "g", value=0.5)
ROOT = op(aten.add.Tensor, op(aten.sqrt.default, "x"), op(aten.add.Tensor, "x", "g", alpha="s"))
TWICE = op(aten.add.Tensor, op(aten.mul.Tensor, op(aten.neg.default, op(aten.mul.Tensor, "g", "s")), "s"), "x")
CLIENTS = {"squares": (FirstStep, SQUARES), "root": (FirstStep, ROOT), "scaled_twice": (LazilyScaled, TWICE)}


def of(body: Any, arithmetic: str, state: str = "fp32") -> Update:
    formats = {"param": format_named("bf16"), "state": format_named(state)}
    update = rewritten(captured(body), formats, arithmetic)
    verify(update)
    return update


def test_golden_text(golden: Callable[[str, str], None]) -> None:
    texts = []
    for name, (made, body) in CLIENTS.items():
        update = of(body, made.name)
        texts.append(f"{name}, arithmetic {made.name!r}\n{format_graph(update.graph.graph)}\n{update.scalars}")
    golden("values_from_outside.txt", "\n\n".join(texts))


def run(update: Update, grad: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    components = {"param": torch.zeros_like(grad, dtype=torch.bfloat16), "grad": grad, "state": state}
    scalars = torch.tensor(update.scalars.run([SLOT]), dtype=torch.float32)
    entries = [scalars[i] for i in range(len(scalars))]
    results = dict(zip(update.outputs, update.graph(*(components[k] for k in update.inputs), *entries), strict=True))
    result: torch.Tensor = results["state"].double()
    return result


@pytest.mark.parametrize(
    ("name", "exact", "roundings"),
    [
        ("squares", lambda g, x: 0.5 * g * g, 3),
        ("root", lambda g, x: SLOT * g, 2),
        ("scaled_twice", lambda g, x: x - SLOT * SLOT * g, 3),
    ],
)
def test_value_against_float64(name: str, exact: Callable[..., torch.Tensor], roundings: int) -> None:
    generator = torch.Generator().manual_seed(0)
    grad = (torch.rand(4096, generator=generator) + 0.5).bfloat16()
    state = torch.rand(4096, generator=generator) + 0.5
    made, body = CLIENTS[name]
    result, truth = run(of(body, made.name), grad, state), exact(grad.double(), state.double())
    largest = torch.maximum(state.double(), truth.abs())  # of what is rounded on the way; all are below 2.25
    assert bool(((result - truth).abs() <= roundings * 2**-24 * largest).all())


def test_one_factor_rounds_once_where_two_round_twice() -> None:
    """What `Scaled` is for: the plain arithmetic is further from float64 on the same numbers."""
    grad = (torch.rand(4096, generator=torch.Generator().manual_seed(0)) + 0.5).bfloat16()
    truth = -SLOT * SLOT * grad.double()
    body = op(aten.mul.Tensor, op(aten.neg.default, op(aten.mul.Tensor, "g", "s")), "s")
    lazy, plain = (run(of(body, name), grad, torch.zeros(4096)) for name in (LazilyScaled.name, "fp32"))
    assert float((lazy - truth).norm()) < float((plain - truth).norm())


# What a kind gets that says nothing but how it is read: every rule.


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


@pytest.mark.parametrize("name", ONE_OP)
def test_a_value_materialises_by_default(name: str) -> None:
    """In every operation that has a rule, stored in any format: the graph is that of a plain value."""
    for state in ("bf16", "bf16x2", "fp32"):
        texts = [format_graph(of(ONE_OP[name], arithmetic, state).graph.graph) for arithmetic in ("unknown", "fp32")]
        assert texts[0] == texts[1]


def test_a_kind_that_cannot_be_read_says_so() -> None:
    class Mute(Value):
        pass

    with pytest.raises(NotImplementedError, match="Mute does not say how it becomes a plain fp32 value: define read"):
        elementwise.sqrt(Fp32Arithmetic(lambda *_: None), Mute())


# What keeps it open.


def kinds(base: type[Value] = Value) -> Iterator[type[Value]]:
    for kind in base.__subclasses__():
        yield kind
        yield from kinds(kind)


def test_an_operation_that_a_kind_takes_over_exists() -> None:
    """A misspelt method would never be asked."""
    operations = {f"on_{f.__name__}" for f in (*RULES.values(), rules.add_to)}
    taken = {name for kind in kinds() if kind.__module__ != __name__ for name in dir(kind) if name.startswith("on_")}
    assert {"on_add", "on_lerp", "on_where"} <= taken <= operations


@pytest.mark.parametrize("module", [values, arithmetic, elementwise, masks, tensors, registry, expand])
def test_neither_the_base_nor_a_rule_tests_for_a_kind(module: ModuleType) -> None:
    known = {kind.__name__ for kind in kinds()}
    for call in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("isinstance", "issubclass", "type"):
            assert not known & {n.id for n in ast.walk(call) if isinstance(n, ast.Name)}


def test_a_value_may_take_over_an_operation_of_a_rule_that_comes_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RULES", {})

    @registry.rule(aten.erf.default)
    def erf(a: Any, x: Any) -> Any:
        return "plain"

    class Odd(Value):
        def on_erf(self, a: Any, x: Any) -> Any:
            return "odd"

    assert [erf(None, fx.Graph()), erf(None, Odd())] == ["plain", "odd"]
