"""Shadows: temporary optimizers of the user's class that hold stand-ins without data for the parameters."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.planes import NO_DIMENSIONS, NUMBERS, is_plain
from collage_neuron.passes.ir.update import Captured

SWITCHES = ("foreach", "fused", "capturable")
"""Options that select another implementation of the same update; a shadow uses the plain one."""


class StandIn(torch.nn.Parameter):
    """A parameter without data in place of a real one: it shows the real one's attributes, and records their use."""

    stands_for: torch.Tensor | None = None
    """The real parameter; None for a copy of a stand-in."""
    follows: bool = False
    """True if it has the hash of the real parameter and is equal to it, so that dictionaries find one by the other."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the real parameter, for `isinstance`; for code that uses `type`, see `passes.joint`."""
        return type(self) if self.stands_for is None or not _is_ordinary(self.stands_for) else type(self.stands_for)

    def __getattr__(self, name: str) -> Any:
        """Called for attributes that ordinary parameters do not have."""
        if self.stands_for is None or name.startswith("__"):
            raise AttributeError(name)
        self.asked.add(name)
        value = getattr(self.stands_for, name)
        if not is_plain(value):
            raise UnsupportedUpdate(
                f"the update reads p.{name}, an attribute of the parameter of type {type(value).__name__}; only "
                "numbers and texts are seen there: keep tensors in optimizer.state[p], shaped like the parameter"
            )
        vars(self)[name] = shown = copy.deepcopy(_on_host(value))
        return shown

    def attributes(self) -> dict[str, Any]:
        """The attributes that code has read or set, with their current values."""
        return {k: v for k, v in vars(self).items() if k not in ("stands_for", "follows", "asked")}

    def __hash__(self) -> int:
        return hash(self.stands_for) if self.follows else object.__hash__(self)

    def __eq__(self, other: object) -> Any:
        return True if self.follows and other is self.stands_for else super().__eq__(other)


def stand_in(param: torch.Tensor, follows: bool = False) -> StandIn:
    """A stand-in for `param`, with a gradient."""
    made = StandIn(_meta_like(param))
    vars(made).update(stands_for=param, follows=follows, asked=set())
    made.grad = _meta_like(param)
    return made


def shown_as(param: torch.Tensor, data: torch.Tensor) -> StandIn:
    """A stand-in for `param` with the given data or shape."""
    made = StandIn(data)
    vars(made).update(stands_for=param, follows=False, asked=set())
    return made


def of_its_class(param: torch.Tensor, data: torch.Tensor | None = None) -> torch.nn.Parameter:
    """A parameter of exactly the class of `param`, with its numbers and strings as attributes.

    It is a stand-in instead if the class defines how its tensors take part in operations (DTensor). Without `data`, it
    is on the meta device, with a gradient.
    """
    if not _is_ordinary(param):
        return stand_in(param) if data is None else shown_as(param, data)
    kind: Any = type(param)
    made = torch_privates.made_of_class(kind, _meta_like(param) if data is None else data)
    vars(made).update({k: copy.deepcopy(_on_host(v)) for k, v in vars(param).items() if is_plain(v)})
    made.grad = _meta_like(param) if data is None else None
    return made  # type: ignore[no-any-return]


def _is_ordinary(x: torch.Tensor) -> bool:
    """Returns True for a parameter whose class takes part in operations like torch's own."""
    kind, ordinary = type(x), torch.nn.Parameter
    own = (kind.__torch_function__, kind.__torch_dispatch__)
    return issubclass(kind, ordinary) and own == (ordinary.__torch_function__, ordinary.__torch_dispatch__)


@dataclass
class Shadow:
    """The shadow optimizer and its parameter: a `StandIn`, except in a twin."""

    optimizer: Optimizer
    param: Any
    index: int
    """The index of the shadow's group in `param_groups`; other groups exist only if code counts them."""

    @property
    def group(self) -> dict[str, Any]:
        """The shadow's parameter group."""
        group: dict[str, Any] = self.optimizer.param_groups[self.index]
        return group

    @property
    def state(self) -> dict[str, Any]:
        """The state of the shadow's parameter."""
        state: dict[str, Any] = self.optimizer.state[self.param]
        return state


