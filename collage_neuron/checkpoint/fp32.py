"""Converts checkpoints to and from plain fp32 training (docs/checkpoints.md)."""

from __future__ import annotations

import copy
import json
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.eager.rollback import tensors_in
from collage_neuron.exact import (
    check_range,
    format_of_param,
    owners_of,
    set_exact_value,
    sharded_or_not,
    words_kept,
)
from collage_neuron.numerics.formats import is_component
from collage_neuron.optimizer import load_inner
from collage_neuron.optimizer.pending_models import keep_values, require_settled, waiting_values
from collage_neuron.settings import OURS
from collage_neuron.states import external_writes, low_words, state_writes
from collage_neuron.states.bookkeeping import numbered
from collage_neuron.states.sharding import is_sharded, like
from collage_neuron.states.state_keys import is_host_scalar, may_be_read
from collage_neuron.states.store import Record, is_idle, read_fp32, record_of

StateDict = dict[str, Any]


def get_fp32_state_dict(model: torch.nn.Module, optimizer: Optimizer) -> tuple[StateDict, StateDict]:
    """Returns (model state, optimizer state) for plain `torch.optim` on an fp32 model.

    Parameters and states are exact: hi + lo, or the fp32 master. Parameters of other compiled optimizers are too; the
    optimizer state is that of the one that is given. Parameters that no optimizer has had yet are what `compile(model)`
    keeps of them; other bf16 tensors (frozen parameters after `compile(model, optimizer)`, buffers) are widened to
    fp32. Everything else is as in `state_dict()`, without our settings in the groups. The tensors are new; they are on
    the CPU if the parameters are on an XLA device.

    Raises:
        TypeError: the optimizer is not compiled, or another one waits for its first step after `compile(model)`.
    """
    model.state_dict()  # FSDP2 puts shards in the place of parameters that a forward pass has gathered
    owners = _owners(model, optimizer)
    for each in dict.fromkeys([optimizer, *owners.values()]):
        low_words.restore(each)
        state_writes.drop_stale(each)
    return _fp32_model(model, owners), _fp32_optimizer(optimizer)


def _owners(model: torch.nn.Module, optimizer: Optimizer) -> dict[torch.Tensor, Optimizer]:
    """The compiled optimizers of a model's parameters, of which `optimizer` is one."""
    if isinstance(optimizer, (list, tuple)):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__}; give one compiled optimizer: those of the other "
            "parameters are found, and the states of each are converted by a call of its own"
        )
    owners = owners_of(model.parameters(), [optimizer])
    require_settled(p for p in model.parameters() if p not in owners)
    return owners


def _fp32_model(model: torch.nn.Module, owners: Mapping[torch.Tensor, Optimizer]) -> StateDict:
    """The state of a model that holds exact values."""
    waiting = waiting_values(p for p in model.parameters() if p not in owners)
    values: dict[torch.Tensor, torch.nn.Parameter] = {}
    for p in model.parameters():
        if p in owners or p.dtype == torch.bfloat16:
            exact = like(waiting[p], p) if p in waiting else _exact(p, owners.get(p))
            values[p] = torch.nn.Parameter(exact, requires_grad=False)
    # By the model's own `state_dict`: hooks of it may transpose, split or scale what they find.
    with torch_privates.holding(model, values):
        found = model.state_dict(keep_vars=True)
    once = set(map(id, values.values()))  # names of tied weights have a tensor each
    return {name: _own(x, once) for name, x in found.items()}


def _exact(p: torch.Tensor, owner: Optimizer | None) -> torch.Tensor:
    state, record = words_kept(p, owner)
    value = read_fp32(p, state, "param", record)
    # Nothing is written: other weights may be there for a moment only.
    return value if owner is None else external_writes.without_stale(owner, p, value)


def _own(x: Any, once: set[int]) -> Any:
    """An entry of a state that shares memory with nothing, in fp32 if it is in bf16. Those in `once` need no copy."""
    if not isinstance(x, torch.Tensor):
        return x
    if id(x) in once:
        once.remove(id(x))
        return x.detach()
    return read_fp32(x, {}, "param") if x.dtype == torch.bfloat16 else x.detach().clone()


def _fp32_optimizer(optimizer: Optimizer) -> StateDict:
    packed = optimizer.state_dict()
    if load_inner.KEY in packed:
        return load_inner.plain(packed)
    states = {i: (p, packed["state"].get(i, {})) for i, p in numbered(optimizer, packed).items()}
    made: dict[int, Any] = {}  # what several states, lists and dictionaries hold is one in the export
    for p, state in states.values():
        made |= _in_fp32(p, state, record_of(optimizer, p), made)
    held = set(map(id, tensors_in([packed["state"]])))
    for p in (p for p, _ in states.values() if id(p) in held):
        made[id(p)] = torch.nn.Parameter(_exact(p, optimizer), p.requires_grad)
    of_all = {key: copy.deepcopy(state, made) for key, state in packed["state"].items() if key not in states}
    others = {key: copy.deepcopy(x) for key, x in packed.items() if key not in ("state", "param_groups")}
    return others | {
        "state": {
            i: {k: copy.deepcopy(x, made) for k, x in state.items() if not is_component(k, state)}
            for i, (_, state) in states.items()
            if not is_idle(state)
        }
        | of_all,
        "param_groups": [{k: v for k, v in g.items() if k not in OURS} for g in packed["param_groups"]],
    }


