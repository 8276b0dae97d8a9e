"""Values that a step reads with `.item()` and computes with: numbers of the device, within bounds, never wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from as_written import Written, assert_near, on_both_backends, run, values
from running import as_written_too
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Adafactor

import collage_neuron
from collage_neuron.states.bookkeeping import bookkeeping


class Scaled(Written):
    """Divides by a norm that Python reads; every operation that such a number has, on either side."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        n = g.norm().item()
        size = abs(-(2 * n)) / math.sqrt(p.numel())
        rate = (1.0 + n) / (9.0 - n) / (n + 3) ** 2 * (n - 0.125) / size**0.5
        p.add_(g, alpha=-group["lr"] * rate)
        p.addcmul_(g, g, value=+rate * 1e-2).div_(1 + n)


class Alpha(Written):
    """Hands 0-d tensors to torch where it takes numbers: torch reads them itself."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        m.mul_(0.9).add_(g, alpha=g.square().mean().sqrt())
        p.addcdiv_(m, g.abs() + 1.0, value=-group["lr"] / (m.norm() + 1.0))


class Relative(Written):
    """Adafactor's two numbers: the step is relative to the size of the parameter, and is clipped by its own."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        v = state.setdefault("v", torch.zeros_like(p)).lerp_(g * g, 0.1)
        alpha = max(1e-3, p.norm(2).item() / p.numel() ** 0.5) * group["lr"]
        u = g / (v.sqrt() + 1e-8)
        p.add_(u, alpha=-alpha / max(1.0, u.norm(2).item() / p.numel() ** 0.5))


class Between(Written):
    """A number between two others, and the smaller of two that are read."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        n, m = g.norm().item(), p.norm().item()
        rate = min(0.5, max(0.1, n / (m + 1e-3)))
        p.sub_(g * rate, alpha=group["lr"] / min(m + 1, n + 1))


class Before(Written):
    """Reads a state of one number, and the parameter's sum, before it changes both."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=0, size=g.norm())
        size, total = state["size"].item(), p.sum().item()
        state["size"].mul_(0.5).add_(g.norm(), alpha=0.5)
        p.sub_(g, alpha=group["lr"] / (1 + size))
        p.add_(g, alpha=1e-3 * total / (1.0 + abs(total)))
        state["step"] += 1


class ByRow(Written):
    """Means of rows as a state, and a number that Python reads: as `torch.optim.Adafactor` has both."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if p.dim() > 1:
            row = state.setdefault("row", g.new_zeros((*p.shape[:-1], 1)))
            g = g / (row.lerp_(g.square().mean(dim=-1, keepdim=True), 0.3) + 1e-6).sqrt()
        p.sub_(g, alpha=group["lr"] / max(1.0, 0.9 * g.norm().item() / p.numel() ** 0.5))


ALL = (Scaled, Alpha, Relative, Between, Before, ByRow)

SHAPES = ((24, 40), (24, 40), (3, 5, 37), (17,))
FACTORED = partial(Adafactor, lr=0.05, weight_decay=0.1)

pytestmark = pytest.mark.usefixtures("rejecting")


def parameters(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES, size: float = 0.3) -> list[Parameter]:
    g = torch.Generator().manual_seed(0)
    return [Parameter((size * torch.randn(shape, generator=g)).bfloat16().to(dtype)) for shape in shapes]


def compiled(make: Any, strategy: str = "full", size: float = 0.3, **settings: Any) -> tuple[Any, list[Parameter]]:
    params = parameters(torch.bfloat16, size=size)
    settings = {"validate": "off", **settings}  # on in test_backends_give_the_same_bits
    return collage_neuron.compile(make(params), strategy=strategy, verbose=False, **settings), params


def in_dtype(make: Any, steps: int, dtype: torch.dtype, size: float = 0.3) -> list[Tensor]:
    params = parameters(dtype, size=size)
    run(make(params), steps)
    return [p.detach() for p in params]


def near(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """Returns True if they differ by some roundings of fp32: a launched update is in another order than torch's."""
    return all(torch.allclose(x, y, rtol=2**-20, atol=2**-22) for x, y in zip(ours, theirs, strict=True))


