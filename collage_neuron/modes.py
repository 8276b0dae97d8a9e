"""Methods other than `step` that write parameters: schedule-free optimizers exchange them in `eval()` and `train()`.

Run on the parameters themselves they would see and write high words alone. They run on fp32 twins instead, whose values
are then stored in the formats of the optimizer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import stale
from collage_neuron.formats import FORMATS, Format
from collage_neuron.states import State, is_component, is_host_scalar, is_stored, read_fp32, store

NAMES = ("eval", "train")


def methods_of(base: type[Optimizer]) -> dict[str, Callable[..., Any]]:
    """For each such method of the class `base`, the one that its compiled class has."""
    return {name: _exact(base, getattr(base, name)) for name in NAMES if callable(getattr(base, name, None))}


def _exact(base: type[Optimizer], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    @torch.no_grad()
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        stale.drop_stale(self)
        twin, params = _twin(base, self)
        result = method(twin, *args, **kwargs)
        for p, q in params.items():
            _store_back(p, self.state.get(p, {}), q, twin.state.get(q, {}))
        for group, other in zip(self.param_groups, twin.param_groups, strict=True):
            group.update({k: v for k, v in other.items() if k != "params"})
        kept = ("state", "param_groups", "step")
        self.__dict__.update({k: v for k, v in vars(twin).items() if k not in kept})
        stale.remember_step(self)
        return result

    return run


def _twin(base: type[Optimizer], optimizer: Optimizer) -> tuple[Any, dict[torch.nn.Parameter, torch.nn.Parameter]]:
    """An optimizer of the user's class over fp32 copies of the parameters and states; and which copy is whose."""
    params = {
        p: torch.nn.Parameter(read_fp32(p, optimizer.state.get(p, {}), "param"), requires_grad=p.requires_grad)
        for group in optimizer.param_groups
        for p in group["params"]
    }
    twin = object.__new__(base)
    twin.__dict__.update({k: v for k, v in vars(optimizer).items() if k != "step"})
    twin.param_groups = [dict(g, params=[params[p] for p in g["params"]]) for g in optimizer.param_groups]
    twin.state = defaultdict(dict)
    for p, q in params.items():
        state = optimizer.state.get(p, {})
        own = [k for k in state if not is_component(k, state)]
        twin.state[q] = {k: state[k] if is_host_scalar(state[k], p) else read_fp32(p, state, k) for k in own}
    return twin, params


def _store_back(p: torch.nn.Parameter, state: State, q: torch.Tensor, values: Mapping[str, Any]) -> None:
    """What the method wrote, in the formats that were there; what it left alone keeps its bits."""
    for name, value in {**values, "param": q.detach()}.items():
        if name != "param" and is_host_scalar(state.get(name, value), p):
            state[name] = value
        elif not torch.equal(value, read_fp32(p, state, name)):
            store(p, state, name, _format(p, state, name), value)


def _format(p: torch.Tensor, state: Mapping[str, Any], name: str) -> Format:
    return next(fmt for fmt in FORMATS.values() if is_stored(p, state, name, fmt))
