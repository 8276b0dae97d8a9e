"""Traced steps beside recorded ones and plain torch, and what is around them: errors, checkpoints, memory."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from traced_cases import LAUNCHED, Stepping, initial, set_gradients
from traced_classes import FOREIGN, SUMMING
from traced_updates import stepped_beside

import collage_neuron
from collage_neuron.trace.recorded_classes import TRACE
from collage_neuron.trace.step_kinds import NEW


def assert_right(make: Any, backend: str, steps: int = 6, device: torch.device | str = "cpu") -> None:
    """The parameters are those of plain torch in fp32, but for the order of its operations."""
    settings = {
        "backend": backend,
        "validate": "off" if backend == "xla" else "on",
    }  # XLA would compile programs for it
    optimizer, found = stepped_beside(make, initial(torch.bfloat16, device), "fp32", steps, **settings)
    _, exact = stepped_beside(make, initial(torch.float32), None, steps)
    traces = optimizer._collage_bookkeeping.traces
    assert traces.misses == 0, traces.why
    for x, y in zip(found, exact, strict=True):
        torch.testing.assert_close(x.cpu(), y, rtol=2**-20, atol=2**-21)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", FOREIGN | SUMMING)
def test_a_class_of_others_does_what_plain_torch_does(name: str, backend: str) -> None:
    if backend == "native":
        pytest.importorskip("llvmlite")
    assert_right((FOREIGN | SUMMING)[name], backend)


class NormsTogether(torch.optim.Optimizer):
    """As layer-wise rates are computed for lists: the norms of all parameters in one tensor."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        params = [p for group in self.param_groups for p in group["params"]]
        grads: Any = [p.grad for p in params]
        sizes = torch.stack(torch._foreach_norm(params)).clamp_(max=10.0)
        slopes = torch.stack(torch._foreach_norm(grads))
        rates = torch.where((sizes > 0) & (slopes > 0), sizes / (slopes + 1e-6), 1.0).unbind()
        torch._foreach_add_(params, torch._foreach_mul(grads, rates), alpha=-self.param_groups[0]["lr"])


def test_numbers_of_all_parameters_in_one_tensor(traced: None) -> None:
    optimizer, found = stepped_beside(NormsTogether, initial(torch.bfloat16), "fp32", 6)
    _, exact = stepped_beside(NormsTogether, initial(torch.float32), None, 6)
    assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(found, exact, strict=True))
    assert optimizer._collage_bookkeeping.traces.misses == 0


OF_DEVICES = "schedule_free", "transformers_adamw"


@pytest.mark.parametrize("name", OF_DEVICES)
def test_so_does_one_on_xla(name: str) -> None:
    assert_right(FOREIGN[name], "xla", device=pytest.importorskip("torch_xla").device())


