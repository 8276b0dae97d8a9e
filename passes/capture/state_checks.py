"""Checks of what a step leaves behind: tensors and numbers must be where the next step gets them from."""

from __future__ import annotations

import keyword
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.passes.capture.planes import (
    check_floating,
    holders_of_meta,
    is_meta,
    meta_in,
    same_number,
)
from collage_neuron.passes.capture.recorder import Ref, refs_of
from collage_neuron.passes.capture.shadow import Shadow, StandIn

_RESERVED = re.compile(r"param|grad|index|scalars|([sc]|reduced|number)\d+")


def check_kept(shadow: Shadow) -> None:
    """Raises if the step stores something in a place that is not carried to the next step."""
    state = shadow.state
    if not isinstance(state, dict):
        raise UnsupportedUpdate(
            f"the update keeps an object of type {type(state).__name__} as optimizer.state[p]; keep a "
            "dictionary of tensors and numbers, as torch's optimizers do"
        )
    tensors = meta_in(state)
    places = {
        "optimizer.state[p][{!r}]": {k: v for k, v in state.items() if k not in tensors},
        "param_groups[...][{!r}]": {k: v for k, v in shadow.group.items() if k != "params"},
        "optimizer.{}": {k: v for k, v in vars(shadow.optimizer).items() if k not in ("state", "param_groups")},
    }
    for place, is_number in holders_of_meta(places):
        if is_number:
            raise UnsupportedUpdate(
                f"the update reads a tensor's value back into Python (.item()) and keeps it in {place}; keep it as a "
                "0-d tensor in optimizer.state[p], or leave the optimizer uncompiled"
            )
        raise UnsupportedUpdate(
            f"the update keeps tensors in {place}; keep each in optimizer.state[p] under a name of its own, shaped "
            "like the parameter"
        )
    for name, value in tensors.items():
        if not value.dtype.is_floating_point:
            check_floating(name, value.dtype)
        if not value.dim() and value.dtype != torch.float32:
            raise UnsupportedUpdate(
                f"the update keeps optimizer.state[p][{name!r}], one number computed from tensors, in {value.dtype}; "
                "such a state is fp32: keep it so, or leave the optimizer uncompiled"
            )
    _check_single(shadow, state)
    _check_attributes(shadow)
    for name in state:
        _check_name(name, state)
    other = [key for key in shadow.optimizer.state if key is not shadow.param]
    if other:
        raise UnsupportedUpdate(
            f"the update uses optimizer.state[{other[0]!r}], which belongs to no parameter; keep numbers in the "
            "parameter group or as attributes of the optimizer"
        )


def _check_attributes(shadow: Shadow) -> None:
    """Raises if the step changes the parameter beside its value."""
    kept = [k for k, v in shadow.param.attributes().items() if not _shown(shadow.param, k, v)]
    if kept:
        raise UnsupportedUpdate(
            f"the update keeps something in p.{kept[0]}, an attribute of the parameter; keep it in optimizer.state[p]"
        )
    if not shadow.param.requires_grad:
        raise UnsupportedUpdate("the update sets p.requires_grad, which the parameter itself would not have afterwards")


@lru_cache
def _suffixes(formats: tuple[Format, ...]) -> frozenset[str]:
    return frozenset(c.suffix for fmt in formats for c in fmt.components if c.suffix)


def _check_name(name: Any, state: Mapping[Any, Any]) -> None:
    """Raises for a name that cannot be the name of a state in the rewritten update, or is reserved in it."""
    what = None
    if not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name):
        what = "which is not a valid variable name"
    elif _RESERVED.fullmatch(name):
        what = "a name that the rewritten update uses itself"
    for suffix in _suffixes(tuple(FORMATS.values())):
        stem = str(name).removesuffix(suffix)
        if stem != name and (stem == "param" or stem in state):
            what = f"which is what the further word of {stem!r} is called"
    if what and (is_meta(state[name]) or what.endswith("called")):
        raise UnsupportedUpdate(f"the update has a state called {name!r}, {what}; rename it")


def _check_single(shadow: Shadow, state: Mapping[str, Any]) -> None:
    """Raises if two states are the same tensor, or one is the parameter or gradient: each needs its own words."""
    named: dict[str, Any] = {"the parameter": shadow.param, "its gradient": shadow.param.grad}
    named |= {f"optimizer.state[p][{k!r}]": v for k, v in state.items()}
    found: dict[Ref, str] = {}
    for where, ref in refs_of(meta_in(named)).items():
        other = found.setdefault(ref, where)
        if other != where:
            raise UnsupportedUpdate(
                f"after the update {other} and {where} are one tensor, and a compiled optimizer keeps each in memory "
                "of its own: what is written to the one would not be seen in the other; keep it under one name, or "
                "clone() it"
            )


def _shown(param: StandIn, name: str, value: Any) -> bool:
    """Returns True if an attribute of a stand-in still equals that of its parameter."""
    return hasattr(param.stands_for, name) and same_number(getattr(param.stands_for, name), value)
