"""Joint recordings: records one step of all parameters of all groups at once, and splits it by parameter.

If each part equals the recording of that parameter alone (`passes.capture`), one recording may stand for many.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from collage_neuron.passes.capture.capture import check_returned, kept_by, run_step, tensors_of
from collage_neuron.passes.capture.captured_graph import captured_of
from collage_neuron.passes.capture.functionalize import is_foreach, unrolled
from collage_neuron.passes.capture.host_state import HostState, check_no_stand_ins
from collage_neuron.passes.capture.outcomes import written
from collage_neuron.passes.capture.planes import is_meta, is_plain, same_number
from collage_neuron.passes.capture.reach import of_nobody
from collage_neuron.passes.capture.recorder import Op, Recorder, Ref, Slot
from collage_neuron.passes.capture.shadow import (
    SWITCHES,
    ParamShaped,
    bare_shadow,
    of_its_class,
    settings_of,
    shadow_state,
    stand_in,
)
from collage_neuron.passes.capture.shape_watch import ShapeWatch
from collage_neuron.passes.ir.update import Captured


class Part(NamedTuple):
    """The part of a joint step that updates one parameter."""

    captured: Captured
    slots: list[float]
    scalars: dict[str, Any]
    answers: tuple[bool, ...] = ()
    """Those that code got when it compared numbers read from this parameter's tensors (`outcomes`)."""


class Mixed(Exception):  # a result rather than an error: the caller writes the message
    """One operation used tensors of two parameters; `args` are the two parameters."""


