"""All of `torch._foreach_*`: each overload does what torch does, or is rejected with a reason."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from running import compiled_only
from sampling import part
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.functionalize.recorded_ops import Op, Ref
from collage_neuron.trace.foreach import unrolled

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


def trained(operation: Any, **settings: Any) -> list[Tensor]:
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
def test_each_does_what_torch_does_or_is_rejected_with_a_reason(name: str) -> None:
    reason = ""
    try:
        with compiled_only():
            found = trained(OPERATIONS[name], strategy="split444")
    except UnsupportedUpdate as error:
        reason, found = str(error), trained(OPERATIONS[name], strategy="split444")
    if name.split()[0].removeprefix("_foreach_").rstrip("_") in REWRITTEN and name not in AS_WRITTEN:
        assert reason == ""
    assert not reason or re.search(REASONS, reason)
    for ours, theirs in zip(found, trained(OPERATIONS[name]), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_an_overload_that_no_single_tensor_has_is_rejected() -> None:
    ref = Ref(0, 0, (2,), (1,))
    with pytest.raises(UnsupportedUpdate, match=r"calls torch\._foreach_sqrt, which has no form"):
        list(unrolled(Op(torch.ops.aten._foreach_sqrt.default, ((ref,), (ref,)), (), (ref,))))
