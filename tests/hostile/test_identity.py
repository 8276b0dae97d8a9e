"""Steps that go by which parameter they see, or of which class: compiled as they are, or rejected, never mistaken."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

import collage_neuron
from collage_neuron import TranslationError
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.host_state import HostState
from collage_neuron.recording import independence

pytestmark = pytest.mark.usefixtures("rejecting")

LAST = r"something else to param_groups\[0\]\['params'\]\[2\] than to such a parameter alone"
FIRST = r"something else to param_groups\[0\]\['params'\]\[0\] than to such a parameter alone.* on type\(p\)"


class Rated(Optimizer):
    """Plain descent with a rate for each parameter; `rate` is made of the last one, the head."""

    def __init__(self, params: Any, rate: Callable[[Any], Any]) -> None:
        super().__init__(params, {"lr": 0.125})
        self.rate = rate(self.param_groups[0]["params"][-1])

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] * self.of(p))

    def of(self, p: Any) -> Any:
        return self.rate(p)


class ByKey(Rated):
    """The rates are in a dictionary."""

    def of(self, p: Any) -> Any:
        return self.rate.get(p, 1.0)


class Own(Parameter):
    """A class of parameters of a user's own."""


def by_default(head: Any) -> Any:
    return lambda p, q=head: 5.0 if p is q else 1.0


def by_keyword_default(head: Any) -> Any:
    def rate(p: Any, *, q: Any = head) -> float:
        return 5.0 if p is q else 1.0

    return rate


def by_default_in_a_tuple(head: Any) -> Any:
    return lambda p, special=(head,): 5.0 if any(p is q for q in special) else 1.0


def compared(first: Any, second: Any = None) -> float:
    return 5.0 if first is second else 1.0


REJECTED: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "weak_tensor_key": (ByKey, lambda head: WeakTensorKeyDictionary({head: 5.0}), LAST),
    "weak_id_key": (ByKey, lambda head: WeakIdKeyDictionary({head: 5.0}), LAST),
    "default": (Rated, by_default, LAST),
    "keyword_default": (Rated, by_keyword_default, LAST),
    "default_in_a_tuple": (Rated, by_default_in_a_tuple, LAST),
    "partial": (Rated, lambda head: partial(compared, head), LAST),
    "partial_by_name": (Rated, lambda head: partial(compared, second=head), LAST),
    "type": (Rated, lambda head: lambda p: 5.0 if type(p) is Parameter else 1.0, FIRST),
    "name_of_the_type": (Rated, lambda head: lambda p: 5.0 if type(p).__name__ == "Parameter" else 1.0, FIRST),
    "own_class": (Rated, lambda head: lambda p: 5.0 if type(p) is Own else 1.0, LAST),
}

COMPILED: dict[str, Callable[[Any], Any]] = {
    "class": lambda head: lambda p: 5.0 if p.__class__ is Parameter else 1.0,
    "name_of_the_class": lambda head: lambda p: 5.0 if p.__class__.__name__ == "Parameter" else 1.0,
    "instance": lambda head: lambda p: 5.0 if isinstance(p, Own) else 1.0,
    "partial_without_parameters": lambda head: partial(compared, None),
}


def params(dtype: torch.dtype = torch.float32) -> list[Any]:
    ones = [torch.ones(shape, dtype=dtype) for shape in ((4, 4), (4,), (3,))]
    return [Parameter(ones[0]), Parameter(ones[1]), Own(ones[2])]


def step(optimizer: Optimizer) -> None:
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()


def error(cls: Any, rate: Callable[[Any], Any]) -> float:
    """How far a compiled run is from the same in float64, after four steps of at most 5 / 8."""
    exact, ps = params(torch.float64), params()
    plain, optimizer = cls(exact, rate), collage_neuron.compile(cls(ps, rate), strategy="full")
    for _ in range(4):
        step(plain)
        step(optimizer)
    values = [collage_neuron.exact_value(optimizer, p).double() for p in ps]
    return max(float((v - e.detach()).abs().max()) for v, e in zip(values, exact, strict=True))