class Joint:
    """A shadow of an optimizer with all its parameters, in their order.

    While a step runs, host objects that hold parameters, or their ids, hold the stand-ins instead: use it where
    `passes.host_state` restores them if a step raises. `optimizer.state` is as for `shadow_of`. With `follow`, a
    stand-in has the hash of its parameter, so that dictionaries anywhere find it. With `typed`, it has the exact class
    of its parameter instead, since code may depend on `type(p)`. `made` is as for `capture`, and `answers` are those to
    comparisons of numbers that are read from tensors, in the order in which code asks.
    """

    def __init__(
        self,
        base: type[Optimizer],
        optimizer: Optimizer,
        follow: bool = False,
        typed: bool = False,
        made: int = 0,
        answers: tuple[bool, ...] = (),
    ) -> None:
        self.base, self.optimizer, self._made, self._answers = base, optimizer, made, answers
        params = [p for group in optimizer.param_groups for p in group["params"]]
        self.stand_ins = {p: of_its_class(p) if typed else stand_in(p, follow) for p in params}
        self.shadow = bare_shadow(base, optimizer)
        self.shadow.param_groups = [
            settings_of(g) | {"params": [self.stand_ins[p] for p in g["params"]]} for g in optimizer.param_groups
        ]
        states = {p: s for p, s in optimizer.state.items() if p in self.stand_ins}
        self.shadow.state = defaultdict(dict, {self.stand_ins[p]: shadow_state(s) for p, s in states.items()})

    def step(self) -> dict[torch.Tensor, Part]:
        """Takes a step of all parameters. Its changes on the host (`passes.host_state`) are not undone.

        Raises:
            UnsupportedUpdate: the step cannot be recorded.
            Mixed: a parameter is updated with tensors of another one.
        """
        before = {p: tensors_of(self.shadow, s) for p, s in self.stand_ins.items()}
        stepped = [p for p, s in self.stand_ins.items() if s.grad is not None]
        recorder = Recorder(bool(self._made), answers=self._answers)
        for s in self.stand_ins.values():
            recorder.keep(kept_by(self.shadow, s))
        with self._in_place():
            returned = run_step(self.base, self.shadow, ShapeWatch(self._made, [*self.stand_ins]), recorder)
        after = {p: tensors_of(self.shadow, s) for p, s in self.stand_ins.items()}
        recorder = written(recorder)
        check_no_stand_ins(self.base, self.shadow)
        check_returned(returned)
        parts = split(recorder, {p: [*before[p].values(), *after[p].values()] for p in before})
        return {p: self._part(p, parts[p], before[p], after[p]) for p in stepped}

    def sync(self, optimizer: Optimizer) -> None:
        """Gives `optimizer` the shadow's attributes and settings as they are now."""
        kept = {k: v for k, v in vars(self.shadow).items() if not of_nobody(k)}
        for k in [k for k in vars(optimizer) if not of_nobody(k) and k not in kept]:
            del vars(optimizer)[k]
        _update(vars(optimizer), kept)
        for group, other in zip(optimizer.param_groups, self.shadow.param_groups, strict=True):
            _update(group, {k: v for k, v in other.items() if k not in ("params", *SWITCHES)})

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """A context in which everything that holds a parameter, or its id, holds the stand-in, or its id."""
        there = [(self.optimizer, self.shadow), *self.stand_ins.items()]
        self._exchange(there)
        yield
        self._exchange([(y, x) for x, y in there])

    def _exchange(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        table, ids = {id(x): y for x, y in pairs}, {id(x): id(y) for x, y in pairs}
        states = {f"optimizer.state[p{i}]": state for i, state in enumerate(self.shadow.state.values())}
        HostState(self.base, self.shadow, states).exchange(table, ids)

    def _part(self, p: torch.Tensor, part: Recorder, before: dict[str, Ref], after: dict[str, Ref]) -> Part:
        state = self.shadow.state[self.stand_ins[p]]
        scalars = {k: v for k, v in state.items() if not is_meta(v)}
        tensors = {k: ParamShaped(p) for k, v in scalars.items() if isinstance(v, torch.Tensor) and v.dim()}
        state.update(shadow_state(tensors))  # the next step has them without their values, as a recording of it has
        answers = tuple(asked.answer for asked in part.asked)
        return Part(captured_of(part, before, after), part.slots, scalars, answers)


def _update(names: dict[str, Any], new: Mapping[str, Any]) -> None:
    """Writes `new` into a mapping: objects always, numbers only where they have changed."""
    for k, v in new.items():
        if k not in names or isinstance(v, (list, dict)) or not (is_plain(v) and same_number(names[k], v)):
            names[k] = v


def split(recorder: Recorder, owned: Mapping[torch.Tensor, Sequence[Ref]]) -> dict[torch.Tensor, Recorder]:
    """A recording for each parameter, with the operations that use its tensors, directly or through other tensors."""
    ops = [(one, _storages(one)) for op in recorder.ops for one in _on_single_tensors(op)]
    root = _connected(storages for _, storages in ops)
    owner: dict[int, torch.Tensor] = {}
    for p, refs in owned.items():
        for ref in refs:
            if owner.setdefault(root(ref.storage), p) is not p:
                raise Mixed(owner[root(ref.storage)], p)
    parts = {p: Recorder() for p in owned}
    for op, storages in ops:
        if storages and root(storages[0]) in owner:
            part = parts[owner[root(storages[0])]]
            part.ops.append(_with_own_slots(op, recorder.slots, part.slots))
    for asked in recorder.asked:
        if (above := root(asked.comparison.storage)) in owner:
            parts[owner[above]].asked.append(asked)
    return parts


def _on_single_tensors(op: Op) -> Iterable[Op]:
    return unrolled(op) if is_foreach(op) else (op,)


def _storages(op: Op) -> list[int]:
    """The storages of the tensors that an operation reads or creates."""
    found: list[int] = []
    waiting: list[Any] = [*op.args, *(x for _, x in op.kwargs), *op.outs]
    for x in waiting:
        if type(x) is Ref:
            found.append(x.storage)
        elif type(x) is tuple:
            waiting.extend(x)
    return found


def _connected(groups: Iterable[list[int]]) -> Callable[[int], int]:
    """A function that maps a storage to the representative of all storages connected to it by operations."""
    parent: dict[int, int] = {}

    def root(storage: int) -> int:
        while (above := parent.setdefault(storage, storage)) != storage:
            parent[storage] = storage = parent[above]
        return storage

    for first, *others in filter(None, groups):
        for other in others:
            if other != first:
                parent[root(other)] = root(first)
    return root


def _with_own_slots(op: Op, numbers: list[float], slots: list[float]) -> Op:
    """`op`, with its numbers appended to `slots`, in the order in which a recording meets them."""
    first = len(slots)
    args, kwargs = _moved(op.args, numbers, slots), _moved(op.kwargs, numbers, slots)
    return Op(op.target, args, kwargs, op.outs, op.place) if len(slots) > first else op


def _moved(found: tuple[Any, ...], numbers: list[float], slots: list[float]) -> tuple[Any, ...]:
    """These arguments with their own slots: a loop, since this is done for all operations of every step."""
    made = list(found)
    for i, x in enumerate(found):
        if type(x) is Slot:
            made[i] = Slot(len(slots))
            slots.append(numbers[x.number])
        elif type(x) is tuple:
            made[i] = _moved(x, numbers, slots)
    return tuple(made)
