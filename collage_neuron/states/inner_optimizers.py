"""Optimizers inside an optimizer, which steps them over its own parameters: Lookahead around AdamW, for example.

Between steps, `optimizer.state` of the outer one has the states of all of them, so that whatever stores, launches or
describes states needs to know of one optimizer only. States of an inner one have the name of the attribute in front
(`optimizer__exp_avg`). While code of the class runs, each optimizer has its own states (`lend`, `collect`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, count
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.bookkeeping import bookkeeping, params_of

States = Mapping[Any, Any]


class Inner(NamedTuple):
    """An optimizer that is held by another one."""

    optimizer: Optimizer
    prefix: str
    """How the names of its states begin in `optimizer.state` of the outer one; empty if its `state` is another's."""


def inner_of(optimizer: Optimizer) -> list[Inner]:
    """The optimizers that one holds, in attributes, groups and containers, and those that these hold; each once."""
    return _inner_in(optimizer, _attributes("", optimizer)) if _leads_to_others(optimizer) else []


def _leads_to_others(optimizer: Optimizer) -> bool:
    """Returns False if an optimizer holds no other one, as most do: asked in each step, without a path to each."""
    own = {k: v for k, v in vars(optimizer).items() if type(v) not in _LEAVES and not k.startswith(_COMMON)}
    waiting: list[Any] = [_unusual(own.pop("state", {})), *own.values()]
    known = set[int]()
    while waiting:
        x = waiting.pop()
        if isinstance(x, Optimizer):
            return True
        if isinstance(x, (dict, list, tuple)) and id(x) not in known:
            known.add(id(x))
            inside = [v for k, v in x.items() if k != "params"] if isinstance(x, dict) else x
            waiting += [v for v in inside if type(v) not in _LEAVES]
    return False


def are_copied(optimizer: Optimizer, state: Mapping[str, Any]) -> bool:
    """Returns True if `state`, of which a copy of an optimizer is made, has the optimizers that it holds."""
    there = {id(each.optimizer) for each in _inner_in(optimizer, _items("", state))}
    return all(id(each.optimizer) in there for each in inner_of(optimizer))


def _inner_in(optimizer: Optimizer, held: Iterable[tuple[str, Any]]) -> list[Inner]:
    inner: list[Inner] = []
    known, waiting = {id(optimizer)}, list(held)
    while waiting:
        path, x = waiting.pop(0)
        if id(x) in known:
            continue
        known.add(id(x))
        if isinstance(x, Optimizer):
            others = (optimizer.state, *(each.optimizer.state for each in inner))
            is_shared = any(x.state is state for state in others)
            inner.append(Inner(x, "" if is_shared else _prefix(path, {each.prefix for each in inner})))
            waiting += _attributes(path, x)
        else:
            waiting += _items(path, x)
    return inner


def _attributes(path: str, x: Optimizer) -> Iterator[tuple[str, Any]]:
    """What an optimizer holds, where it is: of its states only what is not one of a parameter."""
    own = {k: v for k, v in vars(x).items() if not k.startswith(_COMMON)}
    own["state"] = _unusual(vars(x).get("state", {}))
    yield from _items(path, own)


def _unusual(states: Any) -> States:
    """What is in `optimizer.state` beside dictionaries of plain values by parameter."""
    if not isinstance(states, dict):
        return {}
    if {dict}.issuperset(map(type, states.values())) and _LEAVES.issuperset(map(type, states)):
        return {}
    return {k: v for k, v in states.items() if not isinstance(k, torch.Tensor)}


def _items(path: str, x: Any) -> Iterator[tuple[str, Any]]:
    """The objects in a container that may be, or hold, an optimizer."""
    if isinstance(x, (list, tuple)):
        x = dict(enumerate(x))
    for k, v in x.items():
        if type(v) not in _LEAVES and k != "params" and isinstance(v, (dict, list, tuple, Optimizer)):
            yield f"{path}_{k}" if isinstance(k, (str, int)) else path, v


_LEAVES = frozenset({type(None), bool, int, float, str, torch.Tensor, torch.nn.Parameter})
"""Types of objects that lead to no others."""

_COMMON = (*torch_privates.OF_TORCH, "_collage_")
"""How the names of attributes begin that are torch's, or ours."""


def _prefix(path: str, taken: Collection[str]) -> str:
    """A path as the beginning of a name, which no other one is: it has two underscores at its end alone."""
    word = re.sub(r"[\W_]+", "_", path).strip("_")
    numbered = (f"{word}{n}__" for n in count(1))
    return next(prefix for prefix in chain([f"{word}__"], numbered) if prefix not in taken)


