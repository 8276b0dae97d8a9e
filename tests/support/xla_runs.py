"""Runs of compiled optimizers on torch_xla's device and on the CPU, whose results are compared bit for bit."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.nn import Parameter

import collage_neuron

torch_xla = pytest.importorskip("torch_xla")
met = pytest.importorskip("torch_xla.debug.metrics")

Shapes = tuple[tuple[int, ...], ...]


def both(xla: torch.device) -> tuple[tuple[Any, str], ...]:
    return (xla, "xla"), ("cpu", "reference")


def compiled(make: Any, shapes: Shapes, device: torch.device | str, **settings: Any) -> Any:
    g = torch.Generator().manual_seed(0)
    params = [Parameter((0.3 * torch.randn(shape, generator=g)).bfloat16().to(device)) for shape in shapes]
    return collage_neuron.compile(make(params), verbose=False, **{"validate": "off", **settings})


def run(optimizer: Any, steps: int, first: int = 0, special: float = 0.0) -> None:
    """Steps with the same gradients on each device; one element of each is `special`, unless that is 0."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number in range(first, first + steps):
        g = torch.Generator().manual_seed(1000 + number)
        for p in params:
            grad = (0.1 * torch.randn(p.shape, generator=g)).bfloat16()
            grad.reshape(-1)[:1] = special or grad.reshape(-1)[:1]
            p.grad = grad.to(p.device)
        optimizer.step()
        torch_xla.sync()


def bits(optimizer: Any) -> Any:
    """All bits but those of the sign and the payload of NaN."""
    params = [p.detach().cpu() for group in optimizer.param_groups for p in group["params"]]
    states = [
        {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        for state in optimizer.state_dict()["state"].values()
    ]
    return params, states


def differing(some: Any, others: Any) -> list[str]:
    """What is not the same in two optimizers."""
    (params, states), (other_params, other_states) = bits(some), bits(others)
    pairs = [(f"param {i}", x, y) for i, (x, y) in enumerate(zip(params, other_params, strict=True))]
    pairs += [
        (f"{name} {i}", x[name], y[name])
        for i, (x, y) in enumerate(zip(states, other_states, strict=True))
        for name in x | y
    ]
    return [
        name
        for name, x, y in pairs
        if not torch.equal(torch.as_tensor(x).nan_to_num(7), torch.as_tensor(y).nan_to_num(7))
    ]


def counted() -> list[int]:
    """How many programs were compiled, and how many run; one that has run is counted a moment after it."""
    found = _counted()
    while True:
        time.sleep(0.01)
        before, found = found, _counted()
        if found == before:
            return found


def _counted() -> list[int]:
    data = [met.metric_data(name) for name in ("CompileTime", "ExecuteTime")]
    return [0 if x is None else int(x[0]) for x in data]
