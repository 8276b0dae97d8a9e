"""A copy of an optimizer whose tensors have no memory, and the steps that it takes.

The copy has placeholders in place of parameters, gradients and states, and copies of what else the optimizer holds.

What a step of torch's own elementwise classes does depends on the settings of a group, on the numbers in a state, and
on what kind of tensors there are. So a copy with one parameter shows what happens to all that are alike (`record`), and
the optimizer's own step need not run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnknownUpdate, UnsupportedUpdate, pointing_at
from collage_neuron.passes.analysis.state_roles import structure
from collage_neuron.passes.ir.update import Captured, Recording
from collage_neuron.runtime import step_call, wrappers
from collage_neuron.runtime.preconditions import is_left_alone
from collage_neuron.states import inner_optimizers
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.sharding import is_sharded
from collage_neuron.states.store import factory_of, is_idle, record_of
from collage_neuron.states.visible_states import ParamShaped, require_known, visible
from collage_neuron.trace import adopted_tensors, shards
from collage_neuron.trace.calls import Uncompiled, users_of
from collage_neuron.trace.code_inspection import attributes_of_torch
from collage_neuron.trace.deferred_calls import DeferredCalls
from collage_neuron.trace.placeholders import has_value, wait, waits
from collage_neuron.trace.sandbox import Copies, Guard, GuardOfFunctions, without_value
from collage_neuron.trace.side_effects import uncollected
from collage_neuron.trace.source_location import raised_at
from collage_neuron.trace.step_kinds import Before, Left, StepKind, check_states, planned_of, with_states
from collage_neuron.trace.step_reads import Sources
from collage_neuron.trace.tensor_places import SHARED

_READS = "step() reads a value, and before it none is known"


SWITCHES = ("foreach", "fused", "capturable")
"""Options of torch's own classes that select another implementation of the same update: a copy takes the plain one."""


class Stepped(NamedTuple):
    """What a step of a copy has done."""

    kind: StepKind
    numbers: list[float]