CLIPPED = partial(Adafactor, lr=0.05, d=1.5, eps=(1e-12, 1e-3), maximize=True)
SIZES = [*((make, 0.3) for make in (*ALL, FACTORED)), (CLIPPED, 1e-6), (CLIPPED, 30.0)]
"""Of weights that are tiny, and huge, Adafactor's `max` has either outcome."""


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize(("make", "size"), SIZES)
def test_it_is_as_near_to_float64_as_fp32_is(make: Any, size: float) -> None:
    """Within 2**-18 of a step, six steps long: some thirty roundings of 2**-24, of which few add up."""
    optimizer, params = compiled(make, "fp32", size)
    run(optimizer, 6)
    assert not bookkeeping(optimizer).as_written
    exact = in_dtype(make, 6, torch.float64, size)
    assert_near(optimizer, params, exact, parameters(torch.float64, size=size), 6)


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("make", [*ALL, FACTORED])
def test_backends_give_the_same_bits(make: Any) -> None:
    def four_steps(**settings: Any) -> Any:
        optimizer, _ = compiled(make, "split433", **settings)
        run(optimizer, 4)
        return optimizer

    reference, native = on_both_backends(four_steps)
    assert native == reference


class Chosen(Written):
    """Adds the larger of a number and the gradient's mean, plus twice the smaller of it and another one."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        mean = g.mean().item()
        p.add_(torch.ones_like(p), alpha=max(0.25, mean) + 2 * min(mean, 0.75))


@pytest.mark.parametrize("mean", [-2.0, 0.25, 0.5, 0.75, 3.0, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_each_outcome_is_the_one_that_python_has(mean: float, backend: str) -> None:
    """Also with NaN, of which `max(0.25, x)` and `min(x, 0.75)` make different things."""
    p, q = (Parameter(torch.zeros(4, 8, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    optimizer = collage_neuron.compile(Chosen([p]), strategy="fp32", backend=backend, verbose=False, validate="off")
    for each, stepped in ((p, optimizer), (q, Chosen([q]))):
        each.grad = torch.full_like(each, mean)
        stepped.step()
    assert torch.allclose(values(optimizer, [p])[0], q.detach(), rtol=0, atol=0, equal_nan=True)


# --- what Python does with such a number ----------------------------------------------------------------------------


def reading(use: Any, make: Any = lambda x: x.norm()) -> type[Written]:
    """An optimizer that does something with the norm of the gradient, and steps by the result."""

    class Reading(Written):
        def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p.sub_(g, alpha=group["lr"] * use(make(g).item(), p, state, self))

    return Reading


def caught(x: float, *_: Any) -> float:
    try:
        return 1.0 / float(x)
    except Exception:
        return 1.0


def handled(x: float, *_: Any) -> float:
    try:
        return 1.0 / x
    except ZeroDivisionError:
        return 1.0


def handled_outside(x: float, *_: Any) -> float:
    try:
        return (lambda: x**3)()
    except:  # noqa: E722  # the way that names no exception
        return 1.0


def suppressed(x: float, *_: Any) -> float:
    found = 1.0
    with suppress(ZeroDivisionError):
        found = 2.0 / x
    return found


def attribute(x: float, p: Tensor, state: dict[str, Any], self: Any) -> float:
    self.last = x
    return 1.0


def kept(x: float, p: Tensor, state: dict[str, Any], self: Any) -> float:
    state["last"] = [x]
    return 1.0


def operations(x: float, p: Tensor, *_: Any) -> float:
    (p.mul_ if max(x, 1.0) is x else p.add_)(0.5)
    return 1.0


STEERING: dict[str, Any] = {
    "branch": lambda x, *_: 1.0 if x > 1 else x,
    "truth": lambda x, *_: 1.0 if x else 2.0,
    "all": lambda x, *_: 1.0 if all([x < 4.0]) else max(x, 0.1),
    "or": lambda x, *_: x or 2.0,
    "equal": lambda x, *_: 1.0 if x == 1 else 2.0,
    "member": lambda x, *_: 1.0 if x in (1.0, 2.0) else 2.0,
    "key": lambda x, *_: {1.0: 2.0}.get(x, 1.0),
    "float": lambda x, *_: float(x),
    "int": lambda x, *_: int(x),
    "round": lambda x, *_: round(x),
    "floor": lambda x, *_: x // 1,
    "remainder": lambda x, *_: x % 1,
    "root": lambda x, *_: math.sqrt(x),
    "finite": lambda x, *_: 1.0 if math.isfinite(x) else 0.0,
    "whole": lambda x, *_: 1.0 if x.is_integer() else 2.0,
    "exponent": lambda x, *_: 2.0**x,
    "type": lambda x, *_: 1.0 if type(x) is float else 2.0,
    "power": lambda x, *_: x**x,
    "other power": lambda x, *_: x ** (1 / 3),
    "tiny": lambda x, *_: x / (x + 1e-60),
    "large": lambda x, *_: min(1e300, x),
    "text": lambda x, *_: len(f"{x:.2f}"),
    "caught": caught,
    "handled": handled,
    "handled outside": handled_outside,
    "suppressed": suppressed,
    "tensor": lambda x, *_: torch.tensor(x),
    "host tensor": lambda x, *_: torch.ones(()) * x,
    "state": kept,
    "attribute": attribute,
    "no effect": lambda x, *_: (max(1.0, x), 1.0)[1],
    "operations": operations,
    "four": lambda x, *_: math.prod(max(y, x) for y in (1.0, 2.0, 3.0, 4.0)),
    "cancelling": lambda x, *_: (x + 1e8) - 1e8,
    "tiny sum": lambda x, *_: (1 + x * 1e-8) - 1,
    "two sums": lambda x, *_: (1 + x) - x,
    "far away": lambda x, *_: x * 1e30 / 1e30,}  # fmt: skip


def far_and_back(x: float, *others: Any) -> float:
    x = (((16 * x) ** 4) ** 4) ** 4  # beyond 2**128 for a double, infinite in fp32
    for _ in range(6):
        x = x**0.5
    return x / 16


class Largest(Written):
    """Keeps the largest norm of all parameters so far in a step: one depends on those before it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        largest = 0.1
        for p in self.param_groups[0]["params"]:
            largest = max(largest, p.grad.norm().item())
            p.sub_(p.grad / largest, alpha=0.1)


