"""What the next step will do, known before it: a traced step of a copy of the optimizer, whose tensors have no memory.

The copy has placeholders in place of parameters, gradients and states, and copies of the containers, of the objects
and of the small tensors that the optimizer holds; what else its code changes on the host is undone. The result is best
effort: a step that looks at a value, or uses what cannot be put back (a generator), is not known before it is taken.
"""

from __future__ import annotations

import types
import warnings
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.passes.analysis.first_moments import unread_states
from collage_neuron.passes.capture.closures import own_step
from collage_neuron.passes.capture.host_state import untraced
from collage_neuron.passes.capture.recording import Recording
from collage_neuron.passes.capture.shadow import ParamShaped
from collage_neuron.passes.capture.source_location import raised_at
from collage_neuron.recording.bucketing import record
from collage_neuron.recording.visible import visible
from collage_neuron.runtime import wrappers
from collage_neuron.runtime.plan import Records
from collage_neuron.runtime.preconditions import is_left_alone
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import ORDINARY, TRIED, is_sharded
from collage_neuron.states.shared_memory import is_given_back
from collage_neuron.trace import met, shards
from collage_neuron.trace.calls import Uncompiled, users_of
from collage_neuron.trace.kinds import Before, Left, planned_of, with_states
from collage_neuron.trace.placeholders import has_value, placeholder, wait, waits
from collage_neuron.trace.switch import is_traced
from collage_neuron.trace.types_asked import asks_for_types
from collage_neuron.trace.waiting import SHARED, Waiting

SMALL = 4096
"""Up to so many elements a tensor that the optimizer holds is copied; a larger one has no value in a dry run."""
MOST = 100_000
"""Objects that are copied at most."""


class Known:
    """What is known of the next step of an optimizer."""

    def __init__(self, base: type[Optimizer], found: Mapping[int, Recording], error: Exception | None = None) -> None:
        self._base, self._found, self._error = base, found, error

    @property
    def is_of_part(self) -> bool:
        """Returns True if the step does what parts of parameters cannot have: it will not run as written either."""
        return isinstance(self._error, shards.OfPart)

    def record(self, group: dict[str, Any], p: Tensor) -> Recording:
        """The update of a parameter; that of another one of its group, if this step leaves it as it is.

        Raises:
            UnsupportedUpdate: it is not known, for the reason given.
        """
        like = next((q for q in (p, *group["params"]) if id(q) in self._found), None)
        if like is None:
            why = self._error or "step() does nothing to a parameter"
            cause = None if self._error is None else self._error.__cause__
            raise UnsupportedUpdate(f"{self._base.__name__} cannot be compiled: {why}") from cause
        return self._found[id(like)]

    def of_groups(self, optimizer: Optimizer) -> Iterator[tuple[dict[str, Any], Recording]]:
        """The updates of all parameters, with their groups."""
        for group in optimizer.param_groups:
            yield from ((group, self._found[id(p)]) for p in group["params"] if id(p) in self._found)


def run(base: type[Optimizer], optimizer: Optimizer) -> Known:
    """Takes one step of a copy, and a second one if the first does not show what its states are for."""
    found: dict[int, Recording] = {}
    try:
        with warnings.catch_warnings(), untraced(base, optimizer) as host:
            warnings.simplefilter("ignore")
            copied = _Copied(base, optimizer)
            host.instead_of(optimizer, copied.optimizer)
            found = copied.step()
            if any(unread_states(each.captured.graph) for each in found.values()):
                found = _with_following(found, copied)
            host.check()
    except (UnsupportedUpdate, Uncompiled) as error:
        return Known(base, found, error)
    return Known(base, found)


def known(base: type[Optimizer], optimizer: Optimizer) -> Known | None:
    """What is known of the next step, if steps are traced; None where they are recorded."""
    if not is_traced(base):
        return None
    why = next(_unknown(base, optimizer), None)
    return run(base, optimizer) if why is None else Known(base, {}, UnsupportedUpdate(why))


def _unknown(base: type[Optimizer], optimizer: Optimizer) -> Iterator[str]:
    """Why the next step will not be traced, or a copy cannot take it."""
    if asks_for_types(base):  # type: ignore[arg-type]  # a class has a hash
        yield "a function asks for exact types"
    if torch_privates.modes():
        yield "a mode of torch's sees each operation"
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.device.type not in (*TRIED, "meta"):
                yield f"a parameter is on {p.device}, and steps are tried on {', '.join(TRIED)} only"


def records(base: type[Optimizer], optimizer: Optimizer, known: Known | None) -> Records:
    """What has the recordings of the next step: what is known of it, or else capture."""
    return partial(record, base, optimizer) if known is None else known.record


def _with_following(found: Mapping[int, Recording], copied: _Copied) -> dict[int, Recording]:
    try:
        later = copied.step()
    except (UnsupportedUpdate, Uncompiled):
        return dict(found)
    return {
        key: replace(each, following=later.get(key)) if unread_states(each.captured.graph) else each
        for key, each in found.items()
    }


# --- the copy ---------------------------------------------------------------------------------------------------------