def halving_its_rate(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(torch.tensor(lr, device=p.device).mul_(0.5) * g)


def with_its_rate(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(torch.tensor(lr, device=p.device) * g)


@pytest.mark.parametrize("update", [halving_its_rate, with_its_rate])
def test_a_number_that_a_step_makes_on_xla_has_what_was_written_to_it(update: Any) -> None:
    device = pytest.importorskip("torch_xla").device()
    assert_right(lambda params: Stepping(params, update), "xla", device=device)


def test_one_on_xla_has_the_bits_of_a_recorded_one(monkeypatch: pytest.MonkeyPatch) -> None:
    device = pytest.importorskip("torch_xla").device()

    def stepped() -> list[torch.Tensor]:
        params = initial(torch.bfloat16, device)
        optimizer, _ = stepped_beside(torch.optim.AdamW, params, "plus", 4, backend="xla", validate="off")
        words = (x for p in params for _, x in sorted(optimizer.state[p].items()))
        return [x.cpu() for x in (*params, *map(torch.as_tensor, words))]

    recorded = stepped()
    monkeypatch.setenv(TRACE, "on")
    assert all(map(torch.equal, stepped(), recorded))


class Fault(Exception):
    """What a step raises."""


def test_a_step_that_raises_changes_nothing_and_the_next_goes_on(traced: None) -> None:
    """In steps 1 and 5, after operations on the first parameters; what it has kept can be read."""
    kept: list[torch.Tensor] = []

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        value = g * 2
        s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(value)
        p.sub_(s["m"], alpha=lr)
        if p.shape == (6,) and o.raises:
            kept.append(value)
            raise Fault

    params = initial(torch.bfloat16)
    optimizer: Any = Stepping(params, update)
    optimizer.raises = False
    optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for t in range(1, 9):
        set_gradients(params, t)
        before = copy.deepcopy(optimizer.state_dict()["state"]), [p.detach().clone() for p in params]
        optimizer.raises = t in (1, 5)
        if not optimizer.raises:
            optimizer.step()
            continue
        with pytest.raises(Fault):
            optimizer.step()
        assert torch.equal(kept[-1], params[1].grad.float() * 2)  # type: ignore[union-attr]  # it was set
        assert all(map(torch.equal, params, before[1]))
        assert str(optimizer.state_dict()["state"]) == str(before[0])
    exact = initial(torch.float32)
    plain: Any = Stepping(exact, update)
    plain.raises = False
    for t in (2, 3, 4, 6, 7, 8):
        set_gradients(exact, t)
        plain.step()
    found = [collage_neuron.exact_value(optimizer, p) for p in params]
    assert all(torch.allclose(x, y, rtol=1e-6, atol=1e-6) for x, y in zip(found, exact, strict=True))


def test_a_step_that_cannot_be_undone_is_not_repeated(traced: None) -> None:
    """It has written a large tensor of its own, which is not copied, when torch raises."""

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        p.sub_(g, alpha=lr)
        o.own.add_(1)
        if t == 3:
            torch.ones(2) + torch.ones(3)

    p = Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer: Any = Stepping([p], update)
    optimizer.own = torch.zeros(5000)
    optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for t in range(1, 4):
        set_gradients([p], t)
        with contextlib.nullcontext() if t < 3 else pytest.raises(collage_neuron.StepInterrupted):
            optimizer.step()
    assert optimizer.own.unique().tolist() == [3.0]


@pytest.mark.parametrize(("times", "fails"), [(2, lambda: torch.ones(2) + torch.ones(3)), (2, [].pop), (1, {}.popitem)])
def test_a_step_in_which_torch_or_python_fails_runs_twice_and_counts_once(times: int, fails: Any, traced: None) -> None:
    """As docs/limits.md says; a KeyError comes from no value that waits."""
    ran = []

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        o.count += 1
        p.sub_(g, alpha=lr)
        ran.append(t)
        if t == 3:
            fails()

    p = Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer: Any = Stepping([p], update)
    optimizer.count = 0
    optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for t in range(1, 4):
        set_gradients([p], t)
        with contextlib.nullcontext() if t < 3 else pytest.raises((RuntimeError, LookupError)):
            optimizer.step()
    assert (ran[-times - 1 :], optimizer.count) == ([2] + [3] * times, 2)


@pytest.mark.parametrize("repeats", [1, 3])
def test_steps_that_are_mostly_different_run_as_written(repeats: int, traced: None) -> None:
    """To compile each of them costs more."""
    params = initial(torch.bfloat16)

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        LAUNCHED["an_exponent_changes"](o, p, g, s, lr, (t - 1) // repeats)

    optimizer: Any = collage_neuron.compile(Stepping(params, update), verbose=False)
    for t in range(1, repeats * NEW + 2):
        assert not optimizer._collage_bookkeeping.traces or not optimizer._collage_bookkeeping.traces.gives_up
        set_gradients(params, t)
        optimizer.step()
    assert optimizer._collage_bookkeeping.traces.gives_up


def test_what_is_traced_is_let_go(traced: None) -> None:
    params = initial(torch.bfloat16)
    optimizer = collage_neuron.compile(Stepping(params, LAUNCHED["momentum"]), verbose=False)
    left = None
    for t in range(1, 8):
        set_gradients(params, t)
        optimizer.step()
        if t == 4:  # it leaves the optimizer
            left = weakref.ref(params.pop())
            optimizer.state.pop(optimizer.param_groups[0]["params"].pop())
    own, p = weakref.ref(optimizer), weakref.ref(params[0])
    gc.collect()
    assert left is not None
    assert left() is None
    gc.disable()
    try:
        del optimizer, params
        assert (own(), p()) == (None, None)
    finally:
        gc.enable()


def test_a_closure_sees_the_weights_before_rows_and_columns_wait() -> None:
    found = []
    for is_compiled in (True, False):
        params = [Parameter(p.detach().float()) if not is_compiled else p for p in initial(torch.bfloat16)]
        optimizer: Any = torch.optim.Adafactor(params)
        if is_compiled:
            optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
        for t in range(6):
            optimizer.step(partial(set_gradients, params, t))
        found.append([collage_neuron.exact_value(optimizer, p).float() if is_compiled else p.detach() for p in params])
        assert not is_compiled or optimizer._collage_bookkeeping.traces.misses == 0
    assert all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(*found, strict=True))


def test_states_that_a_checkpoint_replaces_are_let_go() -> None:
    params = [Parameter(torch.randn(4, 4).bfloat16()) for _ in range(3)]

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        p.sub_(s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g), alpha=lr)

    optimizer: Any = collage_neuron.compile(Stepping(params, update), strategy="fp32", verbose=False)
    for t in range(4):
        set_gradients(params, t)
        optimizer.step()
    own = [weakref.ref(optimizer.state[p]["m"].untyped_storage()) for p in params]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    gc.collect()
    assert not any(x() for x in own)


@pytest.mark.parametrize("strategy", ["split433", "split423", "split412"])
def test_a_resumed_run_whose_steps_read_numbers_has_the_bits_of_one_that_went_on(strategy: str) -> None:
    """Before such a step nobody knows formats, and states in codes are saved by their values."""

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        m = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
        p.sub_(m, alpha=lr / (1 + p.norm().item()))

    def run(first: int, saved: Any = None) -> tuple[Any, Any]:
        params = initial(torch.bfloat16)
        optimizer: Any = collage_neuron.compile(Stepping(params, update), strategy=strategy, verbose=False)
        if saved is not None:
            for p, value in zip(params, saved[0], strict=True):
                p.data.copy_(value)
            optimizer.load_state_dict(saved[1])
        for t in range(first, 8):
            set_gradients(params, t)
            optimizer.step()
            if t == 4:
                found = copy.deepcopy(([p.detach() for p in params], optimizer.state_dict()))
        assert optimizer._collage_bookkeeping.traces.misses == 0
        return [collage_neuron.exact_value(optimizer, p) for p in params], None if first > 4 else found

    whole, saved = run(1)
    assert all(map(torch.equal, run(5, saved)[0], whole))


class Closed(torch.optim.Optimizer):
    """A step that calls its closure first."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure()
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.mul_(0.9)


def test_a_closure_runs_once_where_gradients_are_missing_in_turn(recwarn: pytest.WarningsRecorder) -> None:
    """The step begins again after it, and did so with what was known of the last one, which has had other gradients."""
    calls: list[int] = []
    params = [Parameter(torch.ones(4, 6)) for _ in range(2)]
    optimizer: Any = collage_neuron.compile(Closed(params, {}), verbose=False, validate="off")
    for t in range(8):
        for i, p in enumerate(params):
            p.grad = torch.ones_like(p) if (t + i) % 2 else None
        optimizer.step(lambda: calls.append(1))
    assert len(calls) == 8
    assert not recwarn.list
