"""Models whose matmuls run in fp8, and a second, plain way to compute what they should: one function a layer."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from gpt import GPT, Shape
from torch import Tensor, nn
from torch.nn import functional as F

import collage_neuron
from collage_neuron.matmuls.capture import Captured
from collage_neuron.matmuls.forward import Fp8Forward
from collage_neuron.matmuls.install import forward_of
from collage_neuron.passes.fp8_scaling.plan import factors

SMALL = Shape(batch=4, block=16, width=32, heads=2, layers=1, vocab=64)
LIMITS = {"e4m3": (3, -6, 240.0), "e5m2": (2, -14, 57344.0)}
"""Mantissa bits, the exponent of the smallest normal number, and the largest number."""


def small_gpt(seed: int = 0) -> nn.Module:
    """A GPT in bf16, as `compile` makes it."""
    torch.manual_seed(seed)
    return GPT(SMALL).bfloat16()


def perceptron(seed: int = 0) -> nn.Module:
    """Three layers with biases, a norm that torch decomposes, dropout, and activations of several kinds, in bf16."""
    torch.manual_seed(seed)
    layers = nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.RMSNorm(32), nn.Linear(32, 16), nn.SiLU()
    return nn.Sequential(*layers, nn.Linear(16, 4)).bfloat16()


def small(width: int = 64) -> nn.Module:
    """Three layers for `batch`, in bf16."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Linear(64, 64), nn.Linear(64, 8)).bfloat16()


def batch(seed: int = 0, rows: int = 32, width: int = 64) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


def pair(model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A model in fp8 that measures, and one in bf16."""
    plain = small() if model is None else model
    return compiled(copy.deepcopy(plain), rescale=50, **options), plain


@torch.no_grad()
def error(found: Tensor, wanted: Tensor) -> float:
    """Relative, in norm."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def trained(model: nn.Module, batch: Tensor, loss: Callable[[Any, Tensor], Tensor] | None = None) -> Any:
    """The loss and the gradients of a batch of tokens."""
    model.zero_grad()
    found = (loss or loss_of)(model, batch)
    found.backward()
    return found.detach(), gradients(model)


def tokens(seed: int = 0, shape: tuple[int, int] = (4, 16)) -> Tensor:
    """A batch for the GPT or the Llama."""
    return torch.randint(64, shape, generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    """Of each token from its own: no shift, since nothing is to be learned."""
    return F.cross_entropy(model(batch).float().flatten(0, 1), batch.flatten())


def compiled(model: nn.Module, **options: Any) -> nn.Module:
    """The model with matmuls in fp8, without measurements unless asked for."""
    return collage_neuron.compile(model, matmul="fp8", **{"rescale": 0, **options})


def forward(model: nn.Module) -> Fp8Forward:
    """What stands in the place of its forward."""
    found = forward_of(model)
    assert found is not None
    return found


def graph(model: nn.Module, i: int = 0) -> Captured:
    """A graph of a model that has run."""
    return forward(model).backend.graphs[i]


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """The gradient of each parameter."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def rounded(x: Tensor, fmt: str) -> Tensor:
    """To nearest even, saturating, in float64 and by the definition of a floating-point number."""
    digits, least, largest = LIMITS[fmt]
    wide = x.double()
    exponent = torch.frexp(wide).exponent.double() - 1
    last = torch.exp2(exponent.clamp(min=least) - digits)
    return ((wide / last).round() * last).clamp(-largest, largest).float()


class Layer(torch.autograd.Function):
    """A linear layer in fp8, whose scales are given: 2**-e of its input, its weight and the gradient of its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, bias: Tensor | None, exponents: tuple[int, int, int]) -> Tensor:
        of_x, of_w, _ = exponents
        qx = rounded(x.float().flatten(0, -2) * 2.0**-of_x, "e4m3")
        qw = rounded(w.float() * 2.0**-of_w, "e4m3")
        ctx.save_for_backward(qx, qw)
        ctx.exponents, ctx.has_bias = exponents, bias is not None
        y = (qx @ qw.t()) * 2.0 ** (of_x + of_w)
        y = y if bias is None else y + bias.float()
        shaped: Tensor = y.to(x.dtype).unflatten(0, x.shape[:-1])
        return shaped

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        (qx, qw), (of_x, of_w, of_g) = ctx.saved_tensors, ctx.exponents
        flat = grad.flatten(0, -2)
        qg = rounded(flat.float() * 2.0**-of_g, "e5m2")
        gx = ((qg @ qw) * 2.0 ** (of_g + of_w)).to(grad.dtype).unflatten(0, grad.shape[:-1])
        gw = ((qg.t() @ qx) * 2.0 ** (of_g + of_x)).to(grad.dtype)
        return gx, gw, flat.sum(0) if ctx.has_bias else None, None


def reference(model: nn.Module, exponents: Callable[[str], tuple[int, int, int] | None]) -> nn.Module:
    """A copy of a plain model whose linear layers are `Layer`s, where there are exponents for a layer's name."""
    model = copy.deepcopy(model)
    for name, module in model.named_modules():
        found = exponents(name) if isinstance(module, nn.Linear) else None
        if found is not None:
            _put(module, found)
    return model


def _put(module: Any, exponents: tuple[int, int, int]) -> None:
    apply: Any = Layer.apply
    module.forward = lambda x: apply(x, module.weight, module.bias, exponents)


def by_layer(model: nn.Module) -> Callable[[str], tuple[int, int, int] | None]:
    """The exponents of a compiled model that has run, by the name of a layer; layers may share an input."""
    found = forward(model).backend.scales.exponents()
    plan = graph(model).plan

    def of(name: str) -> tuple[int, int, int] | None:
        mine = [p for p in plan.products if p.parameter == f"{name}.weight"]
        names = {(p.role, plan.operands[x].name) for p in mine for x in factors(p.node)}
        if not mine:
            return None
        (x,) = {n for role, n in names if role == "output" and n != f"{name}.weight"}
        (g,) = {n for role, n in names if role == "weight gradient" and n != x}
        return found[x], found[f"{name}.weight"], found[g]

    return of


def hlo(tensors: list[Tensor]) -> str:
    """The program that computes tensors on torch_xla's device."""
    from torch_xla import _XLAC as xlac  # type: ignore[attr-defined]  # C++, without stubs

    text: str = xlac._get_xla_tensors_hlo(tensors)
    return text


def dots(text: str) -> str:
    """The products of a program: the types and shapes of results and operands, sorted."""
    found = re.findall(r"= (\w+\[[\d,]+\])\{[\d,]+\} dot\((\w+\[[\d,]+\])\S* %\S+ (\w+\[[\d,]+\])", text)
    return "\n".join(sorted(f"{result} = {a} @ {b}" for result, a, b in found))


def largest_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> float:
    """The largest relative error among gradients, in norm."""
    assert found.keys() == wanted.keys()
    return max(float((found[n] - w).norm() / w.norm().clamp(min=2.0**-100)) for n, w in wanted.items())


def binades(x: Tensor) -> float:
    """log2 of the root mean square."""
    return math.log2(float(x.detach().double().square().mean().sqrt()))
