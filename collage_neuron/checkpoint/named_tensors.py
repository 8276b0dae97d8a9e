"""Converts an optimizer's state to named tensors and back, for safetensors."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

import torch

from collage_neuron.optimizer.load_checks import check_keys
from collage_neuron.optimizer.load_inner import KEY

StateDict = dict[str, Any]


def to_tensors(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Converts an optimizer's `state_dict()` to (tensors, metadata), the two things that safetensors stores.

    Tensors are called `state.<index of the parameter>.<name>`; the metadata has everything else, as Python literals.

    Raises:
        ValueError: something is neither a tensor, a number or a text, nor a list, tuple or dict of numbers and texts;
            or it is the state of no parameter, or of several, or its name is no text.
    """
    check_keys(state_dict)
    if KEY in state_dict:
        raise ValueError(
            "the state is one of an optimizer that steps another one, and safetensors has no place for all of it: save "
            "it by torch.save"
        )
    ids = [i for group in state_dict["param_groups"] for i in group["params"]]
    for i, state in state_dict["state"].items():
        if i not in ids or not all(isinstance(name, str) for name in state):
            raise ValueError(
                f"state[{i!r}] has names that are no text, or is that of no parameter, and safetensors has no place for"
                " it: save the state by torch.save"
            )
    entries = {f"state.{ids.index(i)}.{k}": v for i, state in state_dict["state"].items() for k, v in state.items()}
    for n, group in enumerate(state_dict["param_groups"]):
        entries |= {f"param_groups.{n}.{k}": v for k, v in group.items()}
    tensors = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)}
    if len({id(v) for v in tensors.values()}) < len(tensors):
        raise ValueError(
            "a tensor is the state of several parameters, and safetensors saves each alone: use torch.save"
        )
    metadata = {k: _literal(k, v) for k, v in entries.items() if k not in tensors}
    return {k: v.detach().cpu().contiguous() for k, v in tensors.items()}, metadata


def _literal(key: str, value: Any) -> str:
    text = repr(value)
    try:  # what is read must be equal too: the text of an object may be that of a literal
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError):
        pass
    raise ValueError(
        f"{key} is {text[:80]}: not a number, a text, or a list, tuple or dict of those: save the state by torch.save"
    )


def from_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> StateDict:
    """Restores the `state_dict()` that was passed to `to_tensors`; ValueError for a key that `to_tensors` never writes.

    Metadata of None (safetensors' value for a file without metadata) counts as empty.
    """
    values: StateDict = {**tensors, **{key: _value(key, text) for key, text in (metadata or {}).items()}}
    groups: dict[int, StateDict] = {}
    states: dict[int, StateDict] = {}
    for key, value in values.items():
        where, number, name = [*key.split(".", 2), "", ""][:3]  # names may have dots
        if where not in ("state", "param_groups") or not number.isdigit() or not name:
            raise ValueError(f"{key!r} is not part of an optimizer's state; nothing was read")
        (states if where == "state" else groups).setdefault(int(number), {})[name] = value
    ids = [i for n in sorted(groups) for i in groups[n].get("params", ())]
    strangers = [n for n in states if n >= len(ids)]
    if strangers:
        raise ValueError(f"state.{strangers[0]} belongs to none of the param_groups; nothing was read")
    return {"state": {ids[n]: states[n] for n in sorted(states)}, "param_groups": [groups[n] for n in sorted(groups)]}


def _value(key: str, text: str) -> Any:
    if "{'collage tensor': " in text:
        raise ValueError(f"{key!r} has tensors in a list or dictionary, as version 0.3 wrote them: read it with that")
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{key!r} is {text[:80]!r}, which is not a Python literal; nothing was read") from error
