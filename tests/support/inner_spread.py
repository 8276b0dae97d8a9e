"""What the processes of `worlds` run: optimizers that step another one over FSDP2, DDP and ZeRO-1, beside plain torch.

Plain torch takes the same steps over fp32 values that are spread in the same way, with the gradients that the compiled
one had.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cases_of_inner import CASES, LR, TAKE_CLOSURES, Timm
from sharded_runs import full, model_of, refusal, shard
from torch import Tensor, nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import collage_neuron
from collage_neuron import exact_value

STEPS = 4


class Training(NamedTuple):
    """A model in training, and the same optimizer over values in fp32."""

    model: nn.Module
    params: list[Any]
    optimizer: Any
    values: list[Any]
    plain: Any


def over(name: str, strategy: str, is_sharded: bool) -> Training:
    """FSDP2, or DDP."""
    model = model_of(0)
    if is_sharded:
        shard(model)
    optimizer: Any = CASES[name](list(model.parameters()))
    model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy, verbose=False)
    params = list(model.parameters())
    values: list[Any] = [nn.Parameter(exact_value(optimizer, p)) for p in params]
    of_all = model if is_sharded else DistributedDataParallel(model, init_sync=False)
    return Training(of_all, params, optimizer, values, CASES[name](values))


def around_zero(strategy: str) -> Training:
    """Lookahead, compiled, around ZeRO-1."""
    model = model_of(0).bfloat16()
    params, values = list(model.parameters()), [nn.Parameter(p.detach().float()) for p in model.parameters()]
    ours, plain = (Timm(ZeroRedundancyOptimizer(each, AdamW, lr=LR)) for each in (params, values))
    return Training(model, params, collage_neuron.compile(ours, strategy=strategy, verbose=False), values, plain)


def different(training: Training, within: float, take: Callable[[Any, Any], object]) -> list[str]:
    """The parameters that differ from plain torch by more than that; their values are below 1.

    Of those of another process, ZeRO-1 has what that one sends: their roundings.
    """
    model, params, optimizer, values, plain = training
    given, wrong = list[list[Tensor]](), list[str]()

    @torch.enable_grad()
    def closure() -> Tensor:
        model.zero_grad()
        g = torch.Generator().manual_seed(100 * dist.get_rank() + 10 * len(given))
        loss: Tensor = model(torch.randn(8, 6, generator=g).to(params[0].dtype)).float().square().mean()
        loss.backward()
        given.append([p.grad.float().clone() for p in params])
        return loss

    def again() -> None:
        for value, g in zip(values, given.pop(0), strict=True):
            value.grad = g

    inside = getattr(optimizer, "optim", optimizer)
    own = {id(p) for group in inside.param_groups for p in group["params"]}
    for step in range(STEPS):
        for each, evaluate in ((optimizer, closure), (plain, again)):
            torch.manual_seed(step)
            evaluate()
            take(each, evaluate)
        for i, (p, value) in enumerate(zip(params, values, strict=True)):
            x = full(exact_value(inside, p) if id(p) in own else p.detach()).float()
            y = full(value.detach() if id(p) in own else value.detach().bfloat16()).float()
            wrong += [] if torch.allclose(x, y, 0.0, within) else [f"{i} after step {step}"]
    return wrong


def once(optimizer: Any, closure: Any) -> None:
    optimizer.step()


def _with_closure(optimizer: Any, closure: Any) -> None:
    optimizer.step(closure)


def _rejects(name: str) -> list[str]:
    """What is said of a step that torch itself cannot take over shards, if it is not the same, and what it changes."""
    training = over(name, "fp32", is_sharded=True)
    for p, value in zip(training.params, training.values, strict=True):
        p.grad, value.grad = torch.ones_like(p), torch.ones_like(value)
    before = [full(p.detach()).clone() for p in training.params]
    said = [refusal(each.step, Exception).splitlines()[0] for each in (training.optimizer, training.plain)]
    is_same = all(torch.equal(x, full(p.detach())) for x, p in zip(before, training.params, strict=True))
    return [] if said[0] == said[1] and is_same else [*said, f"the same: {is_same}"]


def _case(name: str, strategy: str, is_sharded: bool, within: float) -> list[str]:
    take = _with_closure if name in TAKE_CLOSURES else once
    return different(over(name, strategy, is_sharded), within, take)


NEAR = 2.0**-20
"""Of launched steps under the strategy `fp32`, which round otherwise than torch; others have its bits."""

TABLE: dict[str, Callable[[], list[str]]] = {
    "FSDP2, schedule-free": partial(_case, "schedule-free", "fp32", True, NEAR),
    "FSDP2, SAM": partial(_case, "sam", "fp32", True, 0.0),
    "FSDP2, OrthoGrad": partial(_rejects, "ortho"),
    "DDP, Lookahead": partial(_case, "lookahead", "fp32", False, NEAR),
    "ZeRO-1 in Lookahead": lambda: different(around_zero("fp32"), 0.0, once),
}


def all_of_them() -> dict[str, list[str]]:
    """What is wrong in each row of the table, in one world."""
    return {name: row() for name, row in TABLE.items()}


# --- one process ------------------------------------------------------------------------------------------------------


def values_on(device: Any) -> list[Tensor]:
    """The exact values after some steps of SAM: compiled, or, on a CPU, of plain torch."""
    g = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(shape, generator=g).to(device)) for shape in ((4, 5), (7,))]
    optimizer = CASES["sam"](params)
    if device != "cpu":
        optimizer = collage_neuron.compile(optimizer, strategy="fp32", verbose=False)

    def closure() -> float:
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).bfloat16().to(device, p.dtype)
        return 1.0

    for _ in range(STEPS):
        closure()
        optimizer.step(closure)
    return [(p.detach() if device == "cpu" else exact_value(optimizer, p)).cpu().float() for p in params]