def _in_fp32(p: torch.Tensor, state: Mapping[str, Any], record: Record, made: Mapping[int, Any]) -> dict[int, Any]:
    """The values of the states of `p` that are not `made` yet, by the ids of their tensors."""
    # What a step as written keeps in other shapes and types is as plain torch has it.
    own = {k: x for k, x in state.items() if not is_component(k, state) and not is_host_scalar(x, p)}
    own = {k: x for k, x in own.items() if id(x) not in made and may_be_read(state, k, p, record)}
    return {id(x): read_fp32(p, state, k, record) for k, x in own.items()}


def set_fp32_state_dict(
    model: torch.nn.Module,
    optimizer: Optimizer,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
) -> None:
    """Loads a plain torch checkpoint of an fp32 (or bf16) run into a compiled model and optimizer.

    The part of an fp32 weight that the bf16 model cannot hold goes to its low word (or master), in whichever compiled
    optimizer has it; states are stored in the formats of the strategy. Everything is checked before anything is
    written.

    Raises:
        TypeError: the optimizer is not compiled, or another one waits for its first step after `compile(model)`.
        ValueError: a key is missing, has another shape, or belongs to no parameter; the message names it.
    """
    own = model.state_dict(keep_vars=True)
    owners = _owners(model, optimizer)
    groups_of_ours = any("collage_strategy" in group for group in optim_state_dict.get("param_groups", ()))
    if load_inner.KEY in optim_state_dict or groups_of_ours:
        raise ValueError(
            "the optimizer's state is one of a compiled optimizer and has low words of its own: load it with "
            "optimizer.load_state_dict, and the model's with model.load_state_dict"
        )
    _check_model(own, model_state_dict)
    groups = {(each, p): g for each in {*owners.values()} for g in each.param_groups for p in g["params"]}
    owned = {name: p for name, p in own.items() if isinstance(p, torch.nn.Parameter) and p in owners}
    for name, p in owned.items():
        check_range(format_of_param(groups[owners[p], p], p), p, model_state_dict[name])
    # The optimizer first, which checks the states; then weights, and last their low words, which belong to them.
    optimizer.load_state_dict(dict(optim_state_dict))
    model.load_state_dict(_narrowed(model_state_dict, own))
    for name, p in owned.items():
        set_exact_value(owners[p], p, model_state_dict[name])
    others = {name: p for name, p in own.items() if isinstance(p, torch.nn.Parameter) and name not in owned}
    keep_values({p: model_state_dict[name] for name, p in others.items() if p.dtype == torch.bfloat16})


def _narrowed(saved: Mapping[str, Any], own: Mapping[str, Any]) -> StateDict:
    """A model's state with weights in the dtypes that they are loaded into: the model shall not warn of rounding."""
    found: StateDict = OrderedDict(
        (name, value.to(own[name].dtype) if isinstance(own[name], torch.nn.Parameter) else value)
        for name, value in saved.items()
    )
    vars(found).update(getattr(saved, "__dict__", {}))  # torch keeps the versions of modules there
    return found


def _check_model(own: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Checks what `Module.load_state_dict` checks, but before anything is written."""
    missing, unexpected = sorted(own.keys() - saved.keys()), sorted(saved.keys() - own.keys())
    why = f"it has no {missing[0]!r}" if missing else f"the model has no {unexpected[0]!r}" if unexpected else ""
    unlike = (f"{k!r} {_unlike(v, saved[k])}" for k, v in own.items() if not why and _unlike(v, saved[k]))
    why = why or next(unlike, "")
    if why:
        raise ValueError(f"the model's state was not loaded, and nothing was changed: {why}")


def _unlike(own: Any, saved: Any) -> str:
    """The reason why `saved` cannot be written into `own`, as text; empty if it can."""
    if not isinstance(own, torch.Tensor):
        return ""
    if not isinstance(saved, torch.Tensor):
        return f"is a {type(saved).__name__} and in the model a tensor"
    if saved.shape != own.shape:
        return f"has shape {list(saved.shape)} and in the model {list(own.shape)}"
    if is_sharded(saved) != is_sharded(own):
        kinds = f"is {sharded_or_not(saved)} and in the model {sharded_or_not(own)}"
        return f"{kinds}: distribute_tensor makes one of the other"
    return ""


# Folders of Hugging Face

DTYPE_KEYS = ("dtype", "torch_dtype")
"""What config.json calls the dtype: transformers 5, and 4."""


def save_pretrained_fp32(model: Any, optimizer: Optimizer, folder: str | Path, **settings: Any) -> None:
    """Writes a compiled model's exact weights in fp32, as ``model.save_pretrained`` lays them out.

    The model's own ``save_pretrained`` writes the bf16 words. Given a ``state_dict`` in fp32 it writes that, but
    ``dtype: bfloat16`` into config.json, by which ``from_pretrained`` rounds all of it again; here it is ``float32``.

    Args:
        model: the model, or one of PEFT, whose adapter alone is written.
        optimizer: the compiled optimizer, any of several, or accelerate's wrapper around it (``trainer.optimizer``).
        folder: where to write.
        settings: further arguments of ``save_pretrained``.
    """
    weights, _ = get_fp32_state_dict(model, getattr(optimizer, "optimizer", optimizer))
    model.save_pretrained(folder, state_dict=weights, **settings)
    config = Path(folder) / "config.json"
    if config.exists():  # an adapter has none
        config.write_text(json.dumps(_as_fp32(json.loads(config.read_text())), indent=2) + "\n")


def _as_fp32(found: Any) -> Any:
    """The configuration, and those of the models in it, with `float32` for `bfloat16`."""
    if not isinstance(found, dict):
        return found
    bf16 = str(torch.bfloat16).removeprefix("torch.")
    return {k: "float32" if k in DTYPE_KEYS and v == bf16 else _as_fp32(v) for k, v in found.items()}
