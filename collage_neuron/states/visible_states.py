"""A parameter's state as the optimizer's own code knows it, and which parameters share an update, as theirs agree.

Some states have no value for each element: those of one number (NovoGrad's second moment), of rows or columns
(Adafactor's). They are fp32, in the shapes in which the optimizer makes them.

A 0-d tensor in a state is a number of the host otherwise (`step`), and looks the same. A step distinguishes them: a
state to which it writes tensors, or that it makes of them, is one of these. What was found is kept by name, for
parameters with dimensions (`Bookkeeping.small`). All states of a 0-d parameter are 0-d; which of those are counts is
found out later (`trace/meta_copy.py`).

Counts that would go wrong: those that are kept in bf16 or fp16, as checkpoints of older libraries have `step`, become
fp32, and shared ones are rejected. A count of bf16 stands still at 256 and one of fp16 at 2048, since adding 1 to those
rounds back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate, warn_user
from collage_neuron.numerics import formats
from collage_neuron.passes.ir.scalars import read_numbers
from collage_neuron.passes.ir.update import Captured
from collage_neuron.states import step_inventory
from collage_neuron.states.bookkeeping import Bookkeeping, bookkeeping
from collage_neuron.states.sharding import ORDINARY
from collage_neuron.states.state_keys import is_host_scalar, names_in
from collage_neuron.states.step_inventory import Seen

BYTES = 4
"""The size of each number."""


def may_be(x: object) -> bool:
    """Returns True for a 0-d tensor in fp32, or in bf16, as torch loads it for bf16 parameters."""
    return isinstance(x, Tensor) and not x.dim() and x.dtype in (torch.float32, torch.bfloat16)


def may_be_of_rows(x: object, p: Tensor) -> bool:
    """Returns True for a tensor that may be a state of rows or columns: its shape is a part of that of `p`."""
    if not isinstance(x, Tensor) or not 0 < x.dim() <= p.dim() or p.dim() < 2 or x.shape == p.shape:
        return False
    sizes = iter(p.shape)
    return all(n in sizes for n in x.shape if n != 1)  # in order: each is looked for after the one before


def may_be_of_view(x: object, p: Tensor) -> bool:
    """Returns True for a tensor that may be a state of another shape of `p`, or of its rows (`Captured.seen_as`)."""
    if not isinstance(x, Tensor) or not x.dim() or not p.dim() or x.shape == p.shape or not x.numel():
        return False
    return p.numel() % x.numel() == 0


def learn(book: Bookkeeping, captured: Captured) -> None:
    """Remembers the names of the states of an update that have other shapes than their parameter."""
    book.small.update(captured.small)
    book.seen_as.update(captured.shapes if captured.seen_as is None else {*captured.shapes, *captured.small})


def may_be_state(name: str, x: Tensor, p: Tensor, book: Bookkeeping) -> bool:
    """Returns True if a state of a name that is known may have the shape that `x` has, which is not that of `p`."""
    of_rows = name in book.small and may_be_of_rows(x, p)
    return of_rows or (name in book.seen_as and may_be_of_view(x, p))


def _start(x: object, name: str, p: Tensor, captured: Captured) -> Any:
    """What such a state begins with: what is there, in any floating-point dtype, or what the step makes."""
    if not isinstance(x, Tensor):
        return captured.fresh.get(name, 0.0)
    shape = captured.shape_of(name, p.shape)
    with suppress(RuntimeError):
        if x.is_floating_point():
            return x.expand(shape)
    raise UnsupportedUpdate(
        f"optimizer.state[p][{name!r}] is a tensor in {x.dtype} of shape {list(x.shape)}, and the step computes one of "
        f"shape {list(shape)}; nothing was updated: give it that shape, or delete it"
    )


def bytes_of(captured: Captured, params: Sequence[Tensor]) -> dict[str, int]:
    """Bytes of these states, by name."""
    return {name: BYTES * sum(math.prod(captured.shape_of(name, p.shape)) for p in params) for name in captured.small}


def ensure(optimizer: Optimizer, params: Sequence[Tensor], captured: Captured) -> None:
    """Creates the states of one number that `params` do not have yet, and moves others to fp32 on their device.

    Raises:
        UnsupportedUpdate: there is a state of another shape.
    """
    for p in params if captured.small else ():
        state = optimizer.state[p]
        for name in captured.small:
            old, shape = state.get(name), captured.shape_of(name, p.shape)
            if not _is_kept(old, p, shape):
                step_inventory.changed(optimizer)
                start = torch.as_tensor(_start(old, name, p, captured), dtype=torch.float32, device=p.device)
                state[name] = start.expand(shape).clone(memory_format=torch.contiguous_format)


def _is_kept(x: Any, p: Tensor, shape: tuple[int, ...]) -> bool:
    """Returns True for a state that the step can write as it is; not for one number that is shown as many."""
    if type(x) not in ORDINARY or x.dtype != torch.float32 or x.device != p.device or x.shape != shape:
        return False
    return 0 not in x.stride() or x.is_contiguous()


def states_of(states: Sequence[Mapping[str, Any]], captured: Captured) -> list[dict[str, Tensor]]:
    """The states of one number of each parameter, by name."""
    return [{name: state[name] for name in captured.small} for state in states] if captured.small else []


# --- counts -----------------------------------------------------------------------------------------------------------


ENDS = {torch.bfloat16: 2.0**8, torch.float16: 2.0**11}
"""By the type of a count, where it stands still."""

Place = tuple[MutableMapping[str, Any], str]
"""A state and a key in it."""


def note_made(optimizer: Optimizer, p: Tensor, state: Mapping[Any, Any], names: Iterable[Any]) -> None:
    """Notes which of the states that a step has made under `names` are narrow on purpose: they stay so."""
    made = {name for name in names if isinstance(x := state.get(name), Tensor) and x.dtype in ENDS}
    if made:
        bookkeeping(optimizer).as_made.setdefault(p, set()).update(made)


def widen_counts(optimizer: Optimizer) -> None:
    """Makes such counts fp32, and warns of the largest of those that have come to where their type ends."""
    places = narrow_counts(optimizer)
    ended = [(float(s[k]), k, s[k].dtype) for s, k in places if float(s[k]) >= ENDS[s[k].dtype]]
    if ended:
        value, key, dtype = max(ended, key=lambda of: of[0])
        warn_user(
            f"the state {key!r} of {len(ended)} parameters of this {type(optimizer).__name__} was kept in {dtype}, "
            f"which cannot count beyond {ENDS[dtype]:g}, and is {value:g}: it counts in float32 from here on. If more "
            f"steps than that were taken, set optimizer.state[p][{key!r}] of each parameter to their number"
        )
    for state, key in places:
        state[key] = state[key].float()


def narrow_counts(optimizer: Optimizer) -> list[Place]:
    """Where there are such counts; what a step has made so stays so."""
    found, made = dict[Any, Any](optimizer.state), bookkeeping(optimizer).as_made
    states = [(p, x) for p, x in found.items() if isinstance(p, Tensor) and p.dim() and isinstance(x, MutableMapping)]
    narrow = [(p, x, k) for p, x in states for k, v in x.items() if isinstance(v, Tensor) and v.dtype in ENDS]
    return [(x, k) for p, x, k in narrow if not x[k].dim() and k not in made.get(p, ())]


# --- a state as the optimizer's own code knows it ---------------------------------------------------------------------


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


def visible(
    state: Mapping[str, Any], p: torch.Tensor, small: Collection[str], stored: Collection[str] = ()
) -> dict[str, Any]:
    """The state as the optimizer's own code knows it: without our further words, and with tensors without values.

    `small` are the names of states of one number that is computed from tensors (`Bookkeeping.small`), `stored` those of
    states that have a format, which of a 0-d parameter are 0-d too.
    """
    numbers = numbers_in(state, p, small, stored)
    return {k: state[k] if k in numbers else _without_value(state[k], p) for k in names_in(state).own}


def _without_value(value: Any, p: torch.Tensor) -> ParamShaped:
    if may_be(value) and p.dim():
        return Shaped(p, ())
    is_other = may_be_of_rows(value, p) or may_be_of_view(value, p)
    return Shaped(p, value.shape) if is_other else ParamShaped(p)


def numbers_in(
    state: Mapping[str, Any], p: torch.Tensor, small: Collection[str], stored: Collection[str] = ()
) -> tuple[str, ...]:
    """The names of the host's numbers in a state: those of all else are tensors, `small` ones of one number."""
    names, tensors = names_in(state), small if p.dim() else stored
    own = (k for k in names.own if k not in names.coded and not (k in tensors and may_be(state[k])))
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
    kinds: _Kinds = in_step.structure.once(("kinds", small), lambda: _Kinds(small, bookkeeping(in_step.optimizer)))
    return kinds