def check(optimizer: Optimizer) -> None:
    """Raises UnsupportedUpdate for inner optimizers that cannot be compiled with the outer one."""
    name, inner = type(optimizer).__name__, inner_of(optimizer)
    if not inner and not torch_privates.has_hooks(optimizer):  # a step kept from before could not be taken over
        raise UnsupportedUpdate(
            f"{name} cannot be compiled: its constructor does not call that of torch.optim.Optimizer, and makes no "
            "hooks as it does; let it call super().__init__()"
        )
    if not inner:
        return
    if optimizer.state is not optimizer.state:
        raise UnsupportedUpdate(
            f"{name} cannot be compiled: its `state` is made anew each time it is asked for, so that nothing can be "
            "stored there; keep one dictionary, or compile the optimizers that it steps"
        )
    own = set(map(id, params_of(optimizer)))
    for each in inner:
        inside = type(each.optimizer).__name__
        if hasattr(type(each.optimizer), "_collage_base"):
            raise UnsupportedUpdate(
                f"{name} steps an optimizer that is compiled already: compile the outermost one alone, "
                f"collage_neuron.compile({name}(...)), with a plain optimizer inside"
            )
        if not all(hook.is_of(optimizer) for hook in inside_hooks(each.optimizer)):
            raise UnsupportedUpdate(
                f"{name} cannot be compiled: its {inside} is inside another optimizer, which was compiled and has its "
                "states; make a new one"
            )
        if not own.issuperset(id(p) for p in params_of(each.optimizer)):
            raise UnsupportedUpdate(
                f"{name} cannot be compiled: it steps a {inside} over parameters that are in none of its own groups, "
                "and values are kept for the parameters of an optimizer; give it all of them"
            )