class Copied:
    """A copy of an optimizer over some parameters, on their device or another one, and the steps that it takes."""

    def __init__(self, base: type[Optimizer], optimizer: Optimizer, device: torch.device | None = None) -> None:
        self._base, self._guard, self._device = base, Guard(), device
        self.copies = Copies(self._guard.owns)
        self.params: dict[int, Any] = {}
        """The copies of parameters, by the ids of these."""
        self._groups: list[int] = []
        self._dtypes: list[torch.dtype] = []
        self._of_part = wrappers.shape_of_part(optimizer)
        self._has_parts = self._of_part is not None
        self.is_launched = True
        """False if what steps do is only looked at: copies are whole, and shards would add up parts."""
        self.optimizer: Any = object.__new__(base)
        # Without `__init__`, which may want other arguments; and without hooks, which are not the step's code.
        of_torch = {k: v for k, v in vars(optimizer).items() if k in attributes_of_torch()}
        vars(self.optimizer).update(of_torch, _optimizer_step_pre_hooks={}, _optimizer_step_post_hooks={})
        self._inner: list[inner_optimizers.Inner] = []

    def set_groups(self, groups: list[dict[str, Any]], state: dict[Any, Any], has_inner: bool = False) -> None:
        """Gives the copy its groups and states; where they are those of an optimizer inside, the copy of that has them.

        `has_inner` is true if there may be such an optimizer: to look for one in each copy costs as much as the copy.

        Raises:
            UnsupportedUpdate: it cannot have any of its own.
        """
        self._inner = inner_optimizers.inner_of(self.optimizer) if has_inner else []
        for name, own in (("param_groups", groups), ("state", state)):
            if getattr(self.optimizer, name, None) is not own:
                try:
                    setattr(self.optimizer, name, own)
                except AttributeError as error:
                    raise UnsupportedUpdate(f"a copy of it cannot have groups of its own ({error})") from error

    def empty_states(self, optimizer: Any) -> Any:
        """What `state` of an optimizer is before its first step."""
        factory = factory_of(optimizer.state)
        return {} if factory is None else defaultdict(factory if factory is dict else self.copies.of(factory))

    def add_params(self, group: int, params: Sequence[Tensor]) -> None:
        """Copies parameters of a group, by its number."""
        for p in params:
            made = self.params[id(p)] = _parameter(p, self._device)
            self.copies.known[id(p)] = p, made
            self._groups.append(group)
            self._dtypes.append(p.dtype)
            self._has_parts = self._has_parts or is_sharded(p)

    def add_state(self, p: Tensor, shown: Mapping[str, Any]) -> None:
        """Copies the state of a parameter, as its code knows it."""
        self.optimizer.state[self.params[id(p)]] = {k: self._state(v, p) for k, v in shown.items()}

    def _state(self, value: Any, p: Tensor) -> Any:
        if isinstance(value, ParamShaped):
            return without_value(p, None if type(value) is ParamShaped else value.shape, self._device)
        is_narrow = isinstance(value, Tensor) and value.dtype == torch.bfloat16  # a number of training in bf16
        return self.copies.of(value.float() if is_narrow else value)

    def step(
        self, waiting: Callable[..., DeferredCalls] = DeferredCalls, *context: AbstractContextManager[Any]
    ) -> Stepped:
        """Takes a step, in further contexts, whose calls are written down by `waiting`.

        Raises:
            Uncompiled, or UnsupportedUpdate: it is no update of single parameters.
        """
        tensors, before = self._found()
        mode = waiting(tensors, self._read, self._state_of, Sources(self._no_value))
        if not self._has_parts:
            mode.see_made()
        self._mode, holders = mode, torch_privates.references(tensors)
        try:
            self._run(mode, context)
            return self._stepped(mode, before, holders)
        finally:
            mode.adopted.undo()  # what has met values that wait may be the user's own

    def _run(self, mode: DeferredCalls, context: Sequence[AbstractContextManager[Any]]) -> None:
        try:
            with uncollected(), step_call.plain_defaults(), torch.no_grad(), self._guard, ExitStack() as stack:
                for each in (GuardOfFunctions(self._guard), *context, mode):
                    stack.enter_context(each)
                inner_optimizers.lend(self.optimizer, self._inner)
                torch_privates.unhooked_step(self._base)(self.optimizer)
                inner_optimizers.collect(self.optimizer, self._inner)
        except UnsupportedUpdate as error:
            with pointing_at(raised_at(error)):
                raise
        except Exception as error:  # whatever user code raises
            # A KeyError has the parameter that was not found, and to print that would read it.
            error.args = tuple(f"a tensor of shape {list(x.shape)}" if waits(x) else x for x in error.args)
            said = f"{type(error).__name__}: {error}"
            with pointing_at(raised_at(error)):
                raise UnknownUpdate(f"on a copy whose tensors have no values, step() raises {said}") from error
        if mode.failed is not None:  # what code may have caught
            raise mode.failed if isinstance(mode.failed, UnsupportedUpdate) else Uncompiled(str(mode.failed))

    def _stepped(self, mode: DeferredCalls, before: Before, holders: Sequence[int]) -> Stepped:
        mode.put_originals(state for state in self.optimizer.state.values() if type(state) is dict)
        left, calls = self._left(mode), mode.calls
        named = with_states(before.named, calls)
        planned, reads = planned_of(before, named, left, mode)
        for each in planned if self._has_parts else ():
            self._check_parts(each.recording.captured)
        self._check_kept(mode, holders, before, left)
        return Stepped(
            StepKind(before, named, mode.reads.cones, left, left.named(), planned, reads, [], []), mode.numbers
        )

    def _check_parts(self, captured: Captured) -> None:
        try:
            shards.check_parts(captured, self._of_part is None and not self.is_launched)
        except Uncompiled as error:
            if self._of_part is None:
                raise
            raise shards.OfPart(shards.without_whole(str(error), self._of_part)) from None

    def _read(self) -> None:
        raise (UnknownUpdate if self._mode.why == _READS else UnsupportedUpdate)(self._mode.why)

    def _state_of(self, x: Tensor) -> adopted_tensors.Name | None:
        states = (
            (i, inner_optimizers.state_of(self.optimizer, p, self._inner)) for i, p in enumerate(self.params.values())
        )
        return next(((i, name) for i, own in states for name, t in dict.items(own) if t is x), None)

    def _no_value(self, x: Tensor) -> Tensor:
        raise UnknownUpdate(_READS)

    def _found(self) -> tuple[list[Tensor], Before]:
        """The tensors that wait, by their places, and how the step finds them."""
        tensors: list[Tensor] = []
        before = Before([], [], self._groups, self._dtypes, [], torch.get_default_dtype(), self._of_part is not None)
        for p in self.params.values():
            p.grad = without_value(p, device=self._device)
            state = self.optimizer.state.get(p, {})
            check_states([state])
            own = {"param": p, **{k: x for k, x in state.items() if waits(x)}, "grad": p.grad}
            before.named.append({name: len(tensors) + i for i, name in enumerate(own)})
            before.keys.append(tuple(state))
            tensors += own.values()
        return tensors, before

    def _left(self, mode: DeferredCalls) -> Left:
        params = list(self.params.values())
        states = [self.optimizer.state.get(p, {}) for p in params]
        check_states(states)
        values = [x for state in states for x in state.values()]
        return Left(
            [tuple(state) for state in states],
            mode.places.of_each(values),
            mode.places.of_each(params),
            mode.places.of_each([p.grad for p in params]),
        )

    def _check_kept(self, mode: DeferredCalls, holders: Sequence[int], before: Before, left: Left) -> None:
        """Raises Uncompiled for most of what a step keeps: of states that were replaced, it is not asked."""
        first, stays = len(holders), left.places()
        is_shared = mode.places.are_shared(first, users_of(mode.calls, mode.tensors))
        gradients = [named["grad"] for named in before.named]
        made = mode.places.let_go(first)
        held = zip(made, enumerate(torch_privates.references(made), first), strict=True)
        kept = [i for t, (i, n) in held if n > 2 and i not in stays and t.numel() != 1]
        now = torch_privates.references(mode.tensors)
        mode.tensors += made
        if is_shared or mode.are_of_values(kept, first) or any(now[i] > holders[i] for i in gradients):
            raise Uncompiled(SHARED)