class _Alike(NamedTuple):
    """Parameters that share a recording as long as their numbers are equal; it depends on the structure alone."""

    params: list[torch.nn.Parameter]
    kind: StepKind

    def by_numbers(self, states: Sequence[Mapping[str, Any]]) -> list[list[torch.nn.Parameter]]:
        """The parameters by the numbers in their `states`: mostly the one list of all."""
        if len(states) == 1:
            return [self.params]
        columns = [read_numbers([state[name] for state in states]) for name in self.kind.tensors]
        columns += [[number(state[name]) for state in states] for name in self.kind.others]
        if all(len(set(column)) == 1 for column in columns):
            return [self.params]
        parts: dict[Any, list[torch.nn.Parameter]] = {}
        for p, *numbers in zip(self.params, *columns, strict=True):
            parts.setdefault(tuple(numbers), []).append(p)
        return list(parts.values())


class _Kinds:
    """The kinds of parameters, found out when they are asked for: others may have states that no recording takes."""

    def __init__(self, small: Collection[str], book: Bookkeeping) -> None:
        self._small, self._formats = small, book.formats
        self._ids: dict[Any, int] = {}
        self._known: dict[int, StepKind] = {}

    def of(self, p: torch.Tensor, state: Mapping[str, Any]) -> StepKind:
        """The kind of a parameter with this state."""
        known = self._known.get(id(p))
        if known is None:
            known = self._known[id(p)] = self._found(p, state)
        return known

    def _found(self, p: torch.Tensor, state: Mapping[str, Any]) -> StepKind:
        names = numbers_in(state, p, self._small, self._formats.get(p, ()))
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
            kinds, state = _Kinds(small, bookkeeping(optimizer)), partial(map, lambda p: optimizer.state.get(p, {}))
            parts = _by_kind(kinds, params, [*state(params)])
            return [same for part in parts for same in part.by_numbers([*state(part.params)])]
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
