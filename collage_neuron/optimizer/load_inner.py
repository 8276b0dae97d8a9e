"""Checkpoints of an optimizer that steps another one: what its class saves is in fp32, as it would be without us.

The class's own `state_dict` and `load_state_dict` run on fp32 values, so a checkpoint of plain torch loads, and one of
ours loads in plain torch. Under a key of ours is what the class does not save: the further words of parameters, the
formats of states, so that these have the same words again, and states of inner optimizers that it leaves out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.eager.rollback import tensors_in
from collage_neuron.numerics.formats import FORMATS, require_known
from collage_neuron.optimizer.load_checks import begin_anew, refused, settle_settings
from collage_neuron.settings import OURS
from collage_neuron.states import external_writes, inner_optimizers
from collage_neuron.states.bookkeeping import params_of
from collage_neuron.states.sharding import local
from collage_neuron.states.state_keys import names_in, split_params, words_of
from collage_neuron.states.store import drop_words, ensure_stored, record_of
from collage_neuron.torch_privates import each_tensor

KEY = "collage_neuron"
"""Where our part is in what `state_dict()` returns."""

Presented = Callable[[str], AbstractContextManager[object]]
"""Makes the context of a method with a name, in which parameters and states present fp32 values."""


def save(base: type[Optimizer], optimizer: Optimizer, presented: Presented) -> dict[str, Any]:
    """What `state_dict()` of the class returns for values that are `presented`, as copies, with our part.

    Raises:
        TypeError: that is no dictionary.
    """
    params = _params(optimizer)
    with external_writes.kept(optimizer), presented(f"{base.__name__}.state_dict"):
        found: Any = base.state_dict(optimizer)
        if not isinstance(found, dict):
            raise TypeError(f"{base.__name__}.state_dict() returns a {type(found).__name__}; return a dictionary")
        inside, saved = inner_optimizers.inner_of(optimizer), set(map(id, tensors_in(found)))
        others = [_left_out(inner_optimizers.state_of(optimizer, p, inside), saved) for p in params]
        copies: dict[int, torch.Tensor] = {}
        found, others = _copied(found, copies), _copied(others, copies)
    return {**found, KEY: [_of(optimizer, p, states) for p, states in zip(params, others, strict=True)]}


def _params(optimizer: Optimizer) -> list[Any]:
    return list(dict.fromkeys(params_of(optimizer)))


def _of(optimizer: Optimizer, p: Any, states: dict[str, Any]) -> dict[str, Any]:
    state = optimizer.state.get(p, {})
    names = {"param", *names_in(state).own}
    formats = {name: fmt for name, fmt in record_of(optimizer, p).items() if name in names}
    return {
        "words": _copied(words_of(state) | external_writes.words_to_save(optimizer, p), {}),
        "formats": formats,
        "states": states,
    }


def _left_out(state: Mapping[Any, Any], saved: set[int]) -> dict[Any, Any]:
    """The states of a parameter that are not saved, and with some the numbers beside them."""
    missing = {k for k, x in state.items() if isinstance(x, torch.Tensor) and id(x) not in saved}
    return {k: x for k, x in state.items() if k in missing or not isinstance(x, torch.Tensor)} if missing else {}


def _copied(x: Any, copies: dict[int, torch.Tensor]) -> Any:
    """Copies of the tensors in containers, one of each: of those of an optimizer the insides are exchanged."""
    return each_tensor(lambda t: copies.setdefault(id(t), t.detach().clone()), x)


def plain(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What `save` has returned, as plain torch would have it: without our part, and our settings in groups."""
    return {k: _plain(x) for k, x in state_dict.items() if k != KEY}


def _plain(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _plain(v) for k, v in x.items() if k not in OURS}
    return type(x)(map(_plain, x)) if type(x) in (list, tuple) else x


def _has_settings(x: Any) -> bool:
    """Returns True if a group with our settings is somewhere in it."""
    if isinstance(x, dict):
        return not x.keys().isdisjoint(OURS) or any(map(_has_settings, x.values()))
    return type(x) in (list, tuple) and any(map(_has_settings, x))


def load(base: type[Optimizer], optimizer: Optimizer, state_dict: Mapping[str, Any], presented: Presented) -> None:
    """Loads a checkpoint of plain torch, which keeps formats and further words of parameters, or one of ours.

    Raises:
        ValueError: our part belongs to other parameters, or to other formats of these; nothing has changed.
    """
    saved = dict(state_dict)
    ours, params = saved.pop(KEY, None), _params(optimizer)
    if ours is None and _has_settings(saved):
        raise refused(f"it is of a compiled run, and its {KEY!r}, which has low words of the weights, is missing")
    _check(ours, params)
    before = [dict(group) for group in optimizer.param_groups]
    with presented(f"{base.__name__}.load_state_dict"):
        base.load_state_dict(optimizer, _copied(saved, {}))  # torch keeps tensors that it need not convert
        settle_settings(optimizer, before)
    for p, found in zip(params, ours or (), strict=False):
        _put(optimizer, p, found)
    inner_optimizers.mark(optimizer)
    begin_anew(optimizer, split_params(optimizer.state) if ours is None else set())


def _check(ours: Any, params: list[Any]) -> None:
    if ours is None:
        return
    if len(ours) != len(params):
        raise refused(f"it has {len(ours)} parameters, and the optimizer {len(params)}")
    for i, (p, found) in enumerate(zip(params, ours, strict=True)):
        for fmt in found["formats"].values():
            require_known(fmt, f"parameter {i} has values that were")
        fmt = FORMATS[found["formats"].get("param", "bf16")]
        narrow = fmt.components[0].type.dtype
        shaped = (x for k, x in found["words"].items() if x.dim() and not k.endswith("_scale"))
        if (found["words"] and p.dtype != narrow) or any(x.shape != local(p).shape for x in shaped):
            raise refused(
                f"its parameter {i} is kept as {fmt.name}, and the optimizer's is {p.dtype} of shape {list(p.shape)}: "
                "compile as the run did that has saved it"
            )


def _put(optimizer: Optimizer, p: Any, found: Mapping[str, Any]) -> None:
    """Our part of a checkpoint for one parameter."""
    state, record = optimizer.state.get(p, {}), record_of(optimizer, p)
    for name, x in found["states"].items():
        drop_words(state, str(name))
        state[name] = x.detach().to(p.device if x.dim() else x.device, copy=True) if isinstance(x, torch.Tensor) else x
        record.pop(name, None)
    for name, fmt in found["formats"].items():
        if name == "param":
            drop_words(state, name)
            state.update({k: x.detach().to(p.device, copy=True) for k, x in found["words"].items()})
            record[name] = fmt
        elif isinstance(state.get(name), torch.Tensor):
            ensure_stored(p, state, name, FORMATS[fmt], record)
    if state:
        optimizer.state[p] = state
