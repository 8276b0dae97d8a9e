"""Reads and writes exact parameter values, the sums of their words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import param_format
from collage_neuron.optimizer.pending_models import require_compiled
from collage_neuron.settings import Settings
from collage_neuron.states import external_writes, shared_params
from collage_neuron.states.bookkeeping import params_of
from collage_neuron.states.format_record import record_of
from collage_neuron.states.sharding import is_sharded, local
from collage_neuron.states.store import read_exact


def set_exact_value(optimizer: Optimizer, p: torch.nn.Parameter, value: torch.Tensor | float) -> None:
    """Writes the fp32 `value` to the parameter `p`, and the part that bf16 cannot hold to its low word or master.

    The counterpart of `exact_value`, for code that changes parameters between steps (averages, clipping): a value
    written to `p` alone keeps 8 significant bits. A Python number is written to every element.

    Raises:
        TypeError: the optimizer is not compiled, or `value` is neither a tensor nor a number.
        ValueError: a parameter of another optimizer or shape, or a value that its words cannot hold; nothing was
            written.
    """
    require_compiled(optimizer)
    if isinstance(value, (int, float)):
        number = torch.tensor(value, dtype=torch.float64, device="cpu").float().item()
        value = torch.full_like(p.detach(), number, dtype=torch.float32)
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the value is a {type(value).__name__} and no tensor or number; nothing was written")
    group = next((g for g in optimizer.param_groups if any(p is q for q in g["params"])), None)
    if group is None or value.shape != p.shape:
        why = "belongs to no group of the optimizer" if group is None else f"and the value has {list(value.shape)}"
        raise ValueError(f"the parameter of shape {list(p.shape)} {why}; nothing was written")
    if is_sharded(value) != is_sharded(p):
        raise ValueError(
            f"the parameter is {sharded_or_not(p)} and the value {sharded_or_not(value)}; nothing was written"
        )
    fmt = format_of_param(group, p)
    check_range(fmt, p, value)
    with torch.no_grad():
        external_writes.put(optimizer, p, fmt, value.detach().float())
        shared_params.hand_on(optimizer)


def exact_value(optimizer: Optimizer, p: torch.Tensor) -> torch.Tensor:
    """The fp32 value that `optimizer` keeps for `p`, as a copy: hi + lo, the fp32 master, or `p.float()`.

    Where other code wrote `p` since the last step (a mask, a clamp), low words that are not its own do not count.

    Raises:
        TypeError: the optimizer is not compiled, or `compile(model)` has yet to compile it.
        ValueError: `p` is not one of its parameters.
    """
    require_compiled(optimizer)
    if not any(p is q for q in params_of(optimizer)):
        raise ValueError(f"the tensor of shape {list(p.shape)} is not a parameter of this {type(optimizer).__name__}")
    external_writes.restore_words(optimizer)
    value = read_exact(p, optimizer.state.get(p, {}), "param", record_of(optimizer, p)).clone()
    return external_writes.without_stale(optimizer, p, value)


def format_of_param(group: Mapping[str, Any], p: torch.Tensor) -> Format:
    """The storage format of the parameter `p` under the settings of its group."""
    return param_format(Settings.of(group).strategy, p.dtype)


def check_range(fmt: Format, p: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ValueError for values whose high word would overflow, since their low word would be inf - inf."""
    host = local(value.detach()).cpu().float()
    if (fmt.decode(fmt.encode(host)).isnan() & ~host.isnan()).any():
        raise ValueError(
            f"the value for the parameter of shape {list(p.shape)} is infinite, or is so in bf16 (from 3.396e38 on): "
            "two words cannot hold it; nothing was written"
        )


def sharded_or_not(t: object) -> str:
    """Describes for an error message whether `t` is sharded."""
    return "sharded (a DTensor)" if is_sharded(t) else "not sharded"