class Inside:
    """A hook of an optimizer that a compiled one steps: raises where it is used by itself."""

    def __init__(self, inside: Optimizer, outer: Optimizer) -> None:
        self._inside, self._outer = ref(inside), ref(outer)

    def __call__(self, optimizer: Optimizer, *_: Any) -> None:
        """Raises UnsupportedUpdate outside of a step or method of the compiled one; not for copies of the inner one."""
        outer = self._outer()
        if optimizer is not self._inside() or (outer is not None and bookkeeping(outer).presented is not None):
            return
        name = "an optimizer that is gone" if outer is None else f"this {type(outer).__name__}"
        raise UnsupportedUpdate(
            f"this {type(optimizer).__name__} is inside {name}, which was compiled and has its states, and the exact "
            "values of the parameters: call step(), state_dict() and load_state_dict() of the outer one; nothing was "
            "changed"
        )

    def is_of(self, outer: Optimizer) -> bool:
        """Returns True if the compiled optimizer is this one."""
        return self._outer() is outer

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy is a hook of another optimizer, which gets its own (`watch`)."""
        return partial, (_does_nothing,)


def _does_nothing(*_: Any) -> None:
    """Stands for the hook of an optimizer that was copied."""


def inside_hooks(optimizer: Optimizer) -> list[Inside]:
    """The hooks `Inside` of an optimizer: one if it is inside a compiled one."""
    return [hook for hook in torch_privates.step_pre_hooks(optimizer) if isinstance(hook, Inside)]


# --- their states ---------------------------------------------------------------------------------------------------


def shown(optimizer: Optimizer, inner: Sequence[Inner]) -> States:
    """What `optimizer.state` is between steps, at any time."""
    if not any(each.prefix for each in inner):
        return optimizer.state
    params = dict.fromkeys((*optimizer.state, *(p for _, p, _ in _own(inner))))
    return {p: state_of(optimizer, p, inner) for p in params}


def state_of(optimizer: Optimizer, p: Any, inner: Sequence[Inner]) -> dict[Any, Any]:
    """What `optimizer.state[p]` is between steps; empty if there is none."""
    state: dict[Any, Any] = dict.get(optimizer.state, p, {})
    if not inner or type(state) is not dict:
        return state
    lent = ((each.prefix, dict.get(each.optimizer.state, p)) for each in inner if each.prefix)
    of_inner = ({f"{prefix}{k}": x for k, x in own.items()} for prefix, own in lent if isinstance(own, dict))
    return {k: x for each in (state, *of_inner) for k, x in each.items()}


def lend(optimizer: Optimizer, inner: Iterable[Inner]) -> None:
    """Gives each inner optimizer its own states."""
    for each, p, keys in list(_lent(optimizer, inner)):
        own, state = each.optimizer.state.setdefault(p, {}), optimizer.state[p]
        own.update({k.removeprefix(each.prefix): state.pop(k) for k in keys})


def _lent(optimizer: Optimizer, inner: Iterable[Inner]) -> Iterator[tuple[Inner, Any, list[str]]]:
    """The states of inner optimizers that the outer one has: whose they are, the parameter, and their keys."""
    for each in inner:
        for p, state in optimizer.state.items() if each.prefix else ():
            if type(state) is dict and (keys := _with_prefix(state, each)):
                yield each, p, keys


def _with_prefix(state: States, each: Inner) -> list[str]:
    return [k for k in state if isinstance(k, str) and k.startswith(each.prefix)]


def check_untouched(optimizer: Optimizer, inner: Iterable[Inner]) -> None:
    """Raises UnsupportedUpdate if other code has changed states of an inner optimizer since they were collected."""
    for each in inner:
        for p, state in optimizer.state.items() if each.prefix else ():
            is_there = type(state) is dict and bool(_with_prefix(state, each))
            if (is_there and p not in each.optimizer.state) or each.optimizer.state.get(p):
                name, inside = type(optimizer).__name__, type(each.optimizer).__name__
                raise UnsupportedUpdate(
                    f"the state of the {inside} inside this {name} was written, or cleared, since the last step, or it "
                    f"is another {inside} now, and the states are in that of the {name}: write "
                    f"optimizer.state[p]['{each.prefix}...'], or clear it there"
                )


def mark(optimizer: Optimizer) -> None:
    """Inner optimizers have an empty state for each parameter of which the outer one has states of theirs."""
    for each, p, _ in _lent(optimizer, inner_of(optimizer)):
        each.optimizer.state.setdefault(p, {})


def collect(optimizer: Optimizer, inner: Iterable[Inner]) -> None:
    """Takes them back; the dictionaries stay where they are, empty, since code may hold them.

    Raises:
        UnsupportedUpdate: the outer optimizer has a state with such a name itself.
    """
    wrong = set[str]()
    for each, p, moving in list(_own(inner)):
        state = optimizer.state.setdefault(p, {})
        if type(state) is not dict:
            continue
        wrong.update(_with_prefix(state, each))
        state.update({f"{each.prefix}{k}": x for k, x in moving.items()})
        for k in moving:
            del each.optimizer.state[p][k]
    if wrong:
        raise UnsupportedUpdate(
            f"step() has a state called {min(wrong)!r}, as a state of the optimizer inside is called; rename it"
        )


def _own(inner: Iterable[Inner]) -> Iterator[tuple[Inner, Any, dict[str, Any]]]:
    """The states that inner optimizers have themselves, by parameter."""
    for each in inner:
        states: Mapping[Any, Any] = each.optimizer.state if each.prefix else {}
        for p, state in states.items():
            named = isinstance(p, torch.Tensor) and isinstance(state, dict)
            if moving := {k: x for k, x in state.items() if isinstance(k, str)} if named else {}:
                yield each, p, moving


@contextmanager
def collected(optimizer: Optimizer) -> Iterator[None]:
    """A context after which the outer optimizer has all states, as between steps; if it raises, nothing has changed."""
    inner, before = inner_of(optimizer), set(map(id, optimizer.state))
    try:
        collect(optimizer, inner)
        yield
    except BaseException:
        lend(optimizer, inner)
        for p in [p for p, state in optimizer.state.items() if id(p) not in before and not state]:
            del optimizer.state[p]
        raise


def put_states(optimizer: Optimizer, states: Any) -> None:
    """Sets `optimizer.state`, also where an optimizer inside has the same one, or it is a property that asks for it."""
    before = getattr(optimizer, "state", None)
    for each in inner_of(optimizer) if before is not None else ():
        if each.optimizer.state is before:
            with suppress(AttributeError):  # a property too
                each.optimizer.state = states
    if getattr(optimizer, "state", None) is not states:
        optimizer.state = states


def own_class(cls: type) -> type:
    """A class of objects that have groups and states of their own: torch's where these are asked of an inner one."""
    properties = (getattr(cls, name, None) for name in ("param_groups", "state"))
    return Optimizer if any(hasattr(x, "__set__") for x in properties) else cls


def base_of(cls: Any) -> type[Optimizer]:
    """The user's optimizer class from which a compiled class was made."""
    base: type[Optimizer] = cls._collage_base
    return base
