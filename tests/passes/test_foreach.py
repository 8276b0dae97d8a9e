"""All of `torch._foreach_*`, small tensors filled with a number, and masks: what torch does, or a reason."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from as_written import Written, equal, parameters, run, values
from running import as_written_too, compiled_only
from sampling import part
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.functionalize.recorded_ops import Op, Ref
from collage_neuron.trace.foreach import unrolled

pytestmark = pytest.mark.usefixtures("rejecting")


# --- all of `torch._foreach_*`: each overload does what torch does, or is rejected with a reason ----------------------

OPERATIONS = {
    f"{name} {overload}": getattr(getattr(torch.ops.aten, name), overload)
    for name in sorted(x for x in dir(torch) if x.startswith("_foreach_"))
    for overload in getattr(torch.ops.aten, name).overloads()
    if not overload.endswith("out")
}

REWRITTEN = {
    "abs", "add", "addcdiv", "addcmul", "clamp_max", "clamp_min", "copy", "div", "exp", "lerp", "log", "maximum",
    "minimum", "mul", "neg", "pow", "reciprocal", "rsqrt", "sigmoid", "sign", "sqrt", "sub", "zero",
}  # fmt: skip
AS_WRITTEN = {
    "_foreach_addcdiv Tensor", "_foreach_addcdiv_ Tensor", "_foreach_addcmul Tensor", "_foreach_addcmul_ Tensor",
    "_foreach_pow List", "_foreach_pow_ List", "_foreach_pow ScalarAndTensor",
}  # fmt: skip
"""Overloads of those that are not: a number of each parameter in one tensor, and an exponent of each element."""


class Foreach(Optimizer):
    """Applies one operation to what is made of the gradients, with another number in each step."""

    def __init__(self, params: Any, operation: Any) -> None:
        super().__init__(params, {"lr": 1e-2})
        self.operation, self.number = operation, 0.25

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        params = [p for p in group["params"] if p.grad is not None]
        xs, ys = [p.grad * 1.0 for p in params], [p.grad * 0.5 + 0.25 for p in params]
        result = self.operation(*self.arguments(xs, ys))
        if self.operation._schema.name.endswith("_"):
            result = xs
        for p, x in zip(params, result, strict=True):
            p.sub_(group["lr"] * x)
        self.number += 0.125

    def arguments(self, xs: Sequence[Tensor], ys: Sequence[Tensor]) -> list[Any]:
        made: list[Any] = []
        lists = iter([xs, ys, ys])
        for a in self.operation._schema.arguments:
            kind = str(a.type)
            if kind == "List[Tensor]":
                made.append(next(lists))
            elif kind == "List[number]":
                made.append([self.number] * len(xs))
            elif kind == "Tensor":
                made.append(torch.full((len(xs),) if a.name == "scalars" else (), self.number))
            elif not a.has_default_value():
                made.append(self.number)
        return made


def trained_together(operation: Any, **settings: Any) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(4, 3, generator=g)) for _ in range(2)]
    optimizer: Optimizer = Foreach(params, operation)
    if settings:
        optimizer = collage_neuron.compile(optimizer, verbose=False, **settings)
    for _ in range(2):
        for p in params:
            p.grad = (0.1 + 0.8 * torch.rand(4, 3, generator=g)).bfloat16().to(p.dtype)
        optimizer.step()
    return [collage_neuron.exact_value(optimizer, p) if settings else p.detach() for p in params]


REASONS = r"has no rule|not elementwise|another tensor of shape \(2,\)|Expected scalars to be on CPU, got meta"


def forms() -> Iterator[str]:
    """Of an overload and the one that writes in place CI runs one: both are taken apart into the same calls."""
    for name in OPERATIONS:
        if "_ " not in name:
            yield from part([x for x in (name, name.replace(" ", "_ ")) if x in OPERATIONS], 2, name)
        elif name.replace("_ ", " ") not in OPERATIONS:
            yield name


@pytest.mark.parametrize("name", [*forms()])
@as_written_too()
def test_each_does_what_torch_does_or_is_rejected_with_a_reason(name: str) -> None:
    reason = ""
    try:
        with compiled_only():
            found = trained_together(OPERATIONS[name], strategy="split444")
    except UnsupportedUpdate as error:
        reason, found = str(error), trained_together(OPERATIONS[name], strategy="split444")
    if name.split()[0].removeprefix("_foreach_").rstrip("_") in REWRITTEN and name not in AS_WRITTEN:
        assert reason == ""
    assert not reason or re.search(REASONS, reason)
    for ours, theirs in zip(found, trained_together(OPERATIONS[name]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_overload_that_no_single_tensor_has_is_rejected() -> None:
    ref = Ref(0, 0, (2,), (1,))
    with pytest.raises(UnsupportedUpdate, match=r"calls torch\._foreach_sqrt, which has no form"):
        list(unrolled(Op(torch.ops.aten._foreach_sqrt.default, ((ref,), (ref,)), (), (ref,))))


# --- small tensors that a step fills with a number (`torch.full_like` of a norm): captured, with a slot for the number

FILLS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "alone": lambda n, x: torch.full_like(n, x),
    "in a product": lambda n, x: torch.full_like(n, x) * n,
    "branch": lambda n, x: torch.where(n > 0.5, 1 / n, torch.full_like(n, x)),
    "not finite": lambda n, x: torch.where(torch.isfinite(n), n, torch.full_like(n, x)),
    "new": lambda n, x: n + n.new_full(n.shape, x),
    "by shape": lambda n, x: n + torch.full(n.shape, x, device=n.device),
    "ones": lambda n, x: torch.ones_like(n) + torch.zeros_like(n) * x,
}
SHAPES = ((24, 40), (40, 16))
SMALL: dict[str, Callable[[Tensor], Tensor]] = {
    "a norm": lambda g: g.norm(),
    "of rows": lambda g: g.square().mean(-1, keepdim=True).sqrt(),
}


def filling(fill: str, small: str) -> type[Written]:
    class Filling(Written):
        count = 0

        def update(self, p: Any, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
            p.sub_(g * FILLS[fill](SMALL[small](g), 0.25 + self.count), alpha=group["lr"])

        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            self.count += 1

    return Filling


def trained_with_fill(make: type[Written]) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """In float64: the first values, those after four steps, and how long the way was."""
    params = parameters(torch.float64, SHAPES)
    start, optimizer = [p.detach().clone() for p in params], make(params)
    way = [torch.zeros_like(x) for x in start]
    for number in range(4):
        before = [p.detach().clone() for p in params]
        run(optimizer, 1, first=number)
        way = [w + (p.detach() - x).abs() for w, p, x in zip(way, params, before, strict=True)]
    return start, [p.detach() for p in params], way


@pytest.mark.parametrize("small", SMALL)
@pytest.mark.parametrize("fill", FILLS)
def test_a_small_tensor_may_be_filled(fill: str, small: str) -> None:
    """A step is within 16 roundings of fp32 of its own length, and is added with one of the parameter."""
    make, found = filling(fill, small), []
    for backend in ("reference", "native"):
        params = parameters(torch.bfloat16, SHAPES)
        optimizer = collage_neuron.compile(make(params), strategy="fp32", backend=backend, verbose=False)
        run(optimizer, 4)
        found.append(values(optimizer, params))
    assert equal(*found)
    for ours, start, theirs, way in zip(found[0], *trained_with_fill(make), strict=True):
        assert way.max() > 2**-10
        assert ((ours - theirs).abs() <= 2**-20 * way + 4 * 2**-24 * (start.abs() + way)).all()


# --- masks that are made of masks, or known to the host, choose what torch's masks choose -----------------------------

Rule = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

RULES: dict[str, Rule] = {
    "isfinite": lambda g, m, lr: torch.where(torch.isfinite(g), m, torch.zeros_like(g)),
    "product": lambda g, m, lr: torch.where((g > 0) * (m > 0), m, g + 1.0),
    "sum": lambda g, m, lr: ((g > 0) + (m > 0)) * m,
    "mask chosen by a mask": lambda g, m, lr: torch.where(torch.where(g > 0, m > 0, g < -0.1), m, g),
    "numbers as truth": lambda g, m, lr: torch.where(torch.logical_and(g, m), m, g + 1.0),
    "known to the host": lambda g, m, lr: torch.where(torch.tensor(lr > 0.05), m, g),
    "known, and a number": lambda g, m, lr: torch.where(torch.tensor(lr > 0.05), 0.5, g),
}


class Chosen(Written):
    """A momentum, and a step that `rule` makes of it and of the gradient."""

    def __init__(self, params: Iterator[torch.nn.Parameter] | list[torch.nn.Parameter], rule: Rule) -> None:
        super().__init__(params, lr=0.1)
        self.rule = rule

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        m.mul_(0.9).add_(g, alpha=0.1)
        p.add_(self.rule(g, m, group["lr"]), alpha=-group["lr"])


def trained(rule: Rule, **options: Any) -> torch.Tensor:
    """The parameter after four steps, of which the last two have another learning rate."""
    g = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.zeros(300))
    optimizer: Any = Chosen([p], rule)
    if options:
        optimizer = collage_neuron.compile(optimizer, verbose=False, **options)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 0.1 if step < 2 else 0.01
        p.grad = torch.randn(300, generator=g).bfloat16().to(p.dtype)
        p.grad[:20] = 0.0
        optimizer.step()
    return collage_neuron.exact_value(optimizer, p) if options else p.detach()


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("backend", ["reference", "native"])
@as_written_too()
def test_masks_choose_what_they_choose_in_fp32(name: str, backend: str) -> None:
    with nullcontext() if name.startswith("known") else compiled_only():
        found = trained(RULES[name], strategy="fp32", backend=backend)
    assert (found - trained(RULES[name])).abs().max() <= 2**-22


STORED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"comparison": lambda g: g > 0, "isnan": torch.isnan}


class Stored(Chosen):
    """Keeps a mask as numbers, and makes weights of one."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(m, alpha=group["lr"])
                m.copy_(self.rule(p.grad, m, group["lr"]))


@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("strategy", ["fp32", "plus", "split433"])
@compiled_only()
def test_a_mask_is_stored_as_numbers(name: str, strategy: str) -> None:
    p = torch.nn.Parameter(torch.zeros(40))
    optimizer: Any = Stored([p], lambda g, m, lr: STORED[name](g))
    optimizer = collage_neuron.compile(optimizer, verbose=False, strategy=strategy)
    p.grad = torch.linspace(-2, 2, 40).bfloat16()
    p.grad[3] = torch.nan
    optimizer.step()
    assert torch.equal(optimizer.state[p]["m"].float(), STORED[name](p.grad).float())
