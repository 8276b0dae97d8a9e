"""Converts an optimizer's state to named tensors and back, for safetensors."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Mapping
from itertools import count
from typing import Any

import torch

from collage_neuron.optimizer.load_checks import check_keys
from collage_neuron.optimizer.load_inner import KEY

StateDict = dict[str, Any]

TENSOR = "collage tensor"
"""The only key of a dictionary that stands for a tensor that is in a container, or is two states; it has the name."""


def to_tensors(state_dict: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Converts an optimizer's `state_dict()` to (tensors, metadata), the two things that safetensors stores.

    Tensors are called `state.<index of the parameter>.<name>`; the metadata has everything else, as Python literals.
    Those in a list, tuple or dictionary of this name have a number behind it, in the order in which they are there.

    Raises:
        ValueError: something is neither a tensor, a number or a text, nor a list, tuple or dict of those; or it is the
            state of no parameter, or its name is no text.
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
    every = {k: v for k, v in entries.items() if isinstance(v, torch.Tensor)}
    tensors = {names[0]: every[names[0]] for names in _names_of_each(every)}
    metadata = {k: _literal(k, _without_tensors(k, v, tensors)) for k, v in entries.items() if k not in every}
    metadata |= {k: repr({TENSOR: name}) for name, *others in _names_of_each(every) for k in others}
    return _apart({k: v.detach().cpu().contiguous() for k, v in tensors.items()}), metadata


def _names_of_each(tensors: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """The names of each tensor: one that is the state of several parameters has several."""
    names: dict[int, list[str]] = {}
    for name, x in tensors.items():
        names.setdefault(id(x), []).append(name)
    return list(names.values())


def _apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    # safetensors saves no tensors that share memory, as views in containers do.
    seen = Counter(v.untyped_storage().data_ptr() for v in tensors.values())
    return {k: v.clone() if seen[v.untyped_storage().data_ptr()] > 1 else v for k, v in tensors.items()}


def _without_tensors(key: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` with a dictionary for each tensor in it, which is added to `tensors`."""
    numbers = count()

    def named(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            # A state may have a name that ends in a number itself.
            name = next(name for n in numbers if (name := f"{key}.{n}") not in tensors)
            tensors[name] = x
            return {TENSOR: name}
        if type(x) in (list, tuple):
            return type(x)(map(named, x))
        if type(x) is dict:
            if TENSOR in x:
                raise ValueError(f"{key} has a dictionary with the key {TENSOR!r}, which stands for a tensor here")
            return {k: named(y) for k, y in x.items()}
        return x

    return named(value)


def _literal(key: str, value: Any) -> str:
    text = repr(value)
    try:  # what is read must be equal too: the text of an object may be that of a literal
        if ast.literal_eval(text) == value:
            return text
    except (ValueError, SyntaxError):
        pass
    raise ValueError(f"{key} is {text[:80]}: not a number, a text, or a list, tuple or dict of those, and of tensors")


def from_tensors(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> StateDict:
    """Restores the `state_dict()` that was passed to `to_tensors`; ValueError for a key that `to_tensors` never writes.

    Metadata of None (safetensors' value for a file without metadata) counts as empty.
    """
    rest = {**tensors}
    others = {key: _with_tensors(key, _value(key, text), rest) for key, text in (metadata or {}).items()}
    values: StateDict = rest | others
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


def _with_tensors(key: str, value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` with its tensors, which are taken out of `tensors`, but for those with a name of their own."""
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(key, x, tensors) for x in value)
    if type(value) is not dict:
        return value
    if value.keys() != {TENSOR}:
        return {k: _with_tensors(key, x, tensors) for k, x in value.items()}
    if value[TENSOR] not in tensors:
        raise ValueError(f"{key!r} has the tensor {value[TENSOR]!r}, which is missing; nothing was read")
    name = value[TENSOR]
    return tensors.pop(name) if name.startswith(f"{key}.") else tensors[name]


def _value(key: str, text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError) as error:
        raise ValueError(f"{key!r} is {text[:80]!r}, which is not a Python literal; nothing was read") from error