def alone(
    base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], p: Any, shown: Mapping[str, Any]
) -> Copied:
    """A copy with one parameter, and its state; all numbers are on the host."""
    copied = Copied(base, optimizer, torch.device("cpu"))
    copied.add_params(0, [p])
    own = {k: v for k, v in group.items() if k != "params" and not str(k).startswith("collage_")}
    settings = {k: copied.copies.of(on_host(v)) for k, v in own.items()} | {k: False for k in SWITCHES if k in group}
    copied.set_groups([settings | {"params": list(copied.params.values())}], copied.empty_states(optimizer))
    if shown:
        copied.add_state(p, {k: on_host(v) for k, v in shown.items()})
    return copied


def on_host(value: Any) -> Any:
    """A number that is a tensor on a device (a rate, a count), on the host."""
    return value.detach().cpu() if isinstance(value, Tensor) else value


def state_of(copied: Copied) -> dict[str, Any]:
    """The state of its only parameter."""
    (p,) = copied.params.values()
    found: dict[str, Any] = copied.optimizer.state.get(p, {})
    return found


def whole(base: type[Optimizer], optimizer: Optimizer) -> Copied:
    """A copy of all of an optimizer."""
    copied = Copied(base, optimizer)
    copied.is_launched = False
    copies, made = copied.copies, copied.optimizer
    copies.known[id(optimizer)] = optimizer, made
    inside = inner_optimizers.inner_of(optimizer)
    for x in (*(each.optimizer for each in inside), optimizer):
        copies.known[id(x.state)] = x.state, copied.empty_states(x)
    for i, group in enumerate(optimizer.param_groups):
        copied.add_params(i, [p for p in group["params"] if not is_left_alone(p)])
    params = {id(p): p for group in optimizer.param_groups for p in group["params"] if id(p) in copied.params}
    for key, p in params.items():
        vars(copied.params[key]).update(copies.of(vars(p)))
    names = vars(optimizer).keys() - attributes_of_torch() - {"step"}  # a `step` among them is another's, which counts
    vars(made).update({k: copies.of(v) for k, v in vars(optimizer).items() if k in names and k[:9] != "_collage_"})
    with suppress(AttributeError):  # a property that asks an optimizer inside
        made.defaults = copies.of(optimizer.defaults)
    groups = copies.of(optimizer.param_groups) if inside else [copies.of(dict(g)) for g in optimizer.param_groups]
    copied.set_groups(groups, copies.of(optimizer.state), has_inner=bool(inside))
    for owner, state in inner_optimizers.shown(optimizer, inside).items():
        if id(owner) in params and isinstance(state, dict):
            if not is_idle(state) or owner in getattr(optimizer.state, "empty", ()):  # else its code finds none
                copied.add_state(owner, visible(state, owner, bookkeeping(optimizer).small))
        else:
            made.state[copies.of(owner)] = copies.of(state)
    return copied


