"""A method that a steady step calls again is answered without torch, unless torch would do something else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from traced_cases import Stepping

import collage_neuron
from collage_neuron import torch_privates


class Dispatched(TorchDispatchMode):
    """Doubles what is multiplied."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.mul.Tensor else out


class Called(TorchFunctionMode):
    """The same of functions and methods."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.Tensor.mul, torch.Tensor.__mul__) else out


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "operations": Dispatched,
    "functions": Called,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "gradients": torch.enable_grad,
}


def _run(update: Any, dtype: torch.dtype, steps: int = 6) -> tuple[Tensor, Any]:
    p = Parameter(torch.linspace(-1, 1, 12).reshape(3, 4).bfloat16().to(dtype))
    optimizer: Any = Stepping([p], update)
    if dtype == torch.bfloat16:
        optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)
    for t in range(1, steps + 1):
        p.grad = torch.full_like(p, 0.5 * t).add_(torch.arange(12).reshape(3, 4) / 16)
        optimizer.step()
    return (collage_neuron.exact_value(optimizer, p) if dtype == torch.bfloat16 else p.detach()), optimizer


def _assert_right(update: Any, rtol: float = 1e-6) -> None:
    """Compiled steps go where plain fp32 goes."""
    (found, _), (exact, _) = _run(update, torch.bfloat16), _run(update, torch.float32)
    assert torch.allclose(found, exact, rtol=rtol), (found, exact)


@pytest.mark.parametrize("mode", MODES)
def test_what_changes_an_operation_is_seen(mode: str, traced: None) -> None:
    """In the fourth step a mode is on that was off in the third."""
    with MODES[mode]():
        asked = torch_privates.dispatch_modes, torch_privates.function_modes, torch_privates.is_autocast_enabled
        assert torch.is_grad_enabled() or any(ask() for ask in asked)

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        with MODES[mode]() if t in (4, 6) else nullcontext():
            x = g * 2.0
        p.sub_(x.detach(), alpha=lr)

    _assert_right(update, 1e-5)


CHANGED: dict[str, Callable[[Any, Any, int], Any]] = {
    "another method": lambda p, g, t: g.sin() if t < 4 else g.cos(),
    "another tensor": lambda p, g, t: g.mul(p if t < 4 else g),
    "a tensor for a number": lambda p, g, t: g * (2.0 if t < 4 else torch.full_like(p, 3.0).detach()),
    "a name": lambda p, g, t: g.add(p, alpha=0.5) if t < 4 else g.add(p),
    "a name beside a number": lambda p, g, t: g * float((g.prod(1) if t < 4 else g.prod(1, keepdim=True)).dim()),
    "another name": lambda p, g, t: g.add(other=p) if t < 4 else g.add(p, alpha=2.0),
    "reflected": lambda p, g, t: torch.full((3, 4), 3.0) / (g + p.abs()) + (1.0 - g) + 2.0 * p,
    "a constant": lambda p, g, t: g.clamp(-1.0, 1.0 if t < 4 else 2.0),
    "a whole power": lambda p, g, t: g.pow(2 if t < 4 else 3) + (g.abs() + 1.0).pow(2.0 if t < 4 else 2),
    "a limit": lambda p, g, t: g * (g > (0 if t < 4 else 1)) + g * (p.abs() > (0.5 if t < 4 else 0)),
    "numbers of where": lambda p, g, t: torch.where(g > 0, g, 1.0 if t < 4 else 2.0).mul(torch.where(p > 0, 2.0, 3.0)),
    "two numbers": lambda p, g, t: g.add(2.0 * t, alpha=0.5).sub(p, alpha=0.25).add(1, alpha=2 if t < 4 else 3),
    "a named limit": lambda p, g, t: g.clamp(min=-1.0, max=0.5 if t < 4 else 1.0),
    "positions by name": lambda p, g, t: g.lerp(end=p, weight=0.1 * t).lerp(weight=0.5, end=g if t < 4 else p),
    "a dimension": lambda p, g, t: g * g.sum(dim=0 if t < 4 else 1, keepdim=True),
    "a view": lambda p, g, t: g.t().t() * (p.data if t < 4 else p.detach()),
    "a part": lambda p, g, t: g * g.view(-1)[:4] if t < 4 else g * g.view(-1)[4:8],
    "zero": lambda p, g, t: torch.copysign(g.abs(), (p * 0.0).mul_(1.0 if t < 4 else -1.0)),
    "more calls": lambda p, g, t: g.sin() if t < 4 else g.sin().cos(),
}


@pytest.mark.parametrize("how", CHANGED)
def test_a_step_that_does_something_else_is_right(how: str, traced: None) -> None:
    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        p.sub_(CHANGED[how](p, g, t), alpha=lr)

    _assert_right(update)


def test_a_method_that_is_exchanged_is_called(monkeypatch: pytest.MonkeyPatch, traced: None) -> None:
    plain = torch.Tensor.mul

    def update(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        if t == 4:
            monkeypatch.setattr(torch.Tensor, "mul", lambda x, y: plain(x, 2 * y))
        p.sub_(g.mul(2.0), alpha=lr)
        monkeypatch.setattr(torch.Tensor, "mul", plain)

    _assert_right(update)