def shadow_of(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: Mapping[str, Any],
    param: torch.Tensor,
    state: Mapping[str, Any],
) -> Shadow:
    """A shadow of `optimizer` with the settings of `group`, for a parameter of the shape of `param`.

    `state` maps state names to host scalars (numbers, 0-d CPU tensors), which are copied, and to parameter-shaped
    tensors and numbers computed from tensors, which become meta tensors. Everything on the tensor plane is fp32, so
    that code that looks at dtypes takes the road it takes for fp32: the update is captured as the optimizer's author
    wrote it.
    """
    _check_no_optimizer(optimizer, {"state": state})
    return _shadow_with(base, optimizer, group, stand_in(param), shadow_state(state))


def twin_of(
    base: type[Optimizer],
    optimizer: Optimizer,
    group: Mapping[str, Any],
    param: torch.Tensor,
    state: Mapping[str, Any],
    values: Mapping[str, torch.Tensor],
) -> Shadow:
    """A shadow with data: `values`, by name, fp32 on the CPU. Its parameter has exactly the class of `param`."""
    own = of_its_class(param, values["param"])
    own.grad = values["grad"]
    scalars = shadow_state({k: v for k, v in state.items() if not is_tensor_state(v)})
    tensors = {k: values[k] for k, v in state.items() if is_tensor_state(v)}
    return _shadow_with(base, optimizer, group, own, {k: (scalars | tensors)[k] for k in state})


def _shadow_with(
    base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], param: Any, state: dict[str, Any]
) -> Shadow:
    shadow = bare_shadow(base, optimizer)
    groups = _counted_groups(optimizer, group)
    shadow.param_groups = [settings_of(g) | {"params": [param] if g is group else []} for g in groups]
    if state:
        shadow.state[param] = state
    return Shadow(shadow, param, next(i for i, g in enumerate(groups) if g is group))


