"""Optimizers that no capture can follow, written as people write them, and runs of them beside plain fp32."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import collage_neuron

Make = Callable[[list[Parameter]], Optimizer]

SHAPES = ((24, 40), (40, 16), (16,), (1,), ())


class Written(Optimizer):
    """Calls `update` for each parameter that has a gradient."""

    def __init__(self, params: Any, lr: Any = 0.02, **others: Any) -> None:
        super().__init__(params, {"lr": lr, **others})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, self.state[p], group)
        return loss

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


def orthogonal(x: Tensor) -> Tensor:
    """Newton and Schulz's iteration as Keller Jordan has it, in the dtype of `x`."""
    y = x.T if x.size(0) > x.size(1) else x
    y = y / (y.norm() + 1e-7)
    for _ in range(5):
        a = y @ y.T
        y = 3.4445 * y + (-4.7750 * a + 2.0315 * a @ a) @ y
    made: Tensor = y.T if x.size(0) > x.size(1) else y
    return made


class Muon(Written):
    """Momentum, made orthogonal; what is no matrix takes the momentum."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["step"], state["momentum_buffer"] = 0, torch.zeros_like(p)
        state["step"] += 1
        u = g.lerp(state["momentum_buffer"].lerp_(g, 0.05), 0.95)
        p.mul_(1 - 0.01 * group["lr"])
        p.add_(orthogonal(u) if p.dim() == 2 else u, alpha=-group["lr"])


class Lamb(Written):
    """LAMB, with gradients clipped by their norm over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.norm = math.sqrt(sum(float(g.norm()) ** 2 for g in grads))
        return super().step(closure)

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state.update(step=torch.tensor(0.0), exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        g = g / max(1.0, self.norm)
        m, v = state["exp_avg"].lerp_(g, 0.1), state["exp_avg_sq"].mul_(0.999).addcmul_(g, g, value=0.001)
        t = float(state["step"])
        u = m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + 0.01 * p
        p.add_(u, alpha=-group["lr"] * float(p.norm() / u.norm() if p.norm() > 0 and u.norm() > 0 else 1.0))


def Adafactor(params: Any) -> Optimizer:
    """torch's, whose loop reads root mean squares in Python."""
    return torch.optim.Adafactor(params, lr=0.02, foreach=False)


class Shampoo(Written):
    """Preconditioners in a list, their roots in a dictionary, momenta of lookahead in a nested one."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["sides"] = [torch.eye(n) for n in p.shape]
            state["kept"] = {"roots": {}, "count": 0}
        state["kept"]["count"] += 1
        for i, side in enumerate(state["sides"]):
            other = [d for d in range(g.dim()) if d != i]
            side.add_(torch.tensordot(p.grad, p.grad, dims=(other, other)) if other else torch.outer(g, g), alpha=0.05)
            if state["kept"]["count"] % 3 == 1:
                values, vectors = torch.linalg.eigh(side)
                state["kept"]["roots"][i] = vectors @ values.clamp(min=1e-6).pow(-0.25).diag() @ vectors.T
            g = torch.tensordot(g, state["kept"]["roots"][i], dims=([0], [0]))
        p.sub_(g, alpha=group["lr"])


class Prodigy(Written):
    """Estimates its step size over all parameters, in the group; keeps the first weights, and counts in integers."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        group = self.param_groups[0]
        d, numerator, denominator = group.setdefault("d", 1e-2), 0.0, 0.0
        for p in group["params"]:
            if p.grad is None:
                continue
            state = self.state[p]
            if not state:
                state["p0"], state["s"] = p.detach().clone(), torch.zeros_like(p)
                state["seen"] = torch.zeros(p.shape, dtype=torch.int64)
            state["seen"] += p.grad != 0
            numerator += d * float((p.grad * (state["p0"] - p)).sum())
            denominator += float(state["s"].add_(p.grad, alpha=d).abs().sum())
            p.sub_(p.grad, alpha=d)
        group["d"] = max(d, numerator / denominator if denominator else d)
        self.sums = [numerator, denominator]


class Noisy(Written):
    """Adds noise that is as large as the gradient."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g + torch.randn_like(g) * g.std(correction=0), alpha=group["lr"])


ALL: tuple[Make, ...] = (Muon, Lamb, Adafactor, Shampoo, Prodigy, Noisy)

LAUNCHED: tuple[Make, ...] = (Lamb, Adafactor)
"""Those that read numbers and are launched all the same: of them it is known once a step was taken."""


def initial(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [(0.3 * torch.randn(shape, generator=g)).bfloat16() for shape in shapes]


def parameters(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Parameter]:
    return [Parameter(w.to(dtype)) for w in initial(shapes)]


def run(optimizer: Optimizer, steps: int, first: int = 0) -> None:
    """Steps with gradients that depend on the number of the step alone, and so does the generator of torch."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for number in range(first, first + steps):
        g = torch.Generator().manual_seed(1000 + number)
        for p in params:
            p.grad = (0.1 * torch.randn(p.shape, generator=g)).bfloat16().to(p.dtype)
        torch.manual_seed(number)
        optimizer.step()


def compiled(
    make: Make, strategy: Any = "fp32", shapes: Sequence[tuple[int, ...]] = SHAPES, **settings: Any
) -> tuple[Any, list[Parameter]]:
    """Not validated unless that is asked for: tests that compare with plain torch have a better oracle."""
    params = parameters(torch.bfloat16, shapes)
    return collage_neuron.compile(make(params), strategy=strategy, **{"validate": "off", **settings}), params


def in_fp32(make: Make, steps: int) -> list[Tensor]:
    """The parameters after `steps` of the same optimizer in plain fp32."""
    params = parameters(torch.float32)
    run(make(params), steps)
    return [p.detach() for p in params]


def values(optimizer: Optimizer, params: Sequence[Parameter]) -> list[Tensor]:
    return [collage_neuron.exact_value(optimizer, p) for p in params]


def equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(some, others, strict=True))


