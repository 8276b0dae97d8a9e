"""What is compared: torch's AdamW in fp32, every strategy of the package, and peers (accuracy/peers.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import AdamW, Optimizer

import collage_neuron
from accuracy.conditions import Stream
from collage_neuron import STRATEGIES

Options = dict[str, Any]
"""lr, betas, eps and weight_decay, as torch.optim.AdamW names them."""


def _the_parameter_itself(_: Optimizer, p: Parameter) -> Tensor:
    return p.detach()


@dataclass(frozen=True)
class Contender:
    """An optimizer, and how the value of a parameter is read that it keeps in more words than the parameter's own."""

    name: str
    source: str
    """The package that it comes from."""
    build: Callable[[list[Parameter], Options], Optimizer]
    value: Callable[[Optimizer, Parameter], Tensor] = _the_parameter_itself
    dtype: torch.dtype | None = torch.bfloat16
    """The dtype of the parameter that it is given; None: that of the weights, whose `value` is then known at once."""


@dataclass(frozen=True)
class Outcome:
    """The weights before and after a run, exactly as stored, and the bytes per parameter of weights and states."""

    start: Tensor
    theta: Tensor
    bytes: float


def run(contender: Contender, stream: Stream, steps: int) -> Outcome:
    """Trains on the stream of a condition."""
    condition = stream.condition
    torch.manual_seed(0)  # for peers that draw from the global generator; the streams have generators of their own
    p = Parameter(stream.start.to(contender.dtype or stream.start.dtype, copy=True))
    options = {"betas": condition.betas, "eps": condition.eps, "weight_decay": condition.weight_decay}
    optimizer = contender.build([p], {"lr": condition.rate(0, steps), **options})
    start = (contender.value(optimizer, p) if contender.dtype is None else p.detach()).clone()
    for t, g in enumerate(stream.gradients(steps)):
        _set_rate(optimizer, condition.rate(t, steps))
        p.grad = g.to(p.dtype)
        optimizer.step()
    stored = [p.detach(), *tensors(optimizer.state[p])]
    words = {x.data_ptr(): x.nbytes for x in stored if x.numel() > 1}  # a step counter is not a word
    return Outcome(start, contender.value(optimizer, p), sum(words.values()) / p.numel())


def _set_rate(optimizer: Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's is, and rejects a number
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def tensors(state: object) -> Iterator[Tensor]:
    """The plain tensors in the state of one parameter; of a tensor subclass, those that it consists of."""
    if isinstance(state, Tensor):
        if hasattr(state, "__tensor_flatten__"):
            parts = (getattr(state, name) for name in state.__tensor_flatten__()[0] if name != "qmap")  # a constant
            yield from tensors(list(parts))
        else:
            yield state
    elif isinstance(state, Mapping):
        yield from tensors(list(state.values()))
    elif isinstance(state, Iterable) and not isinstance(state, str):
        for part in state:
            yield from tensors(part)


def _compiled(strategy: str) -> Contender:
    def build(params: list[Parameter], options: Options) -> Optimizer:
        return collage_neuron.compile(AdamW(params, **options), strategy=strategy)

    def value(optimizer: Optimizer, p: Parameter) -> Tensor:
        return collage_neuron.exact_value(optimizer, p)

    return Contender(strategy, "collage_neuron", build, value, dtype=None)


def own() -> list[Contender]:
    """torch's AdamW with everything in fp32 or in bf16, and every strategy."""
    dtypes = {"torch fp32": torch.float32, "torch bf16": torch.bfloat16}
    plain = [Contender(name, "torch", _adamw, dtype=dtype) for name, dtype in dtypes.items()]
    return [*plain, *map(_compiled, STRATEGIES)]


def _adamw(params: list[Parameter], options: Options) -> Optimizer:
    return AdamW(params, **options)
