"""Copies of what an optimizer holds: containers, objects, small tensors; a mode in which nothing else is written."""

from __future__ import annotations

import argparse
import sys
import types
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from collage_neuron import torch_privates
from collage_neuron.errors import UnknownUpdate
from collage_neuron.states.sharding import ORDINARY, TRIED
from collage_neuron.states.shared_memory import is_given_back, memory_of
from collage_neuron.trace.placeholders import HANDS_OUT, placeholder, waits
from collage_neuron.trace.reachable_code import is_own, root_of
from collage_neuron.trace.side_effects import SHARED, has_plain_attributes, is_harmless
from collage_neuron.trace.xla_calls import is_named_as_writing

SMALL = 4096
"""Up to so many elements a tensor that the optimizer holds is copied; a larger one has no value in a dry run."""
MOST = 100_000
"""Objects that are copied at most."""


def without_value(like: Tensor, shape: Sequence[int] | None = None, device: torch.device | None = None) -> Tensor:
    """A placeholder for a tensor, in another shape or on another device if these are given."""
    device = device or (like.device if like.device.type in TRIED else torch.device("cpu"))
    sizes = torch.empty(like.shape if shape is None else shape, dtype=torch.float32, device="meta")
    return placeholder(sizes.shape, like.stride() if shape is None else sizes.stride(), torch.float32, device)


class Copies:
    """Copies of what an optimizer holds; each object has one."""

    def __init__(self, owns: Any) -> None:
        self.known: dict[int, tuple[Any, Any]] = {}
        """By ids the objects, which stay alive by that, and their copies."""
        self.shared: list[Any] = []
        """The functions, classes and other objects that have no copies: what a step does to them is to be undone."""
        self._owns = owns

    def of(self, x: Any) -> Any:
        """The copy of an object; the object itself if it has none."""
        if type(x) in _ATOMS:
            return x
        if id(x) not in self.known:
            if len(self.known) > MOST:
                raise UnknownUpdate(f"the optimizer holds more than {MOST:,} objects, which are not copied")
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
            return types.MethodType(self.of(x.__func__), self.of(x.__self__))
        if isinstance(x, partial):
            return partial(self.of(x.func), *self.of(x.args), **self.of(x.keywords))
        if isinstance(x, torch.Generator):
            return x.clone_state()
        if isinstance(x, SHARED) or is_harmless(x):
            self.shared.append(x)
            return x
        return self._iterator(x) if hasattr(type(x), "__next__") and not hasattr(x, "__dict__") else self._object(x)

    def _iterator(self, x: Any) -> Any:
        """One of Python's own: of most a copy, of others (a generator) what says that there is none."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Python 3.12 and 3.13 say that they are the last to reduce `itertools`
                kind, given, *state = x.__reduce__()
        except TypeError:
            return Uncopied(x)
        made = kind(*self.of(given))  # not `copy.copy`, whose result shares the iterators within
        if state:
            made.__setstate__(self.of(state[0]))
        return made

    def _tensor(self, x: Tensor) -> Tensor:
        is_usual = type(x) in ORDINARY and x.layout is torch.strided and not x.is_meta
        if x.numel() > SMALL or not is_usual or is_given_back(x):
            return without_value(x)
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
        """A copy of an object of a user's class, with its attributes; of others, what says that there is none."""
        if _is_array(x) and x.size <= SMALL and not x.dtype.hasobject:
            return x.copy()
        is_known = isinstance(x, Optimizer) or type(x) in _NAMESPACES or root_of(x) == "collage_neuron"  # our hooks
        if not is_known and not (is_own(x) and has_plain_attributes(type(x))):
            return Uncopied(x)
        try:
            made = object.__new__(type(x)) if type(x) not in _NAMESPACES else type(x)()
        except TypeError:  # a class of C, or of one
            return Uncopied(x)
        self.known[id(x)] = x, made
        self.shared.append(type(x))
        vars(made).update(self.of(vars(x)))
        return made


_NAMESPACES = types.SimpleNamespace, argparse.Namespace
"""Classes of Python's library whose objects are attributes and nothing else."""


