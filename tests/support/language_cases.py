"""The 17 optimizers that language models are trained with, as their packages have them, on one small model.

`docs/measure_optimizers.py` measures them; tests/optimizers/test_language_optimizers.py checks how each runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, NamedTuple

import lion_pytorch
import pytorch_optimizer
import schedulefree
import torch
from methods import SophiaG
from torch import Tensor, nn
from torch.optim import Optimizer

import collage_neuron
from collage_neuron.states.bookkeeping import bookkeeping

COMPILED, STAGES, AS_WRITTEN = "compiled", "stages", "as written"
"""How an optimizer runs: elementwise, with sums of tensors, rows or columns, or as written (docs/as_written.md)."""


class Model(nn.Module):
    """An embedding, a projection of queries, a wide matrix and a vector, named as Adam-mini wants them."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed, self.q_proj, self.up, self.norm = (nn.Module() for _ in range(4))
        shapes = ((48, 64), (64, 64), (96, 64), (64,))
        for part, shape in zip((self.embed, self.q_proj, self.up, self.norm), shapes, strict=True):
            weight = (torch.randn(shape, generator=generator) * 0.02).bfloat16().to(dtype)
            part.register_parameter("weight", nn.Parameter(weight))


class Case(NamedTuple):
    """An optimizer: where it is from, how it is made of a model, and what it is measured against."""

    package: str
    make: Callable[[Model], Optimizer]
    runs: str
    reason: str = ""
    """Why it is not compiled."""
    reference: torch.dtype = torch.float64
    """float32 where its own code rounds to fp32, and float64 parameters would not make it more accurate."""
    between: Callable[[Any, int], None] | None = None
    """What training code calls after a step, given the number of the step."""


def _matrices(model: Model) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def _galore(model: Model) -> Optimizer:
    low_rank = {"rank": 16, "update_proj_gap": 50, "scale": 0.25, "projection_type": "std"}
    groups: Any = [{"params": _matrices(model), **low_rank}, {"params": [model.norm.weight]}]
    return pytorch_optimizer.GaLore(groups)


def _curvature(optimizer: Any, number: int) -> None:
    if number % 10 == 0:
        optimizer.update_hessian()


CASES: dict[str, Case] = {
    "AdamW": Case("torch", lambda m: torch.optim.AdamW(m.parameters(), weight_decay=0.1, foreach=False), COMPILED),
    "Lion": Case("lion_pytorch", lambda m: lion_pytorch.Lion(m.parameters()), COMPILED),
    "ADOPT": Case("pytorch_optimizer", lambda m: pytorch_optimizer.ADOPT(m.parameters()), COMPILED),
    "schedule-free": Case(
        "schedulefree", lambda m: schedulefree.AdamWScheduleFree(m.parameters(), lr=1e-3, foreach=False), COMPILED
    ),
    "AdEMAMix": Case("pytorch_optimizer", lambda m: pytorch_optimizer.AdEMAMix(m.parameters()), COMPILED),
    "Sophia": Case(
        "as published: SophiaG", lambda m: SophiaG(m.parameters(), lr=1e-3), COMPILED, between=_curvature
    ),
    "Muon": Case(
        "torch", lambda m: torch.optim.Muon(_matrices(m), lr=1e-2), AS_WRITTEN, "matrix products, in bf16"
    ),
    "SOAP": Case(
        "pytorch_optimizer", lambda m: pytorch_optimizer.SOAP(m.parameters()), AS_WRITTEN,
        "matrix products; eigenvectors in lists", reference=torch.float32,
    ),
    "Shampoo": Case(
        "pytorch_optimizer", lambda m: pytorch_optimizer.Shampoo(m.parameters()), AS_WRITTEN,
        "matrix products; states of other shapes",
    ),
    "Adafactor": Case("torch", lambda m: torch.optim.Adafactor(m.parameters(), foreach=False), STAGES),
    "CAME": Case("pytorch_optimizer", lambda m: pytorch_optimizer.CAME(m.parameters()), STAGES),
    "Prodigy": Case(
        "pytorch_optimizer",  # without a limit its step grows to infinity on gradients that never change their mean
        lambda m: pytorch_optimizer.Prodigy(m.parameters(), d0=1e-5, growth_rate=1.02), COMPILED,
    ),
    "LAMB": Case("pytorch_optimizer", lambda m: pytorch_optimizer.Lamb(m.parameters(), foreach=False), STAGES),
    "MARS": Case("pytorch_optimizer", lambda m: pytorch_optimizer.MARS(m.parameters()), STAGES),
    "StableAdamW": Case("pytorch_optimizer", lambda m: pytorch_optimizer.StableAdamW(m.parameters()), STAGES),
    "Adam-mini": Case(
        "pytorch_optimizer",
        lambda m: pytorch_optimizer.AdamMini(m, lr=1e-3, num_embeds=64, num_heads=4), STAGES,
    ),
    "GaLore": Case("pytorch_optimizer", _galore, AS_WRITTEN, "matrix products; moments of low rank"),
}  # fmt: skip


def gradients(shapes: Sequence[torch.Size]) -> Iterator[list[Tensor]]:
    """bf16 gradients of torch_cases, for several parameters: a mean of random sign under noise twice as large."""
    generator = torch.Generator().manual_seed(0)
    means = [torch.randn(shape, generator=generator).sign() * 5e-2 for shape in shapes]
    while True:
        yield [(m + 0.1 * torch.randn(m.shape, generator=generator)).bfloat16() for m in means]


def trained(
    case: Case, dtype: torch.dtype, steps: int, strategy: str | None = None, nudged: bool = False
) -> tuple[Any, list[Tensor]]:
    """The optimizer after `steps`, and the exact values of its parameters; compiled if there is a strategy.

    If `nudged`, a random half of the elements of each gradient is an ulp of fp32 larger.
    """
    generator = torch.Generator().manual_seed(2)
    model = Model(dtype)
    torch.manual_seed(0)
    optimizer: Any = case.make(model)
    if strategy is not None:
        model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy, validate="off")
    if hasattr(optimizer, "train"):
        optimizer.train()
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number, grads in zip(count(), gradients([p.shape for p in params])):
        if number == steps:
            break
        for p, g in zip(params, grads, strict=True):
            p.grad = g.to(p.dtype)
            if nudged:
                p.grad.mul_(1 + 2**-23 * torch.randint(0, 2, p.shape, generator=generator))
        torch.manual_seed(number)  # for those that draw
        optimizer.step()
        if case.between is not None:
            case.between(optimizer, number)
    if strategy is None:
        return optimizer, [p.detach() for p in params]
    return optimizer, [collage_neuron.exact_value(optimizer, p) for p in params]


def how(optimizer: Optimizer) -> str:
    """How the steps of a compiled optimizer run."""
    if bookkeeping(optimizer).as_written:
        return AS_WRITTEN
    return STAGES if "reduction:" in collage_neuron.explain(optimizer, graphs=True) else COMPILED