class Sorted(Written):
    """Functions of Python's that compare and choose may be any: the second of three numbers."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=sorted([0.01, g.norm().item()])[1] * group["lr"])


CAPTURED: dict[str, Any] = {
    "beyond fp32": reading(far_and_back), "of another parameter": Largest, "sorted": Sorted,
    "a rate that is a tensor": partial(Adafactor, lr=torch.tensor(0.05)),
}  # fmt: skip
AS_WRITTEN = {
    **{name: reading(use) for name, use in STEERING.items()},
    "an integer": reading(lambda x, *_: x / 10, lambda g: (g > 0).sum()),
    "a truth value": reading(lambda x, *_: 1.0 if x else 2.0, lambda g: g.norm() > 1),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_what_runs_captured_is_right(name: str) -> None:
    optimizer, params = compiled(CAPTURED[name], "fp32")
    run(optimizer, 3)
    assert not bookkeeping(optimizer).as_written
    assert near(values(optimizer, params), in_dtype(CAPTURED[name], 3, torch.float32))


@pytest.mark.parametrize("name", AS_WRITTEN)
@as_written_too()
def test_whatever_python_does_with_it_is_right(name: str) -> None:
    optimizer, params = compiled(AS_WRITTEN[name], "fp32")
    run(optimizer, 3)
    assert near(values(optimizer, params), in_dtype(AS_WRITTEN[name], 3, torch.float32))
