"""What a step leaves beside weights and states: the gradient that it wrote to, and words that nobody may lose."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hostile import Base
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron
from collage_neuron import UnsupportedUpdate, exact_value


class Halves(Base):
    """Writes to the gradient, as older optimizers add their weight decay to it."""

    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g.mul_(0.5), alpha=-group["lr"])


class Clears(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"])
        p.grad = None


class Exchanges(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        p.add_(g, alpha=-group["lr"])
        p.grad = g * 0.25


class Drops(Base):
    def update(self, p: Any, g: Any, state: Any, group: Any) -> None:
        t = state["t"] = state.get("t", 0) + 1
        m = state.pop("m") if t == 3 else state.setdefault("m", torch.zeros_like(p))
        p.add_(m.add_(g), alpha=-group["lr"])


def made(cls: Callable[..., Optimizer], device: str = "cpu", **settings: Any) -> tuple[Parameter, Optimizer]:
    p = Parameter(torch.linspace(-1, 1, 12, device=device).reshape(3, 4))
    return p, collage_neuron.compile(cls([p]), **settings)


def given(p: Parameter, value: float = 1.0) -> torch.Tensor:
    p.grad = torch.full(p.shape, value, dtype=p.dtype, device=p.device)
    return p.grad


@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("strategy", ["plus", "fp32", "bf16", "stochastic"])
def test_a_gradient_that_the_step_writes_to_is_written(strategy: str, device: str) -> None:
    """In its own memory: the next backward adds to it where nobody clears it."""
    if device == "xla":
        pytest.importorskip("torch_xla")
    p, optimizer = made(Halves, device, strategy=strategy)
    grad = given(p)
    optimizer.step()
    assert p.grad is grad
    assert torch.equal(grad.cpu(), torch.full((3, 4), 0.5).bfloat16())


def test_the_gradient_of_an_fp32_parameter_is_written_in_fp32() -> None:
    p = Parameter(torch.ones(4))
    optimizer = collage_neuron.compile(Halves)([Parameter(torch.ones(1).bfloat16())])
    with pytest.warns(UserWarning, match="float32"):
        optimizer.add_param_group({"params": [p]})
    given(p, 1 + 2**-20)
    optimizer.step()
    assert torch.equal(p.grad, torch.full((4,), (1 + 2**-20) / 2))  # type: ignore[arg-type]  # it is there


def test_an_expanded_gradient_is_exchanged() -> None:
    p, optimizer = made(Halves)
    p.grad = torch.ones(1, dtype=p.dtype).expand(3, 4)
    optimizer.step()
    assert torch.equal(p.grad, torch.full((3, 4), 0.5).bfloat16())


def test_a_gradient_that_the_step_clears_or_exchanges() -> None:
    p, optimizer = made(Clears)
    given(p)
    optimizer.step()
    assert p.grad is None
    p, optimizer = made(Exchanges)
    given(p)
    optimizer.step()
    assert torch.equal(p.grad, torch.full((3, 4), 0.25).bfloat16())  # type: ignore[arg-type]  # it is there


def test_a_skipped_step_leaves_the_gradient() -> None:
    p, optimizer = made(Halves, nonfinite="skip")
    grad = given(p)
    grad[0, 0] = torch.inf
    before = grad.clone()
    optimizer.step()
    assert torch.equal(grad, before)


def test_gradients_that_nobody_writes_to_cost_nothing() -> None:
    p, optimizer = made(torch.optim.AdamW)
    grad = given(p)
    version = grad._version
    optimizer.step()
    assert grad._version == version


def test_a_state_that_is_deleted_is_rejected_before_anything_changes() -> None:
    p, optimizer = made(Drops)
    for _ in range(2):
        given(p)
        optimizer.step()
    before = copy.deepcopy((p, optimizer.state_dict()))
    given(p)
    with pytest.raises(UnsupportedUpdate, match=r"deletes optimizer.state\[p\]\['m'\].*set it to zeros"):
        optimizer.step()
    assert torch.equal(p, before[0])
    assert str(optimizer.state_dict()) == str(before[1])


def _clear(optimizer: Optimizer) -> None:
    optimizer.state.clear()


def _exchange(optimizer: Optimizer) -> None:
    optimizer.state = defaultdict(dict)


def _delete(optimizer: Optimizer) -> None:
    for p in list(optimizer.state):
        del optimizer.state[p]


def _empty(optimizer: Optimizer) -> None:
    for state in optimizer.state.values():
        state.clear()


@pytest.mark.parametrize("forget", [_clear, _exchange, _delete, _empty])
@pytest.mark.parametrize("strategy", ["light", "plus", "full", "fp32"])
def test_clearing_the_state_forgets_moments_and_no_bit_of_a_weight(
    strategy: str, forget: Callable[[Optimizer], None]
) -> None:
    p, optimizer = made(torch.optim.AdamW, strategy=strategy)
    for i in range(3):
        given(p, 1.0 + i)
        optimizer.step()
    before = exact_value(optimizer, p)
    assert not torch.equal(before, p.float())
    forget(optimizer)
    assert torch.equal(exact_value(optimizer, p), before)
    forget(optimizer)
    assert [k for k in optimizer.state_dict()["state"][0] if not k.startswith("param_")] == []
    given(p)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert torch.equal(exact_value(optimizer, p), before)
    assert optimizer.state[p]["step"] == 1


def test_a_copy_of_a_cleared_optimizer_has_the_words_too() -> None:
    p, optimizer = made(torch.optim.AdamW)
    given(p)
    optimizer.step()
    before = exact_value(optimizer, p)
    optimizer.state.clear()
    q, twin = copy.deepcopy((p, optimizer))
    assert torch.equal(exact_value(twin, q), before)


def test_a_plain_checkpoint_still_takes_the_words_away() -> None:
    """Loaded weights are what they are: no word of the run before comes back."""
    p, optimizer = made(torch.optim.AdamW)
    given(p)
    optimizer.step()
    plain = Parameter(p.detach().float())
    of_torch = torch.optim.AdamW([plain])
    given(plain)
    of_torch.step()
    with torch.no_grad():
        p.copy_(plain)
    optimizer.load_state_dict(of_torch.state_dict())
    assert torch.equal(exact_value(optimizer, p), p.float())
