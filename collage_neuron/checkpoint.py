"""Checkpoints to and from plain fp32 training, and as tensors with names, for safetensors.

A checkpoint of a compiled run needs none of this: `model.state_dict()` and `optimizer.state_dict()` are all of it.
These functions are for entering from, and leaving to, a run without collage_neuron (docs/checkpoints.md).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import stale
from collage_neuron.formats import Format
from collage_neuron.loading import check_keys
from collage_neuron.pending import require_compiled
from collage_neuron.settings import DRAWN, KEYS, SKIPPED, Settings
from collage_neuron.sharding import is_sharded, local
from collage_neuron.states import is_component, is_host_scalar, is_idle, read_fp32, store
from collage_neuron.strategies import formats_for

StateDict = dict[str, Any]


def get_fp32_state_dict(model: torch.nn.Module, optimizer: Optimizer) -> tuple[StateDict, StateDict]:
    """(model state, optimizer state) as torch would have them in fp32: for `torch.optim` on an fp32 model.

    Parameters and states are hi + lo, or the fp32 master: exact. bf16 tensors outside the optimizer (frozen parameters,
    buffers) are widened; everything else is as in `state_dict()`, without our settings in the groups. New tensors, on
    the CPU where the parameters are on an XLA device.
    """
    require_compiled(optimizer)
    stale.drop_stale(optimizer)
    return _fp32_model(model, optimizer), _fp32_optimizer(optimizer)


def _fp32_model(model: torch.nn.Module, optimizer: Optimizer) -> StateDict:
    owned = {p for group in optimizer.param_groups for p in group["params"]}
    found: StateDict = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, torch.nn.Parameter) and value in owned:
            found[name] = read_fp32(value, optimizer.state.get(value, {}), "param")
        elif isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16:
            found[name] = read_fp32(value, {}, "param")
        else:
            found[name] = value.detach().clone() if isinstance(value, torch.Tensor) else value
    return found


def _fp32_optimizer(optimizer: Optimizer) -> StateDict:
    packed = optimizer.state_dict()
    ids = (i for group in packed["param_groups"] for i in group["params"])
    params = (p for group in optimizer.param_groups for p in group["params"])
    states = {i: (p, packed["state"].get(i, {})) for i, p in zip(ids, params, strict=True)}
    return {
        "state": {i: _fp32_state(p, state) for i, (p, state) in states.items() if not is_idle(state)},
        "param_groups": [
            {k: v for k, v in g.items() if k not in (*KEYS, DRAWN, SKIPPED)} for g in packed["param_groups"]
        ],
    }


def _fp32_state(p: torch.Tensor, state: Mapping[str, Any]) -> StateDict:
    own = {k: v for k, v in state.items() if not is_component(k, state)}
    scalars = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in own.items() if is_host_scalar(v, p)}
    return {k: scalars[k] if k in scalars else read_fp32(p, state, k) for k in own}


def set_fp32_state_dict(
    model: torch.nn.Module,
    optimizer: Optimizer,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
) -> None:
    """Loads a plain torch checkpoint of an fp32 (or bf16) run into a compiled model and optimizer.

    What the model, which is bf16, cannot hold of an fp32 weight goes to its low word (or master); states are stored as
    the strategy says. Everything is checked before anything is written.

    Raises:
        TypeError: the optimizer is not compiled.
        ValueError: a key that is missing, of another shape, or of no parameter; named in the message.
    """
    require_compiled(optimizer)
    if any("collage_strategy" in group for group in optim_state_dict.get("param_groups", ())):
        raise ValueError(
            "the optimizer's state is one of a compiled optimizer and has low words of its own: load it with "
            "optimizer.load_state_dict, and the model's with model.load_state_dict"
        )
    _check_model(model.state_dict(), model_state_dict)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    own = model.state_dict(keep_vars=True)
    owned = {name: p for name, p in own.items() if isinstance(p, torch.nn.Parameter) and p in groups}
    for name, p in owned.items():
        _check_range(_format(groups[p], p), p, model_state_dict[name])
    optimizer.load_state_dict(dict(optim_state_dict))
    model.load_state_dict(model_state_dict)
    for name, p in owned.items():
        set_exact_value(optimizer, p, model_state_dict[name])


def _check_model(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """As `Module.load_state_dict` checks, but before it writes."""
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    why = f"it has no {missing[0]!r}" if missing else f"the model has no {unexpected[0]!r}" if unexpected else ""
    unlike = (f"{k!r} {_unlike(v, saved[k])}" for k, v in own.items() if not why and _unlike(v, saved[k]))
    why = why or next(unlike, "")
    if why:
        raise ValueError(f"the model's state was not loaded, and nothing was changed: {why}")


def _unlike(own: Any, saved: Any) -> str:
    """What keeps `saved` from being written into `own`; empty where nothing does."""
    if not isinstance(own, torch.Tensor):
        return ""
    if not isinstance(saved, torch.Tensor):
        return f"is a {type(saved).__name__} and in the model a tensor"
    if saved.shape != own.shape:
        return f"has shape {list(saved.shape)} and in the model {list(own.shape)}"
    if is_sharded(saved) != is_sharded(own):
        return f"is {_sharded(saved)} and in the model {_sharded(own)}: distribute_tensor makes one of the other"
    return ""


def _sharded(t: object) -> str:
    return "sharded (a DTensor)" if is_sharded(t) else "not sharded"


def set_exact_value(optimizer: Optimizer, p: torch.nn.Parameter, value: torch.Tensor | float) -> None:
    """Writes the fp32 `value` into the parameter `p`, and what bf16 cannot hold of it into its low word or master.

    The counterpart of `exact_value`, for code that changes parameters between steps (averages, clipping): what is
    written into `p` alone has 8 significant bits. A number is written into every element.

    Raises:
        TypeError: the optimizer is not compiled, or `value` is neither a tensor nor a number.
        ValueError: a parameter of another optimizer or shape, or a value that its words cannot hold; nothing was
            written.
    """
    require_compiled(optimizer)
    if isinstance(value, (int, float)):
        value = torch.full_like(
            p.detach(), torch.tensor(value, dtype=torch.float64).float().item(), dtype=torch.float32
        )
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"the value is a {type(value).__name__} and no tensor or number; nothing was written")
    group = next((g for g in optimizer.param_groups if any(p is q for q in g["params"])), None)
    if group is None or value.shape != p.shape:
        why = "belongs to no group of the optimizer" if group is None else f"and the value has {list(value.shape)}"
        raise ValueError(f"the parameter of shape {list(p.shape)} {why}; nothing was written")
    if is_sharded(value) != is_sharded(p):
        raise ValueError(f"the parameter is {_sharded(p)} and the value {_sharded(value)}; nothing was written")
    fmt = _format(group, p)
    _check_range(fmt, p, value)
    with torch.no_grad():
        store(p, optimizer.state[p], "param", fmt, value.detach().float())
    stale.remember(optimizer, p, stale.FRESH if is_idle(optimizer.state[p]) else stale.STEPPED)


def _format(group: Mapping[str, Any], p: torch.Tensor) -> Format:
    return formats_for(Settings.of(group).strategy, (), frozenset(), p.dtype)["param"]


def _check_range(fmt: Format, p: torch.Tensor, value: torch.Tensor) -> None:
    """Raises for numbers that the words of a pair would make a NaN: inf - inf."""
    host = local(value.detach()).cpu().float()
    if (fmt.decode(fmt.encode(host)).isnan() & ~host.isnan()).any():
        raise ValueError(
            f"the value for the parameter of shape {list(p.shape)} is infinite, or is so in bf16 (from 3.396e38 on): "
            "two words cannot hold it; nothing was written"
        )


# --- as tensors with names ----------------------------------------------------------------------------------------


def to_tensors(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """An optimizer's `state_dict()` as (tensors, metadata), the two things that safetensors stores.

    Tensors are called `state.<number of the parameter>.<name>`; what is no tensor is Python literals in the metadata.
    """
    check_keys(state_dict)
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    entries = {f"state.{ids.index(i)}.{k}": v for i, state in state_dict["state"].items() for k, v in state.items()}
    for n, group in enumerate(state_dict["param_groups"]):
        entries |= {f"param_groups.{n}.{k}": v for k, v in group.items()}
    tensors = {k: v.detach().cpu().contiguous() for k, v in entries.items() if isinstance(v, torch.Tensor)}
    return tensors, {k: _literal(k, v) for k, v in entries.items() if k not in tensors}


def _literal(key: str, value: Any) -> str:
    text = repr(value)
    try:
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError):
        pass
    raise ValueError(f"{key} is {text[:80]}: not a number, a text, or a list, tuple or dict of those")


def from_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> StateDict:
    """The `state_dict()` that `to_tensors` was given; ValueError for a key that it does not write.

    Metadata of None, which safetensors gives for a file that has none, is that of another program.
    """
    values: StateDict = {**tensors} | {key: _value(key, text) for key, text in (metadata or {}).items()}
    groups: dict[int, StateDict] = {}
    states: dict[int, StateDict] = {}
    for key, value in values.items():
        where, number, name = [*key.split(".", 2), "", ""][:3]
        if where not in ("state", "param_groups") or not number.isdigit() or not name:
            raise ValueError(f"{key!r} is no part of an optimizer's state; nothing was read")
        (states if where == "state" else groups).setdefault(int(number), {})[name] = value
    ids = [i for n in sorted(groups) for i in groups[n].get("params", ())]
    strangers = [n for n in states if n >= len(ids)]
    if strangers:
        raise ValueError(f"state.{strangers[0]} belongs to none of the param_groups; nothing was read")
    return {"state": {ids[n]: states[n] for n in sorted(states)}, "param_groups": [groups[n] for n in sorted(groups)]}


def _value(key: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{key!r} is {text[:80]!r}, which is no Python literal; nothing was read") from error
