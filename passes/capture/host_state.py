"""Host state: undoes what a recorded step changes besides tensors, so that a recording has no side effects.

Given: an optimizer whose `step()` calls `self.sched.next()`, counts in a global, draws `random.random()`
Result: the same numbers in every recording of one step, and no side effect of any recording

    with untraced(base, optimizer) as host:
        twin = bare_shadow(base, optimizer)      # inside the block, where iterators are already replaced by copies
        twin.param_groups = [settings_of(group) | {"params": [...]} for group in optimizer.param_groups]
        host.instead_of(optimizer, twin)         # only if objects may lead back to the optimizer
        unhooked_step(base)(twin)                # the user's own step; objects and generators are the real ones
    # here everything is restored, also after an exception

Containers, objects, classes, globals and closures keep their identity; their contents are restored. Iterators of C code
cannot be restored, so code sees copies of them. An object that can be neither restored nor copied (a generator, a file)
is replaced by one that raises `UnsupportedUpdate` when it is used. Contexts nest: an inner one restores its own start.
"""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import BuiltinMethodType, MethodType, MethodWrapperType
from typing import Any

from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.cells import Cell, same
from collage_neuron.passes.capture.device_numbers import is_device_number
from collage_neuron.passes.capture.generators import Generator, of_process
from collage_neuron.passes.capture.planes import is_meta
from collage_neuron.passes.capture.reach import Reach
from collage_neuron.passes.capture.visits import are_atoms


@contextmanager
def untraced(base: type, optimizer: Optimizer | None = None) -> Iterator[HostState]:
    """A context that undoes what a step, or the constructor of a class, changes on the host."""
    states = {} if optimizer is None else {f"optimizer.state[p{i}]": s for i, s in enumerate(optimizer.state.values())}
    with HostState(base, optimizer, states) as host:
        yield host


class HostState:
    """The host objects that steps of `base` may change, as they are now."""

    def __init__(
        self, base: type, optimizer: Optimizer | None = None, states: Mapping[str, dict[str, Any]] | None = None
    ) -> None:
        self._reach = Reach(base, optimizer, states or {})
        self._of_process = [(g, g.read()) for g in of_process()] if self._reach.runs_code and self._may_draw() else []
        self._after: dict[Any, list[Any]] = {}
        self._copies: list[tuple[Any, Any, str]] = []
        self._guards: list[tuple[Guard, Any]] = []

    def _may_draw(self) -> bool:
        """Returns True if this thread's code may draw from the generators of the process.

        Without other threads any draw is its own. Beside others (a data loader) the code must look like it, since
        restoring a generator would give the other threads the same numbers again.
        """
        return threading.active_count() == 1 or self._reach.may_draw

    def _generators(self) -> list[tuple[Generator, Any]]:
        return self._of_process if self._of_process and self._may_draw() else []

    def __enter__(self) -> HostState:
        self.enter()
        return self

    def __exit__(self, *error: object) -> None:
        self.restore()

    def enter(self, copies: bool = True) -> None:
        """Replaces iterators by copies (unless the real ones are to advance), and files by guards."""
        table: dict[int, Any] = {}
        for x, where in self._reach.iterators.values():
            copied = _copy_of(x, self._reach)
            if copied is None:
                table[id(x)] = self._guarded(where, x)
            elif copies:
                table[id(x)] = copied
                self._copies.append((copied, _place_of(copied), where))
        for x, where in self._reach.outside.values():
            table[id(x)] = self._guarded(where, x)
        if table:
            self.exchange(table)

    def _guarded(self, where: str, x: Any) -> Guard:
        guard = Guard(where, type(x).__name__)
        self._guards.append((guard, x))
        return guard

    def exchange(self, table: Mapping[int, Any], ids: Mapping[int, int] | None = None) -> None:
        """Replaces objects, given by id, wherever they are held; numbers that are such an id are replaced too."""
        for key, cell in self._reach.cells.items():
            if cell.by_value:
                continue
            held = cell.read()
            if are_atoms(held) and not (ids and not ids.keys().isdisjoint(held)):
                continue  # a long list of numbers, none of which is an id
            new = [replaced(x, table, ids or {}) for x in held]
            if any(x is not y for x, y in zip(held, new, strict=True)) and cell.write is not None:
                cell.write(new)
                self._after[key] = cell.read()

    def instead_of(self, optimizer: Optimizer, shadow: Optimizer) -> None:
        """Replaces the optimizer by its shadow in the objects that refer to it; the shadow's own attributes too."""
        table = {id(optimizer): shadow}
        if self._reach.leads_back:
            self.exchange(table)
            vars(shadow).update({k: replaced(v, table, {}) for k, v in vars(shadow).items()})

    def leave(self, now: HostState, shadow: Optimizer, optimizer: Optimizer) -> None:
        """Undoes `enter` and `instead_of` in the state `now`, and keeps all other changes."""
        now.exchange({id(shadow): optimizer} | {id(guard): x for guard, x in self._guards})

    def changes(self, carried: bool = True) -> list[str]:
        """Describes what has changed since `enter` and `exchange`, except what a recording carries itself."""
        cells = (
            cell.where
            for key, cell in self._reach.cells.items()
            if cell.is_changed(self._after.get(key, cell.before)) and (carried or key not in self._reach.carried)
            and not _still_equal(cell, self._after.get(key, cell.before))
        )  # fmt: skip
        advanced = (where for x, place, where in self._copies if place is None or _place_of(x) != place)
        drawn = (g.name for g, state in self._generators() if not same(g.read(), state))
        return [*cells, *advanced, *drawn]

    def check(self) -> None:
        """Raises UnsupportedUpdate for an object that was used, or has changed, and cannot be restored."""
        for guard, _ in self._guards:
            if guard.was_used:
                raise guard.error()
        if threads := self._reach.threads:
            raise UnsupportedUpdate(
                f"the update starts a thread ({threads}), and what another thread does to tensors is not recorded; let "
                "step() do it itself"
            )
        for cell in self._reach.cells.values():
            if cell.write is None and cell.is_changed(cell.before):
                raise UnsupportedUpdate(
                    f"the update changes {cell.where}, which can neither be copied nor put back, so that every "
                    "recording of the step would change it; keep what it holds as numbers, lists or objects of a class"
                )

    def restore(self) -> None:
        """Restores everything to the state in which this object was created."""
        for cell in self._reach.cells.values():
            cell.restore()
        for generator, state in self._generators():
            if not same(generator.read(), state):
                generator.write(state)


