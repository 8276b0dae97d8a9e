"""Methods beside `step`: they see and write exact values, or are rejected by name."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import pytest
import torch
from methods import SAM, Busy, SophiaG
from models import bits, differences, parameters, set_gradients, snapshot
from torch import nn
from torch.optim import Optimizer

import collage_neuron
from collage_neuron import UnsupportedUpdate, exact_value
from collage_neuron.eager import codec
from collage_neuron.states.store import read_fp32

pytestmark = pytest.mark.usefixtures("rejecting")

ULP = {"full": 2**-17, "fp32": 2**-24}
"""What storing rounds a number by, relative to itself."""


def both(make: Callable[..., Any], strategy: str = "full", **kwargs: Any) -> tuple[Any, Any]:
    """The compiled optimizer and the plain one in float64, over the same numbers."""
    params, exact = parameters(), [nn.Parameter(p.detach().double()) for p in parameters()]
    return collage_neuron.compile(make(params, **kwargs), strategy=strategy), make(exact, **kwargs)


def pairs(optimizer: Optimizer, reference: Optimizer) -> list[tuple[nn.Parameter, nn.Parameter]]:
    own, other = ([p for g in o.param_groups for p in g["params"]] for o in (optimizer, reference))
    return list(zip(own, other, strict=True))


def error(optimizer: Optimizer, reference: Optimizer) -> float:
    """The largest difference of the parameters to float64."""
    found = ((exact_value(optimizer, p).double() - q.detach()).abs().max() for p, q in pairs(optimizer, reference))
    return max(float(e) for e in found)


def gradients(optimizer: Any, reference: Any, seed: int) -> None:
    for o in (optimizer, reference):
        set_gradients([p for g in o.param_groups for p in g["params"]], seed)


@pytest.mark.whole
@pytest.mark.parametrize("strategy", ["full", "fp32", "plus"])
@pytest.mark.parametrize("first", [0, 2], ids=["method first", "step first"])
def test_the_curvature_of_sophia_is_that_of_float64(first: int, strategy: str) -> None:
    """30 steps move by at most the learning rate; each stores three numbers below 4, through a ratio of about 1.

    Under `plus` the curvature, which methods alone write, is seen to be a second moment; the average is in bf16.
    """
    optimizer, reference = both(SophiaG, strategy, lr=1e-3, rho=1.0)
    for i in range(30):
        gradients(optimizer, reference, i)
        for o in (optimizer, reference):
            if i % 5 == first:
                o.update_hessian(bs=3)
            o.step()
    if strategy != "plus":
        assert error(optimizer, reference) <= 30 * (4 + 3) * ULP[strategy]
    for p, q in pairs(optimizer, reference):
        state, other = optimizer.state[p], reference.state[q]["hessian"]
        value = read_fp32(p, state, "hessian").double()
        assert (value - other).abs().max() <= 10 * ULP.get(strategy, 2**-17) * other.abs().max()


@pytest.mark.parametrize("strategy", ULP)
def test_sharpness_aware_steps_go_up_and_back_to_the_last_bit(strategy: str) -> None:
    optimizer, reference = both(SAM, strategy, lr=1e-2, momentum=0.9)
    for i in range(8):
        gradients(optimizer, reference, i)
        before = [exact_value(optimizer, p) for p, _ in pairs(optimizer, reference)]
        for o in (optimizer, reference):
            o.first_step(0.5)
        up = [exact_value(optimizer, p) for p, _ in pairs(optimizer, reference)]
        assert all((a - b).abs().max() > 1e-3 for a, b in zip(before, up, strict=True))
        for p, q in pairs(optimizer, reference):
            assert torch.equal(p.detach(), exact_value(optimizer, p).bfloat16())  # what the model computes with
            assert (exact_value(optimizer, p) - q.detach()).abs().max() <= (i + 1) * 60 * ULP[strategy]
        if i == 3:
            for o in (optimizer, reference):
                o.restore()
            after = [exact_value(optimizer, p) for p, _ in pairs(optimizer, reference)]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            continue
        gradients(optimizer, reference, 100 + i)
        for o in (optimizer, reference):
            o.second_step(zero_grad=True)
        assert all(p.grad is None for p, _ in pairs(optimizer, reference))
        assert not any("old_p" in optimizer.state[p] for p, _ in pairs(optimizer, reference))
    assert error(optimizer, reference) <= 8 * 60 * ULP[strategy]  # momentum and parameter below 10, summed over 8


def test_a_step_in_a_method_is_the_compiled_step() -> None:
    """Skipped where a step would be skipped, with random bits, hooks and counters of schedulers."""
    params = parameters()
    optimizer: Any = collage_neuron.compile(SAM(params, lr=1e-2), strategy="stochastic", nonfinite="skip")
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    calls: list[Any] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    set_gradients(params, 0)
    optimizer.first_step()
    optimizer.second_step()
    assert optimizer.param_groups[0]["collage_drawn"] == 1
    set_gradients(params, 1)
    optimizer.first_step()
    assert params[0].grad is not None
    params[0].grad[0, 0] = float("nan")
    optimizer.second_step()
    assert collage_neuron.skipped_steps(optimizer) == 1
    assert len(calls) == 2


def stepped(strategy: str = "full", steps: int = 3) -> tuple[Any, Any]:
    optimizer, reference = both(Busy, strategy, lr=1e-2, momentum=0.9)
    for i in range(steps):
        gradients(optimizer, reference, i)
        optimizer.step()
        reference.step()
    return optimizer, reference


@pytest.mark.parametrize("strategy", ["full", "plus", "fp32"])
@pytest.mark.parametrize("method", ["zero_momentum", "reset", "reset_anew"])
def test_states_are_zeroed_and_dropped_and_weights_keep_their_bits(method: str, strategy: str) -> None:
    optimizer, reference = stepped(strategy)
    before = [(bits(p), exact_value(optimizer, p)) for p, _ in pairs(optimizer, reference)]
    for o in (optimizer, reference):
        getattr(o, method)()
    for (p, _), (own, value) in zip(pairs(optimizer, reference), before, strict=True):
        assert torch.equal(bits(p), own)
        assert torch.equal(exact_value(optimizer, p), value)
        left = {k: v for k, v in optimizer.state[p].items() if not k.startswith("param_")}
        assert (left == {}) == (method != "zero_momentum")
        assert not any(v.any() for v in left.values())
    gradients(optimizer, reference, 9)
    for o in (optimizer, reference):
        o.step()
    assert error(optimizer, reference) <= 6 * 4 * {"full": 2**-17, "plus": 2**-8 * 1e-2, "fp32": 2**-22}[strategy]


def test_weights_go_out_and_in_exactly() -> None:
    optimizer, reference = stepped()
    others = [torch.randn(p.shape) for p, _ in pairs(optimizer, reference)]
    values, given = [exact_value(optimizer, p) for p, _ in pairs(optimizer, reference)], [o.clone() for o in others]
    optimizer.swap_weights(others)
    assert all(torch.equal(a, b) for a, b in zip(others, values, strict=True))
    for (p, _), value in zip(pairs(optimizer, reference), given, strict=True):
        assert (exact_value(optimizer, p) - value).abs().max() <= 2**-17 * 4
    optimizer.swap_weights(iter(others))
    assert all(
        torch.equal(exact_value(optimizer, p), value)
        for (p, _), value in zip(pairs(optimizer, reference), values, strict=True)
    )


def test_weights_before_the_first_step_of_a_bf16_model() -> None:
    """There is no low word yet; what a method writes gets one."""
    params = parameters(dtype=torch.bfloat16)
    optimizer: Any = collage_neuron.compile(Busy(params, lr=1e-2), strategy="full")
    value = params[0].detach().float() * (1 + 2**-12)
    optimizer.scale_weights(1 + 2**-12)
    assert (exact_value(optimizer, params[0]) - value).abs().max() <= 2**-16


def test_gradients_are_read_and_written() -> None:
    optimizer, reference = stepped()
    for o in (optimizer, reference):
        o.halve_gradients()
    for p, q in pairs(optimizer, reference):
        assert p.grad is not None
        assert p.grad.dtype == torch.bfloat16
        assert q.grad is not None
        assert torch.equal(p.grad.double(), q.grad)


def test_a_method_that_looks_at_no_weights_copies_none(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer, _ = stepped()
    before = snapshot(optimizer)
    monkeypatch.setattr(codec.Conversions, "decode", lambda *_: pytest.fail("decoded"))
    assert optimizer.get_lr() == [optimizer.rate]
    optimizer.set_scale(2.0)
    assert differences(snapshot(optimizer), before) == []
    with pytest.raises(pytest.fail.Exception, match="decoded"):
        optimizer.zero_momentum()


def test_a_method_that_writes_nothing_changes_no_bit() -> None:
    optimizer, _ = stepped("plus")
    before = snapshot(optimizer)
    assert optimizer.weight_norm > 0
    optimizer.trainable()
    optimizer.scale_weights(1.0)
    assert differences(snapshot(optimizer), before) == []


def test_methods_run_on_copies_and_pickles_too() -> None:
    optimizer, _ = stepped()
    optimizer.zero_grad()  # which copies have none of
    other = copy.deepcopy(optimizer)
    for o in (optimizer, other):
        o.scale_weights(0.3)
    assert differences(snapshot(optimizer), snapshot(other)) == []


REJECTED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "raises half way": (lambda o: o.swap_weights([torch.ones(16, 8)]), "zip"),
    "buffers": (lambda o: o.buffers(), r"Busy.buffers\(\) returns memory of a parameter, gradient or state"),
    "weight": (lambda o: o.weight(), r"Busy.weight\(\) returns memory of a parameter, gradient or state"),
    "norm": (lambda o: o.norm_with_graph(), r"Busy.norm_with_graph\(\) returns a tensor with a graph"),
}


@pytest.mark.parametrize("what", REJECTED)
def test_what_refers_to_weights_afterwards_is_rejected_by_name_and_changes_nothing(what: str) -> None:
    optimizer, _ = stepped()
    before = snapshot(optimizer)
    call, message = REJECTED[what]
    with pytest.raises(ValueError if message == "zip" else UnsupportedUpdate, match=message):
        call(optimizer)
    assert differences(snapshot(optimizer), before) == []


def test_generators_context_managers_and_functions_see_exact_values_later() -> None:
    optimizer, reference = stepped()
    before = [exact_value(optimizer, p) for p, _ in pairs(optimizer, reference)]
    assert list(optimizer.iterate()) == [p for p, _ in pairs(optimizer, reference)]
    optimizer.hold()()
    with optimizer.scaled(4.0):
        for (p, _), value in zip(pairs(optimizer, reference), before, strict=True):
            assert torch.equal(exact_value(optimizer, p), 8 * value)
            assert torch.equal(p.detach(), (8 * value).bfloat16())
    for (p, _), value in zip(pairs(optimizer, reference), before, strict=True):
        assert torch.equal(exact_value(optimizer, p), 2 * value)
    with pytest.raises(ZeroDivisionError), optimizer.scaled(4.0):
        raise ZeroDivisionError


def test_a_method_may_have_the_model_a_function_and_new_groups() -> None:
    optimizer, _ = stepped()
    p = optimizer.param_groups[0]["params"][0]
    before = exact_value(optimizer, p)
    assert torch.equal(optimizer.evaluate(lambda: p.detach().clone()), (2 * before).bfloat16())
    assert torch.equal(exact_value(optimizer, p), 2 * before)
    optimizer.decay_model(nn.ParameterList(optimizer.param_groups[0]["params"]))
    assert torch.equal(optimizer.state[p]["decayed"].detach(), before)
    with pytest.warns(UserWarning, match="float32 parameters was added"):
        optimizer.add_one()
    assert len(optimizer.param_groups) == 2


def test_a_function_may_be_called_before_the_method_looks_at_weights() -> None:
    optimizer, _ = stepped()
    before = exact_value(optimizer, optimizer.param_groups[0]["params"][0])
    assert optimizer.evaluate_first(lambda: 7.0) == 7.0
    assert torch.equal(exact_value(optimizer, optimizer.param_groups[0]["params"][0]), 2 * before)


def test_gradients_with_a_graph_are_rejected() -> None:
    optimizer, _ = stepped()
    p = optimizer.param_groups[0]["params"][0]
    p.grad = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of it once in a process
        torch.autograd.backward(p.square().sum(), create_graph=True)
    with pytest.raises(UnsupportedUpdate, match=r"Busy.halve_gradients\(\) looks at gradients that have a graph"):
        optimizer.halve_gradients()
    p.grad = None


class Reads(torch.optim.SGD):
    """Code that runs later, over parameters that it has already."""

    def each(self) -> Any:
        for p in self.param_groups[0]["params"]:
            yield p.detach().clone()

    def expression(self) -> Any:
        return (p.detach().clone() for p in self.param_groups[0]["params"])

    def mapped(self) -> Any:
        return map(torch.clone, self.param_groups[0]["params"])

    def function(self) -> Any:
        params = self.param_groups[0]["params"]
        return lambda: [p.detach().clone() for p in params]

    def __getitem__(self, i: int) -> Any:
        return self.param_groups[0]["params"][i].detach().clone()

    @cached_property
    def all(self) -> Any:
        return [p.detach().clone() for p in self.param_groups[0]["params"]]

    @contextmanager
    def zeroed(self) -> Any:
        params = self.param_groups[0]["params"]
        before = [p.detach().clone() for p in params]
        with torch.no_grad():
            [p.zero_() for p in params]
            yield
            [p.copy_(x) for p, x in zip(params, before, strict=True)]

    async def awaited(self) -> Any:
        return self.each()


@pytest.mark.parametrize(
    "read", [lambda o: o.each(), lambda o: o.expression(), lambda o: o.mapped(), lambda o: o.function()(),
             lambda o: [o[i] for i in range(3)], lambda o: o.all],
)  # fmt: skip
def test_code_that_runs_later_reads_exact_values(read: Callable[[Any], Any]) -> None:
    params = [nn.Parameter(torch.randn(5)) for _ in range(3)]
    optimizer = collage_neuron.compile(Reads(params, lr=0.1), verbose=False)
    exact = [exact_value(optimizer, p) for p in params]
    with torch.no_grad():
        assert [torch.equal(x.detach(), y) for x, y in zip(read(optimizer), exact, strict=True)] == [True] * 3
    with optimizer.zeroed():
        assert not any(p.any() for p in params)
    assert all(torch.equal(exact_value(optimizer, p), x) for p, x in zip(params, exact, strict=True))


def test_a_coroutine_is_rejected() -> None:
    optimizer = collage_neuron.compile(Reads([nn.Parameter(torch.randn(5))], lr=0.1), verbose=False)
    with pytest.raises(UnsupportedUpdate, match=r"Reads.awaited\(\) returns a coroutine"):
        _ = optimizer.awaited()