def _parameter(p: Tensor, device: torch.device | None) -> Any:
    made = without_value(p, device=device)
    has_value(made)
    made.__class__ = torch.nn.Parameter
    wait(made)
    return made.requires_grad_(p.requires_grad)


# --- recorded steps: --------------------------------------------------------------------------------------------------


def record(base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], p: Any) -> Recording:
    """The recording of the next step for a parameter of a group.

    Raises:
        UnsupportedUpdate: it cannot be compiled.
    """
    shown = visible(optimizer.state.get(p, {}), p, (), record_of(optimizer, p))
    try:
        try:
            return _record(base, optimizer, group, p, shown)
        except UnsupportedUpdate:
            if p.dim():
                raise
            return _record(base, optimizer, group, p, _as_numbers(optimizer.state.get(p, {}), shown))
    except Uncompiled as error:
        raise UnsupportedUpdate(f"{base.__name__} cannot be compiled: {error}") from error
    except UnsupportedUpdate:
        require_known(optimizer)  # a word of an unknown format looks like a state of the user's
        raise


def _as_numbers(state: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    # In fp32: torch loads a number of a 0-d bf16 parameter in bf16, as it does states.
    return {k: state[k].float() if isinstance(state[k], Tensor) else v for k, v in shown.items()}


def _record(
    base: type[Optimizer], optimizer: Optimizer, group: Mapping[str, Any], p: Any, shown: dict[str, Any]
) -> Recording:
    while True:
        copied = alone(base, optimizer, group, p, shown)
        stepped = copied.step()
        # All states of a 0-d parameter are 0-d. Those that the step computes from what waits are tensors, no numbers.
        waiting = {*stepped.kind.named[0], *(k for k, x in state_of(copied).items() if waits(x))}
        tensors = {k for k, x in shown.items() if k in waiting and not isinstance(x, ParamShaped)}
        if not tensors:
            break
        shown |= dict.fromkeys(tensors, ParamShaped(p))
    found = recording_of(copied, stepped)
    if structure(found.captured.graph).unread:
        return replace(found, following=recording_of(copied, copied.step()))
    return found


def recording_of(copied: Copied, stepped: Stepped) -> Recording:
    """What a step of a copy with one parameter has done.

    Raises:
        UnsupportedUpdate: it has left the parameter as it is.
    """
    if len(stepped.kind.planned) != 1 or stepped.kind.reads:
        raise UnsupportedUpdate("step() does nothing to a parameter")
    (planned,) = stepped.kind.planned
    # Lists and objects that other code keeps there are not the step's: they stay what they are.
    own = ((k, v) for k, v in state_of(copied).items() if isinstance(v, Tensor | Number | str | None))
    scalars = {k: _copy(v) for k, v in own if not waits(v)}
    return replace(planned.recording, scalars=scalars, kind=stepped.kind, numbers=list(stepped.numbers))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