def check_no_stand_ins(base: type, shadow: Optimizer) -> None:
    """Raises UnsupportedUpdate if a step has left a stand-in, or another tensor without data, in a host object."""
    for cell in Reach(base, shadow, {}).cells.values():
        if not cell.by_value and any(map(_holds_meta, cell.read())):
            raise UnsupportedUpdate(
                f"the update keeps tensors in {cell.where}; keep each in optimizer.state[p] under a name of its own, "
                "shaped like the parameter"
            )


def _holds_meta(x: Any) -> bool:
    return any(map(_holds_meta, x)) if isinstance(x, (tuple, frozenset)) else is_meta(x) or is_device_number(x)


class Guard:
    """Stands in for an object that can be neither copied nor restored: any use raises."""

    def __init__(self, where: str, kind: str) -> None:
        vars(self).update(_where=where, _kind=kind, was_used=False)

    def error(self) -> UnsupportedUpdate:
        """The error for a use of the object: raised at once and, if the step catches it, again after the step."""
        return UnsupportedUpdate(
            "the update uses {_where} ({_kind}), which can neither be copied nor put back, while the step is recorded "
            "more than once; use an object of a class that keeps its place in attributes, or one of itertools, and "
            "read files and log outside step()".format_map(vars(self))
        )

    def _raise(self, *args: Any, **kwargs: Any) -> Any:
        vars(self)["was_used"] = True
        raise self.error()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._raise()

    __next__ = __iter__ = __call__ = __enter__ = __exit__ = __getitem__ = __setattr__ = _raise


def replaced(x: Any, table: Mapping[int, Any], ids: Mapping[int, int]) -> Any:
    """`x`, or its replacement from `table`, also inside a tuple, a bound method or a weak reference."""
    kind = type(x)
    if kind is int:
        return ids.get(x, x)
    if id(x) in table:
        return table[id(x)]
    if isinstance(x, (tuple, frozenset)):
        new = [replaced(y, table, ids) for y in x]
        if all(y is z for y, z in zip(x, new, strict=True)):
            return x
        return kind(*new) if hasattr(x, "_fields") else kind(new)
    if kind is MethodType and id(x.__self__) in table:
        return MethodType(x.__func__, table[id(x.__self__)])
    if kind in (BuiltinMethodType, MethodWrapperType) and id(x.__self__) in table:
        return getattr(table[id(x.__self__)], x.__name__)
    if isinstance(x, weakref.ref) and id(x()) in table:
        return _reference_like(x, table[id(x())])
    return x


def _reference_like(x: weakref.ref[Any], to: Any) -> weakref.ref[Any]:
    """A weak reference of the class of `x`: torch's weak dictionaries find keys by the hash of a class of their own."""
    if isinstance(x, weakref.KeyedRef):
        return weakref.KeyedRef(to, x.__callback__, x.key)
    return type(x)(to, x.__callback__)


def _copy_of(iterator: Any, reach: Reach) -> Any:
    """A copy of an iterator over the same objects; None if it cannot be copied."""
    memo = {key: x for key, x in reach.seen.items() if key not in reach.iterators}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # later Pythons will not copy the iterators of itertools
        try:
            return copy.deepcopy(iterator, memo)
        except Exception:  # generators, and whatever else an object of C code raises
            return None


def _place_of(iterator: Any) -> Any:
    """The position of an iterator, as a value to compare; None if it cannot be read."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return pickle.dumps(iterator)
        except Exception:  # it goes through what cannot be pickled
            return None


def _still_equal(cell: Cell, before: list[Any]) -> bool:
    """Returns True if the objects held now are others, but equal numbers, strings or references."""
    now = cell.read()
    return not cell.by_value and len(now) == len(before) and all(map(_is_equal, now, before))


def _is_equal(x: Any, y: Any) -> bool:
    if x is y or type(x) is not type(y):
        return x is y
    if isinstance(x, tuple):
        return len(x) == len(y) and all(map(_is_equal, x, y))
    if isinstance(x, weakref.ref):  # another one is made when a stand-in is exchanged for its parameter again
        return x() is y()
    return isinstance(x, (int, float, str)) and x == y
