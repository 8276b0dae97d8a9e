"""A parameter's state as the optimizer's own code knows it, and which parameters share an update, as theirs agree."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics import formats
from collage_neuron.states import reduced_states as small_states
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import ORDINARY
from collage_neuron.states.state_keys import names_in
from collage_neuron.states.step_inventory import Seen
from collage_neuron.states.store import is_host_scalar


class ParamShaped:
    """Represents a parameter-shaped state, whose values a recording does not need."""

    def __init__(self, like: torch.Tensor) -> None:
        self.like = like
        self.shape: Sequence[int] = like.shape


class Shaped(ParamShaped):
    """Represents a state of another shape: of one number that is computed from tensors, rows, columns, or a view."""

    def __init__(self, like: torch.Tensor, shape: Sequence[int]) -> None:
        super().__init__(like)
        self.shape = tuple(shape)


def visible(state: Mapping[str, Any], p: torch.Tensor, small: Collection[str]) -> dict[str, Any]:
    """The state as the optimizer's own code knows it: without our further words, and with tensors without values.

    `small` are the names of states of one number that is computed from tensors (`reduced_states`).
    """
    numbers = numbers_in(state, p, small)
    return {k: state[k] if k in numbers else _without_value(state[k], p) for k in names_in(state).own}


def _without_value(value: Any, p: torch.Tensor) -> ParamShaped:
    if small_states.may_be(value) and p.dim():
        return Shaped(p, ())
    is_other = small_states.may_be_of_rows(value, p) or small_states.may_be_of_view(value, p)
    return Shaped(p, value.shape) if is_other else ParamShaped(p)


def numbers_in(state: Mapping[str, Any], p: torch.Tensor, small: Collection[str]) -> tuple[str, ...]:
    """The names of the host's numbers in a state: those of all else are tensors, `small` ones of one number."""
    names = names_in(state)
    own = (
        k for k in names.own if k not in names.coded and not (k in small and p.dim() and small_states.may_be(state[k]))
    )
    return tuple(name for name in own if _is_number(name, state[name], p))


def _is_number(name: str, value: Any, p: torch.Tensor) -> bool:
    if not isinstance(value, torch.Tensor) or (value.dim() == 0 and is_host_scalar(value, p)):
        return True
    if not value.dtype.is_floating_point:
        raise UnsupportedUpdate(
            f"the update keeps optimizer.state[p][{name!r}] in {value.dtype}, shaped like the parameter; states are "
            "stored in floating-point formats, where counts end (at 256 in bf16) and logic is arithmetic: keep it in "
            f"float32 and store it so (strategy={{{name!r}: 'fp32', ...}}), count in a number for all elements, or "
            "leave the optimizer uncompiled"
        )
    return False


