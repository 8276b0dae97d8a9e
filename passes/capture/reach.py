"""Finds the host objects that an optimizer's `step()` can reach and change: attributes, contents, classes, globals.

The walk starts at the optimizer's attributes and settings and at the classes that its author wrote, and follows objects
and the code of their methods. It ends at libraries (Python, torch, installed packages other than the optimizer's own):
of these only objects that the optimizer holds are watched, not the contents of their modules and classes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.capture.cells import (
    Cell,
    flat_pairs,
    put_pairs,
)
from collage_neuron.passes.capture.planes import is_plain
from collage_neuron.passes.capture.threads import STARTERS, starts_threads
from collage_neuron.passes.capture.visits import ATOMS, Visits, are_atoms


@cache
def of_torch() -> frozenset[str]:
    """Attributes that every optimizer has: its groups and state, hooks, defaults.

    When they are asked for, since the first optimizer of a process makes torch import its compiler, for two seconds;
    and of one without parameters, since a step may be being recorded by then.
    """
    return frozenset(vars(torch.optim.SGD([{"params": []}])))


class Reach(Visits):
    """The cells that the code of `base` can reach from `optimizer`, or from the class alone if that is None.

    `states` are the dictionaries of host scalars that stand for `optimizer.state[p]`.
    """

    def __init__(self, base: type, optimizer: Optimizer | None, states: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(base)
        self.carried: set[int] = set()
        """Ids of lists and dictionaries of numbers that are reachable from one attribute or setting only."""
        self.own: dict[int, str] = {}
        """The optimizer's groups and states, which code may reach only through the optimizer."""
        self.leads_back = False
        """True if an object that the optimizer holds, or a global, refers to the optimizer."""
        self._base, self._optimizer = base, optimizer
        for cls in base.__mro__:
            self._later(cls, cls.__name__)
        self._walk()
        if optimizer is not None:
            self._start(optimizer, states)
            self._walk()

    @property
    def threads(self) -> str | None:
        """What starts a thread in the code of `step`, and where, if anything does."""
        return starts_threads(self._base, self.is_of_library) if self._words & STARTERS else None

    def _start(self, optimizer: Optimizer, states: Mapping[str, dict[str, Any]]) -> None:
        self.seen[id(optimizer)] = optimizer
        named = {"optimizer": vars(optimizer), **states}
        self.own = {id(optimizer.param_groups): "param_groups", id(optimizer.state): "state"}
        for i, group in enumerate(optimizer.param_groups):
            named[f"param_groups[{i}]"] = group
            self.own[id(group)] = f"param_groups[{i}]"
        for where, namespace in named.items():
            self._namespace(namespace, where)

    def _namespace(self, names: dict[str, Any], where: str) -> None:
        """Visits the attributes of the optimizer, a group or a state; they are a cell if not all are numbers."""
        leave = of_nobody if where == "optimizer" else {"params"}.__contains__
        left = () if self.runs_code or where != "optimizer" else ("defaults",)  # torch's own code never writes there
        may_change = [k for k, v in names.items() if type(v) not in _FIXED and not _cannot_change(v)]
        if all(leave(k) or k in left for k in may_change):  # nearly always, and each recording asks of every group
            return
        kept = {k: v for k, v in names.items() if not leave(k) and k not in left}
        self.cells[id(names)] = Cell(where, lambda: flat_pairs(names, leave), lambda new: put_pairs(names, new, leave))
        for k, v in kept.items():
            if is_plain(v) and (where != "optimizer" or k != "defaults"):
                self._carry(v)
            self._later(v, f"{where}.{k}" if where == "optimizer" else f"{where}[{k!r}]")

    def _carry(self, x: Any) -> None:
        if isinstance(x, (list, dict)):
            if id(x) in self.seen or id(x) in self.carried:
                self.carried.discard(id(x))
                return
            self.carried.add(id(x))
            inner = x.values() if isinstance(x, dict) else x
            for y in () if are_atoms(inner) else inner:
                self._carry(y)

    def _walk(self) -> None:
        while self._todo:
            x, where = self._todo.pop()
            if id(x) in self.own:
                raise UnsupportedUpdate(
                    f"{where} is the optimizer's own {self.own[id(x)]}, which a recording has in another place; let "
                    f"step() take it from self.{self.own[id(x)]}"
                )
            if id(x) in self.seen:
                self.carried.discard(id(x))
                self.leads_back |= x is self._optimizer
                continue
            self.seen[id(x)] = x
            self._visit(x, where)


def held_by(base: type, optimizer: Optimizer, states: Mapping[str, dict[str, Any]]) -> Iterator[Any]:
    """All objects that the code of `base` can reach, also the tensors in namespaces that no cell is needed for."""
    yield from Reach(base, optimizer, states).seen.values()
    for names in (vars(optimizer), *optimizer.param_groups, *states.values()):
        yield from _in_tuples(names.values())


def _in_tuples(held: Iterable[Any]) -> Iterator[Any]:
    """What is held, and what is in the tuples among it: those that cannot change are not walked."""
    for x in held:
        yield x
        if isinstance(x, tuple):
            yield from _in_tuples(x)


_FIXED = ATOMS | {torch.Tensor, torch.nn.Parameter}
"""Types of numbers, strings and tensors, as most settings have them."""


def _cannot_change(x: Any) -> bool:
    """Returns True for numbers, strings and tuples of them, and for tensors, which shadows copy.

    A parameter in a tuple is one to be exchanged (`HostState.exchange`).
    """
    if isinstance(x, tuple):
        return all(not isinstance(y, torch.nn.Parameter) and _cannot_change(y) for y in x)
    return type(x) in ATOMS or isinstance(x, torch.Tensor)


def of_nobody(name: str) -> bool:
    """Returns True for attributes of an optimizer that no step changes: hooks and similar ones, and our own."""
    return name == "step" or name.startswith("_collage") or (name in of_torch() and name != "defaults")