def bare_shadow(base: type[Optimizer], optimizer: Optimizer) -> Optimizer:
    """An optimizer with the attributes of `optimizer`, without hooks, groups and state."""
    check_whole(optimizer)
    bare = object.__new__(base)
    kept = {k: v for k, v in vars(optimizer).items() if k not in ("step", "state", "param_groups")}
    bare.__dict__.update({k: _plain_copy(v) for k, v in kept.items()})
    bare.__dict__.update(_optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
    bare.state = defaultdict(dict)
    return bare


def shadow_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a stand-in: tensors without data, and the host scalars."""
    return {k: _meta_like(v) if is_tensor_state(v) else _named_copy(k, v) for k, v in state.items()}


def _named_copy(name: str, value: Any) -> Any:
    copied = _own(_on_host(value))
    if isinstance(copied, torch.Tensor):
        vars(copied)["state_name"] = name  # for `NumberWritten`, which has the tensor alone
    return copied


def settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the settings of a group for a shadow, without ours, some of which are on a device."""
    own = {k: v for k, v in group.items() if k != "params" and not str(k).startswith("collage_")}
    return {k: _own(_on_host(v)) for k, v in own.items()} | {k: False for k in SWITCHES if k in group}


def _counted_groups(optimizer: Optimizer, group: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The group alone; or all groups, in order, if an attribute is a list with an entry for each group."""
    groups: list[Mapping[str, Any]] = list(optimizer.param_groups)
    lists = (v for k, v in vars(optimizer).items() if k != "param_groups" and isinstance(v, (list, tuple)))
    if len(groups) > 1 and any(len(v) == len(groups) for v in lists):
        return groups
    return [group]


def check_whole(optimizer: Optimizer) -> None:
    """Raises for an optimizer that steps another one, because a shadow has no parameters for that."""
    kept = {k: v for k, v in vars(optimizer).items() if k != "state"} | {"state": _unusual(optimizer.state)}
    _check_no_optimizer(optimizer, kept)


def _unusual(states: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """`optimizer.state` without the states of parameters: each recording looks at that of its own (`shadow_of`)."""
    if {dict}.issuperset(map(type, states.values())) and _LEAVES.issuperset(map(type, states)):
        return {}
    return states


def _check_no_optimizer(optimizer: Optimizer, kept: Mapping[str, Any]) -> None:
    inner = [k for k, v in kept.items() if _holds_optimizer(v)]
    if inner:
        raise UnsupportedUpdate(
            f"{type(optimizer).__name__} steps another optimizer ({inner[0]}); compile that one, and wrap the result "
            "if the wrapper leaves the weights alone. One that reads or writes weights (Lookahead) must do so "
            "with collage_neuron.exact_value and collage_neuron.set_exact_value, since p itself is rounded to bf16; or "
            "put what it does into step() of a subclass of the inner class, with its tensors in optimizer.state[p]"
        )


def _holds_optimizer(x: Any) -> bool:
    if type(x) in _LEAVES:
        return False
    if isinstance(x, dict):
        x = x.values()
    elif not isinstance(x, (list, tuple)):
        return isinstance(x, Optimizer)
    return any(map(_holds_optimizer, [y for y in x if type(y) not in _LEAVES]))  # each recording asks of every group


_LEAVES = NUMBERS | {torch.Tensor, torch.nn.Parameter}
"""Types of objects that lead to no others."""


def _plain_copy(x: Any) -> Any:
    return _own(_on_host(x)) if isinstance(x, torch.Tensor) and x.dim() == 0 else _own(x)


def _own(x: Any) -> Any:
    """The shadow's value of an attribute or setting: a copy of a number, but the same containers and objects.

    Other objects may refer to these, so they are not copied; `passes.host_state` restores them after a recording.
    """
    if type(x) in NUMBERS or isinstance(x, (list, dict)) or (type(x) is tuple and NUMBERS.issuperset(map(type, x))):
        return x
    return copy.deepcopy(x) if is_plain(x) else x


def is_tensor_state(value: object) -> bool:
    """Returns True if a value passed to `shadow_of` is a tensor of the tensor plane, and not a host scalar."""
    return isinstance(value, ParamShaped)


class ParamShaped:
    """Represents a parameter-shaped state, whose values a recording does not need."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like

    @property
    def shape(self) -> Sequence[int]:
        """The shape that it has on the tensor plane."""
        return self.like.shape or NO_DIMENSIONS

    def beside(self, other: torch.Tensor) -> ParamShaped:
        """Represents the same state of another parameter."""
        return type(self)(other)


class OneNumber(ParamShaped):
    """Represents a state of one number that is computed from tensors: 0-d, beside the parameter `like`."""

    @property
    def shape(self) -> Sequence[int]:
        """That of a number."""
        return ()


class Shaped(ParamShaped):
    """Represents a state of another shape than the parameter's: of its rows, of its columns, or of a view of it."""

    def __init__(self, like: torch.Tensor, shape: Sequence[int]) -> None:
        super().__init__(like)
        self._shape = tuple(shape)

    @property
    def shape(self) -> Sequence[int]:
        """The shape that it has on the tensor plane."""
        return self._shape


def shown_after(captured: Captured, p: torch.Tensor) -> dict[str, ParamShaped]:
    """What represents the states that an update leaves behind."""
    small = {
        name: Shaped(p, captured.shape_of(name, p.shape)) if name in captured.axes else OneNumber(p)
        for name in captured.small
    }
    seen = {name: Shaped(p, shape) for name, shape in captured.shapes.items()}
    return {**dict.fromkeys(captured.states, ParamShaped(p)), **seen, **small}


def _meta_like(x: torch.Tensor | ParamShaped) -> torch.Tensor:
    shape = x.shape if isinstance(x, ParamShaped) else x.shape or NO_DIMENSIONS
    return torch.empty(shape, dtype=torch.float32, device="meta")


def _on_host(value: Any) -> Any:
    """Copies a learning rate (or beta) that is a tensor to the host."""
    return value.detach().clone().cpu() if isinstance(value, torch.Tensor) else value
