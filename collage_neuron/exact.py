"""Reads and writes exact parameter values, the sums of their words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import param_format
from collage_neuron.optimizer.pending_models import require_compiled
from collage_neuron.settings import Settings
from collage_neuron.states import external_writes, low_words, replaced_params
from collage_neuron.states.bookkeeping import params_of
from collage_neuron.states.sharding import is_sharded, local, redistributed
from collage_neuron.states.state_keys import split_params
from collage_neuron.states.store import Record, read_exact, record_of


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
        number = torch.tensor(value, dtype=torch.float64, device="cpu").float().item()  # inf where fp32 ends, no error
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
    value, fmt = redistributed(value, p), format_of_param(group, p)
    check_range(fmt, p, value)
    with torch.no_grad():
        external_writes.put(optimizer, p, fmt, value.detach().float())


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
    low_words.restore(optimizer)
    value = read_exact(p, optimizer.state.get(p, {}), "param", record_of(optimizer, p)).clone()
    return external_writes.without_stale(optimizer, p, value)


def owners_of(params: Iterable[torch.Tensor], given: Sequence[Optimizer]) -> dict[torch.Tensor, Optimizer]:
    """Returns the compiled optimizer of each parameter that has one: a living one that keeps low words of it, if any.

    Of several, one of the `given` optimizers: a model may have more, of which they are some.

    Raises:
        TypeError: a given one is not compiled.
    """
    for optimizer in given:
        require_compiled(optimizer)
    (listed, split), params = _owners_among(given), list(params)
    wanted = [p for p in params if p.dtype == torch.bfloat16 and p not in split]
    others = [x for x in low_words.optimizers_with(wanted) if all(x is not optimizer for optimizer in given)]
    listed_by_others, split_by_others = _owners_among(others)
    return {**listed_by_others, **listed, **split_by_others, **split}  # the last counts: who keeps low words


def _owners_among(optimizers: Sequence[Optimizer]) -> tuple[dict[Any, Optimizer], dict[Any, Optimizer]]:
    """The first of these that has each parameter, and the first that keeps low words of it."""
    for optimizer in optimizers:
        replaced_params.follow(optimizer)
        low_words.restore(optimizer)
    # Reversed: of a dictionary the last entry counts, and it is to be the first optimizer.
    listed = [(p, x) for x in reversed(optimizers) for p in params_of(x)]
    split = {id(x): split_params(x.state) for x in optimizers}
    return dict(listed), {p: x for p, x in listed if p in split[id(x)]}


def words_kept(p: torch.Tensor, owner: Optimizer | None) -> tuple[Mapping[str, Any], Record]:
    """The state of `p` with its further words, and the record of its formats; without an owner, those of the last."""
    return low_words.left_with(p) if owner is None else (owner.state.get(p, {}), record_of(owner, p))


def format_of_param(group: Mapping[str, Any], p: torch.Tensor) -> Format:
    """The storage format of the parameter `p` under the settings of its group."""
    return param_format(Settings.of(group).strategy, p.dtype)


def check_range(fmt: Format, p: torch.Tensor, value: torch.Tensor) -> None:
    """Raises ValueError for values whose high word would overflow, since their low word would be inf - inf."""
    host = local(value.detach()).cpu().float()
    if fmt.components[0].storage == "bf16" and host.numel() and host.abs().max() < _FAR_FROM_INFINITE:  # nor NaN
        return
    if (fmt.decode(fmt.encode(host)).isnan() & ~host.isnan()).any():
        raise ValueError(
            f"the value for the parameter of shape {list(p.shape)} is infinite, or is so in bf16 (from 3.396e38 on): "
            "two words cannot hold it; nothing was written"
        )


_FAR_FROM_INFINITE = 1e38  # in bf16: smaller values are not converted to find out


def sharded_or_not(t: object) -> str:
    """Describes for an error message whether `t` is sharded."""
    return "sharded (a DTensor)" if is_sharded(t) else "not sharded"