def _is_array(x: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and type(x) is numpy.ndarray


class Uncopied:
    """Stands for what has no copy (a file, a queue, an iterator), in a step that may hold it and not use it."""

    def __init__(self, x: Any) -> None:
        object.__setattr__(self, "_kind", type(x))

    def __getattribute__(self, name: str) -> Any:
        kind = object.__getattribute__(self, "_kind")
        if name == "__class__":  # code may ask what it is
            return kind
        raise UnknownUpdate(f"step() uses a {kind.__name__}, which can be neither copied nor put back")


def _used(self: Any, *args: Any) -> Any:
    # Operators and functions that are built in ask the class, not the object: any attribute raises.
    return self.used


_OF_CLASSES = vars(int).keys() | vars(list).keys() | {"__next__", "__call__", "__enter__", "__exit__"}
_COMPARED = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__setattr__", "__delattr__"}
_ASKED_BY_PYTHON = vars(object).keys() - _COMPARED
for _name in _OF_CLASSES - _ASKED_BY_PYTHON:
    if _name.startswith("__"):
        setattr(Uncopied, _name, _used)

_ATOMS = {int, float, bool, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size}


class Guard(torch_privates.DispatchMode):
    """A mode in which no tensor is written that was there before, and is no copy, and no number is drawn."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's own signature
        self._own: dict[int, StorageWeakRef] = {}
        """By the identities of memory what keeps these from being used again; it may be let go of."""

    def owns(self, x: Tensor) -> None:
        """Notes a tensor that may be written."""
        memory = x.untyped_storage()
        self._own[torch_privates.storage_id(memory)] = StorageWeakRef(memory)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(waits, _flat([*args, *kwargs.values()]))):  # its class notes the call, and nothing is written
            return func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and kwargs.get("generator") is None:
            raise UnknownUpdate("step() draws random numbers, which would be drawn twice")
        self.check(_written(func, args, kwargs))
        given = () if func is torch.ops.aten.lift_fresh.default else (*args, *kwargs.values())  # `torch.tensor(0.0)`
        return self.made(func(*args, **kwargs), given)

    def check(self, written: Iterable[Tensor]) -> None:
        """Raises UnknownUpdate if one of these may not be written."""
        for x in written:
            if torch_privates.storage_id(x.untyped_storage()) not in self._own:
                raise UnknownUpdate(f"step() writes to a tensor of shape {list(x.shape)} that is no state")

    def made(self, out: Any, given: Sequence[Any]) -> Any:
        """What an operation has returned; it may be written unless it has the memory of an argument."""
        there = set(map(memory_of, filterfalse(waits, _flat(given))))
        for x in filterfalse(waits, _flat([out])):
            if memory_of(x) not in there:
                self.owns(x)
        return out


class GuardOfFunctions(TorchFunctionMode):
    """The same in what code calls: a dispatch mode sees no `x.data = y` or `x.numpy()`, and writes on XLA otherwise."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        is_written = name in _CHANGING or is_named_as_writing(func)
        written = (*args[:1], kwargs.get("self"), kwargs.get("input")) if is_written else ()
        self._guard.check(filterfalse(waits, _flat([*written, kwargs.get("out")])))
        out = func(*args, **kwargs)
        # What an attribute is (`p.grad`) was there before.
        return out if name == "__get__" else self._guard.made(out, (*args, *kwargs.values()))


_IN_PLACE = "add and div floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_CHANGING = {
    "__setitem__", "__set__", "register_post_accumulate_grad_hook", "retain_grad", *HANDS_OUT,
    *(f"__i{name}__" for name in _IN_PLACE.split()),
}  # fmt: skip
"""Names of what changes a tensor, or lets others do so, but for those that say so by their form (`add_`)."""


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for i, name in torch_privates.written_arguments(func):
        yield from _flat([args[i] if i < len(args) else kwargs.get(name)])


def _flat(given: Sequence[Any]) -> Iterator[Tensor]:
    for x in given:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _flat(x)
