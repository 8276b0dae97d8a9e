"""What several files of tests of preconditions share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_written import Written
from models import differences, parameters, set_gradients, snapshot
from torch import nn
from torch.optim import Optimizer

import collage_neuron


def refused(optimizer: Optimizer, error: type[Exception], message: str, **settings: Any) -> None:
    """`compile(optimizer)` raises, and leaves the optimizer, its groups, parameters and states as they were."""
    kind, before = type(optimizer), snapshot(optimizer)
    dtypes = [p.dtype for group in optimizer.param_groups for p in group["params"]]
    with pytest.raises(error, match=message) as caught:
        collage_neuron.compile(optimizer, **settings)
    assert "\n" not in str(caught.value), "a sentence, not a traceback"
    assert type(optimizer) is kind
    assert differences(snapshot(optimizer), before) == []
    assert [p.dtype for group in optimizer.param_groups for p in group["params"]] == dtypes


class Acts(Written):
    """SGD with momentum and a step count; before it updates a parameter it does what the group's `act` says."""

    def __init__(self, params: Any, act: Callable[[torch.Tensor], Any], lr: float = 0.1) -> None:
        super().__init__(params, lr=lr, act=act)

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"], state["momentum"] = 0, torch.zeros_like(p)
        state["step"] += 1
        group["act"](p)
        state["momentum"].mul_(0.9).add_(g)
        p.add_(state["momentum"], alpha=-group["lr"])


def grad(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


stranger = torch.ones(8, 8, device="meta")

NOT_ELEMENTWISE = r"the update is not elementwise: aten.{}.* turns the parameter's shape \[8, 8\] into .*leave it unc"

NO_RULE = (
    r"the update uses aten.{}.* \(node .*\), which has no rule; write .*"
    r"keys of collage_neuron.passes.rewrite.rules.RULES"
)

BY_INDEX = r"writes to some elements by index; only x\[mask\] = number is elementwise"

WAITS = r"aten.{}.default cannot wait"

IN_FP32 = r"aten.{}.default makes a tensor of torch.{}: updates are compiled in fp32"

UNSUPPORTED: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "norm": (lambda p: p.div_(grad(p).norm(p=4, dim=0)), NOT_ELEMENTWISE.format("linalg_vector_norm")),
    "mean": (lambda p: p.sub_(grad(p).mean(1)), NOT_ELEMENTWISE.format("mean")),
    "row": (lambda p: p[0].add_(1.0), NOT_ELEMENTWISE.format("select")),
    "part of a view": (lambda p: p.view(-1)[::2].add_(1.0), NOT_ELEMENTWISE.format("view")),
    "matrix product": (lambda p: p.add_(grad(p)[:4].T @ grad(p)[:4]), NOT_ELEMENTWISE.format("slice")),
    "cumulative sum": (lambda p: p.copy_(grad(p).cumsum(0)), NO_RULE.format("cumsum")),
    "noise": (lambda p: p.add_(torch.randn_like(p)), WAITS.format("randn_like")),
    "erfinv": (lambda p: p.copy_(torch.erfinv(p)), NO_RULE.format("erfinv")),
    "integers": (lambda p: p.add_(grad(p).int()), IN_FP32.format("_to_copy", "int32")),
    "made integers": (
        lambda p: p.add_(grad(p) * torch.full_like(p, 2.7, dtype=torch.int64)),
        IN_FP32.format("full_like", "int64"),
    ),
    "two indices": (lambda p: p.index_put_((grad(p) > 0, grad(p) < 0), torch.tensor(0.0)), BY_INDEX),
    "integer index": (lambda p: p.index_put_((torch.tensor([0]),), torch.tensor(0.0)), BY_INDEX),
    "transposed": (lambda p: p.t().add_(1.0), r"not elementwise: aten\.\w+\.\w+ takes the elements of a tensor"),
    "stranger": (
        lambda p: p.add_(stranger),
        r"a tensor of shape \[8, 8\] is neither a parameter, a gradient nor a state",
    ),
    "numpy": (lambda p: grad(p).numpy(), r"its memory is read"),
    "indices": (lambda p: grad(p).nonzero(), WAITS.format("nonzero")),
}

READING: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda p: p.mul_(round(grad(p).sum().item())),
    "float": lambda p: p.mul_(float(grad(p).sum())),
    "branch": lambda p: p.mul_(2.0) if (grad(p) > 0).any() else None,
    "isnan": lambda p: torch.isnan(grad(p)).any().item(),
    "equal": lambda p: p.neg_() if torch.equal(p, grad(p)) else p.mul_(0.5),
    "to the host": lambda p: p.add_(grad(p).cpu()),
    "other tensor": lambda p: p.add_(torch.ones(8)),
}
"""Steps that look at values, or make some, and are compiled."""


def matrices(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    params = parameters(0, ((8, 8), (8, 8)), dtype)
    set_gradients(params, 0)
    return params


def step_is_refused(optimizer: Optimizer, error: type[Exception], message: str) -> None:
    """`step` raises, and leaves parameters, gradients, states, step counts and groups as they were, bit for bit."""
    kind, before = type(optimizer), snapshot(optimizer)
    with pytest.raises(error, match=message):
        optimizer.step()
    assert type(optimizer) is kind
    assert differences(snapshot(optimizer), before) == []
