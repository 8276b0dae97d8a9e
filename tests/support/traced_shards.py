"""What the processes of `worlds` run: steps over shards, traced and captured."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import foreign
import torch
from sharded_runs import STEPS, backward, different, model_of, shard, whole
from staged import Lamb
from staged_shards import SHAPES, OfShards
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.optim import AdamW, Optimizer
from traced_cases import LAUNCHED, Stepping

import collage_neuron
from collage_neuron.trace.switch import TRACE

Make = Callable[[Any], Optimizer]


def _clips(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Clips each gradient by its norm."""
    p.sub_(g * (1.0 / (g.norm() + 1e-6)).clamp(max=1.0), alpha=lr)


def _looks(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """Asks what only a DTensor can be asked, in steps after those that `compile` records, and works on parts."""
    if t < 3 or o.is_plain:
        p.sub_(g * g.abs(), alpha=lr)
        return
    assert (type(p), type(g), type(g * 2)) == (DTensor,) * 3
    new: Any = torch.zeros_like(p)
    assert p.placements == g.placements == new.placements
    assert p.device.type == g.device.type == (g * 2).device.type == p.device_mesh.device_type == "cpu"
    assert (p.dtype, g.dtype, g.to_local().dtype) == (torch.float32,) * 3
    assert g.to_local().shape == p._local_tensor.shape
    m = new.add_(g)
    m.to_local().mul_(g.to_local().abs())  # of a parameter, the newest torch makes a view
    p.sub_(m, alpha=lr)


def _later(update: Any) -> Any:
    """The same: until then, plain steps."""

    def both(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
        update(o, p, g, s, lr, t) if t > 2 else p.sub_(g, alpha=lr)

    return both


@_later
def _norms_of_parts(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g / (1.0 + g.to_local().norm()), alpha=lr)


@_later
def _gathers(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    p.sub_(g, alpha=lr * float(g.full_tensor().abs().max()))


@_later
def _keeps_parts(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    o.kept[id(p)] = p.to_local()
    p.sub_(g, alpha=lr)


@_later
def _writes_what_it_holds(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    """In another order than that of the calls."""
    p.sub_(g, alpha=lr)
    o.held[id(p)].mul_(0.5)


@_later
def _states_of_parts(o: Any, p: Any, g: Any, s: Any, lr: float, t: int) -> None:
    s["m"] = torch.zeros_like(p.to_local())
    p.sub_(g, alpha=lr)


class Holding(Stepping):
    """Holds the parts of the gradients that it is about to be given, or of parameters."""

    def __init__(self, params: Any, update: Any, of_gradients: bool = True) -> None:
        super().__init__(params, update)
        self.of_gradients, self.held = of_gradients, dict[int, Any]()


TRACED: dict[str, Make] = {
    "adamw_foreach": partial(AdamW, lr=1e-2, foreach=True),
    "adamw": partial(AdamW, lr=1e-2, foreach=False, amsgrad=True),
    "adamw_fused": partial(AdamW, lr=1e-2, fused=True),
    "schedule_free": foreign.ScheduleFreeAdamW,
    "lion": foreign.Lion,
    "momentum": partial(Stepping, update=LAUNCHED["momentum"]),
    "states_trade_places": partial(Stepping, update=LAUNCHED["states_trade_places"]),
}
CAPTURED: dict[str, Make] = {
    "lamb": Lamb,
    "clips": partial(Stepping, update=_clips),
    "of_shards": OfShards,
    "norms_of_parts": partial(Stepping, update=_norms_of_parts),
    "gathers": partial(Stepping, update=_gathers),
    "keeps_parts": partial(Stepping, update=_keeps_parts),
    "states_of_parts": partial(Stepping, update=_states_of_parts),
    "holds_gradients": partial(Holding, update=_writes_what_it_holds),
    "holds_parameters": partial(Holding, update=_writes_what_it_holds, of_gradients=False),
}
"""Those whose steps are not traced, and end as if nothing were: with the same words, or the same error."""


class Ended(NamedTuple):
    """How some steps have ended."""

    different: list[str]
    """Words that are not those of captured steps."""
    errors: tuple[str, str]
    """Why captured, and traced, steps were rejected."""
    misses: int
    kinds: int
    why: str


def stepped(make: Make, mesh: Any, how: Sequence[Any], **chosen: Any) -> tuple[Optimizer, str]:
    """An optimizer after some steps, and why there were no more."""
    starts = [torch.randn(s, generator=torch.Generator().manual_seed(i)) for i, s in enumerate(SHAPES)]
    starts = [x for x in starts if x.dim() == 2 or Shard(1) not in how]
    params: list[Any] = [nn.Parameter(distribute_tensor(x, mesh, how)) for x in starts]
    optimizer: Any = make(params)
    try:
        optimizer = collage_neuron.compile(optimizer, verbose=False, **chosen)
        for t in range(4):
            for i, p in enumerate(params):
                g = torch.randn(p.shape, generator=torch.Generator().manual_seed(100 * t + i)).bfloat16()
                p.grad = distribute_tensor(g, mesh, how)
            if isinstance(optimizer, Holding):
                of_gradients = optimizer.of_gradients
                optimizer.held = {id(p): (p.grad if of_gradients else p)._local_tensor for p in params}
            optimizer.step()
    except (collage_neuron.UnsupportedUpdate, RuntimeError, ValueError) as error:
        return optimizer, f"{type(error).__name__}: {error}"[:60]
    return optimizer, ""


def beside(make: Make, how: Sequence[Any] = (Shard(0),), **chosen: Any) -> Ended:
    """How traced steps end, beside captured ones."""
    mesh = init_device_mesh("cpu", (2,))
    captured, refused = stepped(make, mesh, how, **chosen)
    return _beside(captured, refused, make, mesh, how, **chosen)


def _beside(captured: Any, refused: str, make: Make, mesh: Any, how: Sequence[Any], **chosen: Any) -> Ended:
    os.environ[TRACE] = "on"
    traced, error = stepped(make, mesh, how, **chosen)
    del os.environ[TRACE]
    ours = vars(traced).get("_collage_bookkeeping")
    traces = None if ours is None else ours.traces
    kinds = (0, 0, "") if traces is None else (traces.misses, len(traces.kinds), traces.why)
    return Ended(different(whole(traced), whole(captured)), (refused, error), *kinds)


class Looking(Stepping):
    """Steps as the update `_looks` does; or as if it did not look."""

    def __init__(self, params: Any, is_plain: bool = False) -> None:
        super().__init__(params, _looks)
        self.is_plain = is_plain


def looked() -> Ended:
    """Traced steps that ask what they are given, beside captured ones that do not."""
    mesh = init_device_mesh("cpu", (2,))
    captured, _ = stepped(partial(Looking, is_plain=True), mesh, (Shard(0),), strategy="plus")
    return _beside(captured, "", Looking, mesh, (Shard(0),), strategy="plus")


def trained() -> Ended:
    """A model under fully_shard."""
    ended: list[Any] = []
    for trace in ("off", "on"):
        os.environ[TRACE] = trace
        model = model_of(0)
        shard(model)
        sharded, optimizer = collage_neuron.compile(model, foreign.ScheduleFreeAdamW(model.parameters()), verbose=False)
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(sharded, step)
            optimizer.step()
        ended.append(optimizer)
    del os.environ[TRACE]
    traces = ended[1]._collage_bookkeeping.traces
    words = different(whole(ended[1]), whole(ended[0]))
    return Ended(words, ("", ""), traces.misses, len(traces.kinds), traces.why)


def everything() -> dict[str, Ended]:
    """All of it, in one world."""
    found = {name: beside(make, strategy="split433") for name, make in TRACED.items()}
    found["columns"] = beside(TRACED["adamw"], [Shard(1)], strategy="plus")
    found["replicas"] = beside(TRACED["lion"], [Replicate()], strategy="fp32")
    found["random bits"] = beside(TRACED["momentum"], strategy="stochastic")
    found |= {"fully_shard": trained(), "looks": looked()}
    return found | {name: beside(make, strategy="full") for name, make in CAPTURED.items()}
