"""What the processes of `worlds` run: words of states that torch.distributed sends, and what comes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from sharded_runs import different, fsdp, model_of, train, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import AdamW, Optimizer

import collage_neuron


def stepped(strategy: str, gradient: float, steps: int = 2) -> tuple[nn.Parameter, Optimizer]:
    """A parameter of two rows and its optimizer, after steps with equal gradients."""
    p = nn.Parameter(torch.ones(2, 130))
    optimizer = collage_neuron.compile(AdamW([p], lr=1e-2), strategy=strategy)
    for _ in range(steps):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
    return p, optimizer


COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "broadcast": lambda t: dist.broadcast(t, 0),
    "all_gather": lambda t: dist.all_gather([torch.empty_like(t) for _ in range(2)], t),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t.new_empty(2 * t.shape[0], *t.shape[1:]), t),
    "all_reduce": lambda t: dist.all_reduce(t),
    "gather": lambda t: dist.gather(t, [torch.empty_like(t) for _ in range(2)] if dist.get_rank() == 0 else None),
}


def said(action: Callable[[], object]) -> str:
    """The message of the RuntimeError that `action` raises; empty if it raises none."""
    try:
        action()
    except RuntimeError as e:
        return str(e)
    return ""


def sent_int16() -> dict[str, str]:
    """What each collective says of 16-bit codes, which stay as they were."""
    p, optimizer = stepped("split422", 1.0 + dist.get_rank())
    codes = optimizer.state[p]["exp_avg"]
    before, found = codes.clone(), {}
    assert codes.dtype == torch.int16
    for name, send in COLLECTIVES.items():
        found[name] = said(lambda send=send: send(codes))  # type: ignore[misc]
        assert torch.equal(codes, before)
    return found


def gathered(strategies: Sequence[str]) -> dict[str, tuple[str, dict[str, Any]]]:
    """What gathering a sharded state says, and the state where it says nothing, by strategy."""
    return {strategy: _gathered(strategy) for strategy in strategies}


def _gathered(strategy: str) -> tuple[str, dict[str, Any]]:
    model, optimizer = fsdp(model_of(0, bias=False), strategy)
    train((model, optimizer), range(2))
    found: dict[str, Any] = {}
    options = StateDictOptions(full_state_dict=True)
    message = said(lambda: found.update(get_optimizer_state_dict(model, optimizer, options=options)))
    return message, dict(found.get("state", {}))


def broadcast_states(cases: Sequence[Sequence[str]]) -> list[list[str]]:
    """What differs from the first process after it sent the weights and these words, and both took a step more."""
    return [_broadcast_states(names) for names in cases]


def _broadcast_states(names: Sequence[str]) -> list[str]:
    p, optimizer = stepped("split311", 1.0 + 1e3 * dist.get_rank())
    dist.broadcast(p.data, 0)
    for name in names:
        dist.broadcast(optimizer.state[p][name], 0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    found = whole(optimizer)
    sent = [found if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent)
    assert sent[0] is not None
    return different(found, sent[0])
