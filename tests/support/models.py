"""Tiny models, gradients and bit-for-bit comparisons that several test files use."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from worlds import run_script as run_script

from collage_neuron.numerics.strategies import ARITHMETICS, STRATEGIES, possible

MODES = [(s, a) for s in STRATEGIES for a in ARITHMETICS if possible(s, a)]
"""Every strategy in each arithmetic it works in."""

REPRESENTATIVE = [s for s in STRATEGIES if not s.startswith("split")] + ["split433", "split422", "split311"]
"""Strategies that between them store in every format, for tests that take seconds for each."""

REPRESENTATIVE_MODES = [(s, a) for s, a in MODES if s in REPRESENTATIVE]

Bits = dict[str, Any]
"""Every number that training keeps, by name: integers for tensors, `repr` for the rest."""


def mlp(seed: int = 0) -> nn.Sequential:
    """A perceptron with two hidden layers, fp32, on the CPU."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 1))


def first(model: nn.Module) -> nn.Parameter:
    """The first parameter; of `mlp`, the first layer's matrix."""
    return next(model.parameters())


def example(name: str, needs: str) -> Any:
    """A script in examples/ as a module; skipped where its package is not installed."""
    pytest.importorskip(needs)
    return importlib.import_module(name)


class TinyGPT(nn.Module):
    """One block of a language model: embedding, norm, causal attention, output weights tied to the embedding."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        logits: torch.Tensor = self.head(x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        return logits


def gpt(seed: int = 0) -> TinyGPT:
    torch.manual_seed(seed)
    return TinyGPT()


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    """Gradients of a batch that depends on `seed` alone, added to those that are there; returns the loss."""
    p = next(model.parameters())
    g = torch.Generator().manual_seed(seed)
    if isinstance(model, TinyGPT):
        tokens = torch.randint(0, 11, (4, 9), generator=g).to(p.device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
    else:
        loss = model(torch.randn(8, 6, generator=g).to(p.device, p.dtype)).float().square().mean()
    loss.backward()
    return loss.detach()


def train(model: nn.Module, optimizer: Optimizer, seeds: Sequence[int]) -> None:
    """The loop of an ordinary script."""
    for seed in seeds:
        optimizer.zero_grad()
        backward(model, seed)
        optimizer.step()


def step_with(optimizer: Optimizer, gradient: Callable[[nn.Parameter], Any]) -> None:
    """One step with the gradients that a function gives."""
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        p.grad = gradient(p)
    optimizer.step()


def follow(optimizer: Optimizer, seeds: Iterable[int]) -> Optimizer:
    """Steps with gradients that depend on the seed alone, each element a normal number."""
    for seed in seeds:
        g = torch.Generator().manual_seed(seed)
        step_with(optimizer, lambda p, g=g: torch.randn(p.shape, generator=g).to(p.dtype))  # type: ignore[misc]
    return optimizer


def through_torch_save(x: Any, weights_only: bool = False) -> Any:
    torch.save(x, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def bits(t: torch.Tensor) -> torch.Tensor:
    """The tensor as integers on the CPU: -0.0 is not 0.0, and a NaN equals itself."""
    t = t.detach().cpu()
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return t.clone() if not t.is_floating_point() else t.contiguous().view(integers[t.element_size()]).clone()


def snapshot(optimizer: Optimizer) -> Bits:
    """All bits of the parameters, their gradients and states, and the settings of the groups."""
    found: Bits = {}
    for i, group in enumerate(optimizer.param_groups):
        found |= {f"group {i}, {k}": repr(v) for k, v in group.items() if k != "params"}
        for j, p in enumerate(group["params"]):
            own = {"param": p, "grad": p.grad} | dict(optimizer.state.get(p, {}))
            found |= {f"{i}.{j} {k}": (v.dtype, bits(v)) if is_dense(v) else repr(v) for k, v in own.items()}
    return found


def is_dense(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type != "meta"


def differences(a: Bits, b: Bits) -> list[str]:
    """Names under which two snapshots do not hold the same bits."""
    return [k for k in {**a, **b} if k not in a or k not in b or not _equal(a[k], b[k])]


def _equal(x: Any, y: Any) -> bool:
    if isinstance(x, tuple) and isinstance(y, tuple):
        return bool(x[0] == y[0]) and torch.equal(x[1], y[1])
    return bool(type(x) is type(y) and x == y)


SHAPES = ((16, 8), (8,), (3, 4, 5))


def parameters(
    seed: int = 0, shapes: Sequence[tuple[int, ...]] = SHAPES, dtype: torch.dtype = torch.float32
) -> list[nn.Parameter]:
    """Parameters of standard deviation 1 whose gradients are set by hand; the same numbers for every dtype."""
    g = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=g).to(dtype)) for s in shapes]


def set_gradients(params: Sequence[nn.Parameter], seed: int) -> None:
    """Gradients that are bf16 numbers, so that an optimizer in any dtype gets the same.

    Each element keeps its sign and lies in [1, 2): what one step adds is far below half an ulp of a bf16 parameter at
    the learning rates used here, and adds up over the steps.
    """
    g = torch.Generator().manual_seed(1000 + seed)
    for i, p in enumerate(params):
        sign = torch.randn(p.shape, generator=torch.Generator().manual_seed(i)).sign()
        p.grad = (sign * (1 + torch.rand(p.shape, generator=g) * (1 - 2**-8))).bfloat16().to(p.device, p.dtype)


def equal_states(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    """Returns True if two states of models have the same names, dtypes and numbers."""
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and torch.equal(a[k], b[k]) for k in a)