def near(found: Sequence[Tensor], exact: Sequence[Tensor], steps: int) -> bool:
    """What is launched rounds in another order: a few units of fp32's last place of weights that move by a tenth."""
    return error(found, exact) < steps * 2**-20


def error(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """The norm of all differences over that of all changes since the start."""
    off = sum(float((x.double() - y.double()).square().sum()) for x, y in zip(found, exact, strict=True))
    moved = sum(float((y.double() - w.double()).square().sum()) for w, y in zip(initial(), exact, strict=True))
    return math.sqrt(off / moved)


def everything(optimizer: Any) -> Any:
    """All bits of an optimizer: parameters, states and settings, as they are stored."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return all_bits(params), [all_bits(optimizer.state.get(p, {})) for p in params], all_bits(groups)


def all_bits(x: Any) -> Any:
    if isinstance(x, Tensor):
        copied = x.detach().clone(memory_format=torch.contiguous_format)
        return str(x.dtype), tuple(x.shape), copied.reshape(-1).view(torch.uint8).cpu().numpy().tobytes()
    if isinstance(x, dict):
        return {k: all_bits(v) for k, v in x.items()}
    return [all_bits(y) for y in x] if isinstance(x, (list, tuple)) else x


def on_both_backends(run_on: Callable[..., Any]) -> list[Any]:
    """All bits, but for these settings, of an optimizer on the reference, which is validated, and in machine code."""
    return [but_for_backends(run_on(backend=b, validate=v)) for b, v in (("reference", "on"), ("native", "off"))]


def but_for_backends(optimizer: Any) -> Any:
    params, states, groups = everything(optimizer)
    settings = ("collage_backend", "collage_validate")
    return params, states, [{k: v for k, v in group.items() if k not in settings} for group in groups]


def assert_near(optimizer: Any, params: Any, exact: Any, start: Any, steps: int, bound: float = 2**-18) -> None:
    """Within `bound` of the longest way of an element of the parameter, but for one rounding of fp32 in each step."""
    for ours, theirs, before in zip(values(optimizer, params), exact, start, strict=True):
        stores = steps * 2**-24 * torch.maximum(before.detach().abs(), theirs.detach().abs())
        longest = (theirs.detach() - before.detach()).abs().max()
        assert ((ours - theirs.detach()).abs() <= bound * longest + 1.1 * stores).all()