@pytest.mark.parametrize("name", REJECTED)
def test_what_stand_ins_cannot_follow_is_rejected(name: str) -> None:
    cls, rate, message = REJECTED[name]
    ps = params()
    optimizer = cls(ps, rate)
    held = repr(optimizer.rate)
    with pytest.raises(UnsupportedUpdate, match=message):
        collage_neuron.compile(optimizer)
    assert type(optimizer) is cls
    assert repr(optimizer.rate) == held
    assert float(optimizer.of(ps[2])) == (1.0 if message is FIRST else 5.0)
    assert all(torch.equal(p, torch.ones_like(p)) for p in ps)


@pytest.mark.parametrize("name", REJECTED)
def test_without_the_check_each_is_mistaken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independence, "check", lambda base, optimizer: None)
    monkeypatch.setattr(independence, "check_numbers", lambda *_: None)
    monkeypatch.setattr("collage_neuron.validation.validate.check", lambda *args: None)
    cls, rate, _ = REJECTED[name]
    assert error(cls, rate) > 0.1


@pytest.mark.parametrize("name", COMPILED)
def test_what_they_show_is_compiled_and_equal(name: str) -> None:
    assert error(Rated, COMPILED[name]) <= 4 * 4 * 2 * 2**-17  # as in test_unlike.py


@pytest.mark.parametrize("name", ["type", "name_of_the_type", "own_class"])
def test_validation_takes_the_branch_of_the_true_class(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(independence, "check", lambda base, optimizer: None)
    monkeypatch.setattr(independence, "check_numbers", lambda *_: None)
    cls, rate, _ = REJECTED[name]
    ps = params()
    optimizer = collage_neuron.compile(cls(ps, rate))
    before = [p.detach().clone() for p in ps]
    with pytest.raises(TranslationError):
        step(optimizer)
    assert all(torch.equal(p, b) for p, b in zip(ps, before, strict=True))


def test_a_twin_of_the_true_class_has_the_attributes() -> None:
    ps = params()
    for i, p in enumerate(ps):
        p.scale, p.group_name, p.wide = 1.0 + i, "head", torch.tensor(0.5)
    rate: Any = lambda head: lambda p: p.scale * float(p.wide) if p.group_name == "head" else 0.0  # noqa: E731
    optimizer = collage_neuron.compile(Rated(ps, rate), strategy="full")
    step(optimizer)
    moved = [float(1 - collage_neuron.exact_value(optimizer, p).mean()) for p in ps]
    assert moved == pytest.approx([0.0625, 0.125, 0.1875], abs=2**-15)


def test_references_are_exchanged_for_others_of_their_class_and_back() -> None:
    ps, other = params(), Parameter(torch.ones(3))
    weak, values = WeakIdKeyDictionary({ps[2]: 5.0}), weakref.WeakValueDictionary({"head": ps[2]})
    optimizer = Rated(ps, lambda head: [weak, values])
    with HostState(Rated, optimizer) as host:
        host.exchange({id(ps[2]): other})
        assert other in weak and ps[2] not in weak  # noqa: PT018
        assert values["head"] is other
        HostState(Rated, optimizer).exchange({id(other): ps[2]})
        assert ps[2] in weak and other not in weak  # noqa: PT018
        assert values["head"] is ps[2]
    assert weak[ps[2]] == 5.0
    assert values["head"] is ps[2]


def test_a_default_that_a_step_changes_is_put_back() -> None:
    rate: Any = by_default(None)
    optimizer = Rated(params(), lambda head: rate)
    defaults = rate.__defaults__
    with HostState(Rated, optimizer) as host:
        rate.__defaults__ = (3.0,)
        assert "a default argument of by_default.<locals>.<lambda>" in host.changes()
    assert rate.__defaults__ is defaults