class _Copied:
    """A copy of an optimizer, and the steps that it takes."""

    def __init__(self, base: type[Optimizer], optimizer: Optimizer) -> None:
        self._base, self._guard = base, _Guard()
        self._groups = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
        params = {id(p): p for group in optimizer.param_groups for p in group["params"] if not is_left_alone(p)}
        copies = _Copies(self._guard.owns)
        self._params = {key: _parameter(p) for key, p in params.items()}
        self._dtypes = [p.dtype for p in params.values()]
        self._of_part = wrappers.shape_of_part(optimizer)
        self._has_parts = self._of_part is not None or any(map(is_sharded, params.values()))
        self.optimizer: Any = object.__new__(base)
        copies.known.update({key: (params[key], made) for key, made in self._params.items()})
        copies.known[id(optimizer)] = optimizer, self.optimizer
        for key, p in params.items():
            vars(self._params[key]).update(copies.of(vars(p)))
        own = {k: v for k, v in vars(optimizer).items() if not k.startswith("_collage_") and k not in _NOT_COPIED}
        vars(self.optimizer).update(copies.of(own), _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
        self.optimizer.param_groups = [copies.of(dict(group)) for group in optimizer.param_groups]
        self.optimizer.state = defaultdict(dict)
        small = bookkeeping(optimizer).small
        for owner, state in optimizer.state.items():
            if id(owner) in params and isinstance(state, dict):
                shown = visible(state, owner, small)
                self.optimizer.state[copies.of(owner)] = {k: _state(v, owner, copies) for k, v in shown.items()}
            else:
                self.optimizer.state[copies.of(owner)] = copies.of(state)

    def step(self) -> dict[int, Recording]:
        """Takes a step; the updates of parameters, by their ids."""
        tensors, before = self._found()
        mode = Waiting(tensors, {}, (), (), (), self._read, self._state_of, self._no_value)
        self._mode, holders = mode, torch_privates.references(tensors)
        try:
            with own_step(self._base, self.optimizer) as step, self._guard, mode:
                step()
        except UnsupportedUpdate as error:
            with pointing_at(raised_at(error)):
                raise
        except Exception as error:  # whatever user code raises
            said = f"{type(error).__name__}: {error}"
            with pointing_at(raised_at(error)):
                raise UnsupportedUpdate(f"on a copy whose tensors have no values, step() raises {said}") from error
        if mode.failed is not None:
            raise mode.failed
        mode.put_originals(state for state in self.optimizer.state.values() if type(state) is dict)
        left = self._left(mode)
        planned, _ = planned_of(before, with_states(before.named, mode.calls), left, mode)
        for each in planned if self._has_parts else ():
            self._check_elementwise(each.recording)
        self._check_kept(mode, holders, before, left)
        mode.exchange_states(met.exchange_back)
        asked, keys = frozenset({"shape"}), list(self._params)
        return {keys[i]: replace(each.recording, asked=asked) for each in planned for i in each.params}

    def _check_elementwise(self, recording: Recording) -> None:
        try:
            shards.check_elementwise(recording)
        except Uncompiled as error:
            if self._of_part is None:
                raise
            raise shards.OfPart(shards.without_whole(str(error), self._of_part)) from None

    def _read(self) -> None:
        raise UnsupportedUpdate(self._mode.why)

    def _state_of(self, x: Tensor) -> met.Name | None:
        states = ((i, self.optimizer.state.get(p, {})) for i, p in enumerate(self._params.values()))
        return next(((i, name) for i, own in states for name, t in dict.items(own) if t is x), None)

    def _no_value(self, x: Tensor) -> Tensor:
        raise Uncompiled("step() reads a value, and before it none is known")

    def _found(self) -> tuple[list[Tensor], Before]:
        """The tensors that wait, by their places, and how the step finds them."""
        tensors: list[Tensor] = []
        groups = [self._groups[key] for key in self._params]
        before = Before([], [], groups, self._dtypes, [], torch.get_default_dtype(), self._of_part is not None)
        for p in self._params.values():
            p.grad = _placeholder(p)
            state = self.optimizer.state.get(p, {})
            if not isinstance(state, dict):
                raise Uncompiled("a state is not a dictionary")
            own = {"param": p, **{k: x for k, x in state.items() if waits(x)}, "grad": p.grad}
            before.named.append({name: len(tensors) + i for i, name in enumerate(own)})
            before.keys.append(tuple(state))
            tensors += own.values()
        return tensors, before

    def _left(self, mode: Waiting) -> Left:
        params = list(self._params.values())
        states = [self.optimizer.state.get(p, {}) for p in params]
        if not {dict}.issuperset(map(type, states)):
            raise Uncompiled("a state is not a dictionary")
        values = [x for state in states for x in state.values()]
        return Left(
            [tuple(state) for state in states],
            mode.places_of(values),
            mode.places_of(params),
            mode.places_of([p.grad for p in params]),
        )

    def _check_kept(self, mode: Waiting, holders: Sequence[int], before: Before, left: Left) -> None:
        """Raises Uncompiled for most of what a step keeps: of states that were replaced, it is not asked."""
        first, stays = len(holders), left.places()
        is_shared = mode.is_shared(first, users_of(mode.calls, mode.tensors))
        gradients = [named["grad"] for named in before.named]
        made = mode.let_go(first)
        held = zip(made, enumerate(torch_privates.references(made), first), strict=True)
        kept = any(n > 2 and i not in stays and t.numel() != 1 for t, (i, n) in held)
        now = torch_privates.references(mode.tensors)
        mode.tensors += made
        if is_shared or kept or any(now[i] > holders[i] for i in gradients):
            raise Uncompiled(SHARED)


_NOT_COPIED = {"step", "state", "param_groups"}
"""Attributes that a copy has of its own; a `step` among them is another's, which counts steps, say."""


def _placeholder(like: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    device = like.device if like.device.type in TRIED else torch.device("cpu")
    sizes = torch.empty(like.shape if shape is None else shape, dtype=torch.float32, device="meta")
    return placeholder(sizes.shape, like.stride() if shape is None else sizes.stride(), torch.float32, device)


def _parameter(p: Tensor) -> Any:
    made = _placeholder(p)
    has_value(made)
    made.__class__ = torch.nn.Parameter
    wait(made)
    return made.requires_grad_(p.requires_grad)


def _state(value: Any, p: Tensor, copies: _Copies) -> Any:
    """What a copy has for a value in a state."""
    if isinstance(value, ParamShaped):
        return _placeholder(p) if type(value) is ParamShaped else _placeholder(p, value.shape)
    return copies.of(value)


class _Copies:
    """Copies of what an optimizer holds; each object has one."""

    def __init__(self, owns: Any) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}
        """By ids the objects, which stay alive by that, and their copies."""
        self._owns = owns

    def of(self, x: Any) -> Any:
        """The copy of an object; the object itself if it has none."""
        if type(x) in _ATOMS:
            return x
        if id(x) not in self.known:
            if len(self.known) > MOST:
                raise UnsupportedUpdate(f"the optimizer holds more than {MOST:,} objects, which are not copied")
            self.known[id(x)] = x, x  # of one that refers to itself
            self.known[id(x)] = x, self._copy(x)
        return self.known[id(x)][1]

    def _copy(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self._tensor(x)
        if isinstance(x, (dict, list, set, deque)):
            return self._container(x)
        if isinstance(x, tuple):
            items = list(map(self.of, x))
            return x._make(items) if hasattr(x, "_make") else type(x)(items)
        if isinstance(x, types.MethodType):
            return types.MethodType(x.__func__, self.of(x.__self__))
        if isinstance(x, partial):
            return partial(self.of(x.func), *self.of(x.args), **self.of(x.keywords))
        if isinstance(x, torch.Generator):
            return x.clone_state()
        return self._object(x)

    def _tensor(self, x: Tensor) -> Tensor:
        if x.numel() > SMALL or type(x) not in ORDINARY or x.is_meta or is_given_back(x):
            return _placeholder(x)
        made = x.detach().clone()
        self._owns(made)
        return made

    def _container(self, x: Any) -> Any:
        made = x.copy()
        self.known[id(x)] = x, made
        made.clear()
        if isinstance(x, dict):
            made.update({self.of(k): self.of(v) for k, v in x.items()})
        else:
            (made.update if isinstance(x, set) else made.extend)(list(map(self.of, x)))
        return made

    def _object(self, x: Any) -> Any:
        """A copy of an object of a class that is written in Python, with its attributes; modules stay what they are."""
        kind = type(x)
        if isinstance(x, (type, types.ModuleType, types.FunctionType, torch.nn.Module)) or not hasattr(x, "__dict__"):
            return x
        if any(c is not object and "__dict__" not in vars(c) and not vars(c).get("__module__") for c in kind.__mro__):
            return x
        try:
            made = object.__new__(kind)
        except TypeError:  # a class of C, or of one
            return x
        self.known[id(x)] = x, made
        vars(made).update(self.of(vars(x)))
        return made


_ATOMS = {int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}


class _Guard(torch_privates.DispatchMode):
    """A mode in which no tensor is written that was there before, and is no copy."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self._own: dict[int, Tensor] = {}

    def owns(self, x: Tensor) -> None:
        """Notes a tensor that may be written."""
        self._own[torch_privates.storage_id(x.untyped_storage())] = x  # alive: its identity would be used again

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(waits, _flat([*args, *kwargs.values()]))):
            return func(*args, **kwargs)
        for x in _written(func, args, kwargs):
            if torch_privates.storage_id(x.untyped_storage()) not in self._own:
                raise UnsupportedUpdate(f"step() writes to a tensor of shape {list(x.shape)} that is no state")
        out = func(*args, **kwargs)
        for x in _flat([out]):
            self.owns(x)
        return out


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    if torch_privates.is_operation(func):
        given = dict(zip((a.name for a in torch_privates.schema(func).arguments), args, strict=False)) | dict(kwargs)
        for a in torch_privates.schema(func).arguments:
            if a.alias_info is not None and a.alias_info.is_write and a.name in given:
                yield from _flat([given[a.name]])


def _flat(given: Sequence[Any]) -> Iterator[Tensor]:
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _flat(x)