def number(value: Any) -> Any:
    """A key of a number, or of any other value that is not a tensor of the parameter's shape."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.dtype, value.item()  # torch loads a number of a bf16 parameter in bf16, and keeps that
    return repr(value)


# --- which parameters share an update ---------------------------------------------------------------------------------


class StepKind(NamedTuple):
    """What parameters that share a recording have in common, but for the numbers in their states."""

    id: int
    tensors: tuple[str, ...]
    """The names of the numbers that are 0-d tensors."""
    others: tuple[str, ...]
    """The names of the numbers that are not."""


def kind_in(in_step: Seen, p: torch.Tensor, state: Mapping[str, Any]) -> StepKind:
    """The kind of a parameter with this state."""
    return _kinds(in_step).of(p, state)


def _kinds(in_step: Seen) -> _Kinds:
    small = tuple(sorted(bookkeeping(in_step.optimizer).small))
    kinds: _Kinds = in_step.structure.once(("kinds", small), lambda: _Kinds(small))
    return kinds


class _Alike(NamedTuple):
    """Parameters that share a recording as long as their numbers are equal; it depends on the structure alone."""

    params: list[torch.nn.Parameter]
    kind: StepKind

    def by_numbers(self, states: Sequence[Mapping[str, Any]]) -> list[list[torch.nn.Parameter]]:
        """The parameters by the numbers in their `states`: mostly the one list of all."""
        if len(states) == 1:
            return [self.params]
        columns = [_read([state[name] for state in states]) for name in self.kind.tensors]
        columns += [[number(state[name]) for state in states] for name in self.kind.others]
        if all(len(set(column)) == 1 for column in columns):
            return [self.params]
        parts: dict[Any, list[torch.nn.Parameter]] = {}
        for p, *numbers in zip(self.params, *columns, strict=True):
            parts.setdefault(tuple(numbers), []).append(p)
        return list(parts.values())


def are_equal(numbers: list[torch.Tensor]) -> bool:
    """Returns True if 0-d tensors, of which there is one at least, have one value."""
    return len(numbers) == 1 or len(set(_read(numbers))) == 1


def _read(tensors: list[torch.Tensor]) -> list[Any]:
    """The values of 0-d tensors: on a device in one call if they are of one type, since each call waits for it."""
    if not all(map(attrgetter("is_cpu"), tensors)) and len({(t.dtype, t.device) for t in tensors}) == 1:
        numbers: list[Any] = torch.stack(tensors).tolist()
        return numbers
    return list(map(torch.Tensor.item, tensors))


class _Kinds:
    """The kinds of parameters, found out when they are asked for: others may have states that no recording takes."""

    def __init__(self, small: Collection[str]) -> None:
        self._small = small
        self._ids: dict[Any, int] = {}
        self._known: dict[int, StepKind] = {}

    def of(self, p: torch.Tensor, state: Mapping[str, Any]) -> StepKind:
        """The kind of a parameter with this state."""
        known = self._known.get(id(p))
        if known is None:
            known = self._known[id(p)] = self._found(p, state)
        return known

    def _found(self, p: torch.Tensor, state: Mapping[str, Any]) -> StepKind:
        names = numbers_in(state, p, self._small)
        tensors = tuple(name for name in names if type(state[name]) in ORDINARY)
        others = tuple(name for name in names if name not in tensors)
        dtypes = tuple(state[name].dtype for name in tensors)
        key = type(p), p.dtype, p.device, names_in(state).own, tensors, dtypes, others
        return StepKind(self._ids.setdefault(key, len(self._ids)), tensors, others)


def buckets(optimizer: Optimizer, params: list[torch.nn.Parameter]) -> list[list[Any]]:
    """Parameters that share an update: those with equal host scalars (step counts), states, class, dtype, device.

    A list is that of the last step if only the structure tells its parameters from the others.
    """
    in_step, small = step_inventory.of(optimizer), tuple(sorted(bookkeeping(optimizer).small))
    try:
        if in_step is None:
            parts = _by_kind(_Kinds(small), params, [optimizer.state.get(p, {}) for p in params])
            return [
                same for part in parts for same in part.by_numbers([optimizer.state.get(p, {}) for p in part.params])
            ]
        known, key = in_step.structure.table(("alike", small)), tuple(map(id, params))  # the structure holds them
        if (found := known.get(key)) is None:
            found = in_step.structure.keep(known, key, _by_kind(_kinds(in_step), params, in_step.state_of(params)))
        return [same for part in found for same in part.by_numbers(in_step.state_of(part.params))]
    except UnsupportedUpdate:
        require_known(optimizer)  # a word of an unknown format looks like a state of the user's
        raise


def _by_kind(kinds: _Kinds, params: Sequence[torch.nn.Parameter], states: Sequence[Mapping[str, Any]]) -> list[_Alike]:
    parts: dict[int, _Alike] = {}
    for p, state in zip(params, states, strict=True):
        kind = kinds.of(p, state)
        parts.setdefault(kind.id, _Alike([], kind)).params.append(p)
    return list(parts.values())


def require_known(optimizer: Optimizer) -> None:
    """Raises ValueError if a parameter or state is recorded in a format that is not registered."""
    for record in bookkeeping(optimizer).formats.values():
        for name, fmt in record.items():
            formats.require_known(fmt, f"the optimizer has values ({name}) that are")
