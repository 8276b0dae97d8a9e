"""Methods of the user's class other than `step`: `eval` and `train` of schedule-free optimizers, `update_hessian`, ...

On the bf16 parameters they would read and write high words only. So every public method and property that the class
and its bases add to `torch.optim.Optimizer` runs while parameters and states present exact fp32 values, which are then
stored in the formats of the optimizer (`eager`). Static and class methods are excluded, since they have no
parameters other than their arguments. `step` itself, when it is recorded or runs as written, calls the methods
unchanged.

A method that reads or sets numbers (a learning rate) decodes nothing: stand-ins are in the place of `state` and the
groups until it looks at weights or states.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterator
from contextlib import _GeneratorContextManager, contextmanager
from functools import cached_property, wraps
from types import AsyncGeneratorType, CoroutineType, FunctionType, GeneratorType, MethodType
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.eager.memory import pool
from collage_neuron.eager.step import Context
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states import external_writes, inner_optimizers, replaced_params, state_writes
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.shared_memory import memory_of
from collage_neuron.states.store import States

KEYED = ("__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop", "setdefault")
WHOLE = ("__iter__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "__reversed__",
         "__reduce__", "__copy__", "__bool__", "clear", "copy", "items", "keys", "popitem", "update",
         "values")  # fmt: skip


def _passed_on(name: str) -> Any:
    @wraps(getattr(defaultdict, name, bool))
    def method(self: Lazy, *args: Any, **kwargs: Any) -> Any:
        if self.real is None:  # made anew by the method: `type(self.state)(dict)`
            return len(self) > 0 if name == "__bool__" else getattr(defaultdict, name)(self, *args, **kwargs)
        if not (self.is_group and name in KEYED and args[0] != "params"):
            self.touch()
        return bool(self.real) if name == "__bool__" else getattr(self.real, name)(*args, **kwargs)

    return method


class Lazy(defaultdict[Any, Any]):
    """Passes everything on to the `real` dictionary; tells `touch` of what may be a look at weights or states."""

    real: dict[Any, Any] | None = None
    touch: Callable[[], None]
    is_group = False

    @classmethod
    def of(cls, real: dict[Any, Any], touch: Callable[[], None], is_group: bool) -> Lazy:
        """One that stands in for `real`; of a group, only its parameters are weights."""
        made = cls()
        made.real, made.touch, made.is_group = real, touch, is_group
        return made


for _name in (*KEYED, *WHOLE):  # in Lazy itself, so that C code that copies a dict takes the road of subclasses
    setattr(Lazy, _name, _passed_on(_name))


LAZY = map, filter, zip, enumerate
"""Iterators that run code as they are read."""

SPECIAL = (
    "__call__", "__enter__", "__exit__", "__getitem__", "__setitem__", "__delitem__", "__iter__", "__next__", "__len__",
    "__contains__",
)  # fmt: skip
"""Special methods that count as public."""


def methods_of(base: type[Optimizer]) -> dict[str, Any]:
    """The methods and properties of the compiled class of `base` that replace those of `base`."""
    return {name: _wrapped(base, name, found) for name, found in _added(base) if _wrapped(base, name, found)}


def _added(base: type[Optimizer]) -> Iterator[tuple[str, Any]]:
    """The attributes that the class and its bases add to `Optimizer`, the most derived one for each name."""
    known = {*dir(Optimizer), "state", "param_groups", "defaults"}
    for cls in reversed(base.__mro__):
        if not issubclass(Optimizer, cls):
            yield from ((k, v) for k, v in vars(cls).items() if k not in known and (k[0] != "_" or k in SPECIAL))


def _wrapped(base: type[Optimizer], name: str, found: Any) -> Any:
    if isinstance(found, property):
        parts = [(part, getattr(found, part)) for part in ("fget", "fset", "fdel")]
        get, put, remove = (f and _exact(base, name, f, part) for part, f in parts)
        return property(get, put, remove, found.__doc__)
    if isinstance(found, cached_property):
        return cached_property(_exact(base, name, found.func, "func"))
    if isinstance(found, (staticmethod, classmethod, type)) or not hasattr(type(found), "__get__"):
        return None  # a callable that is not bound to an optimizer when it is looked up has no `self`
    # What can be set is a value and no method: a user's descriptor need not answer for the class.
    method = None if hasattr(type(found), "__set__") else getattr(base, name, None)
    return _exact(base, name, method) if callable(method) else None


def _exact(base: type[Optimizer], name: str, found: Callable[..., Any], part: str = "") -> Callable[..., Any]:
    @wraps(found)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        now = getattr(base, name)  # looked up in each call: a class may be patched after compile
        method = getattr(now, part, now) if part else now
        if not isinstance(getattr(self, "state", None), (States, Lazy)):
            return method(self, *args, **kwargs)  # in the constructor, when parameters have no low words yet
        context = bookkeeping(self).presented
        if context is not None:
            return method(self, *args, **kwargs)  # a step or a method calls it
        with presented_lazily(base, self, f"{base.__name__}.{name}", (args, kwargs)) as context:
            given = context.given(list(args)), context.given(kwargs)
            return context.result(method(self, *given[0], **given[1]))

    return run


class MethodContext(Context):
    """The context of one call of the method `name`, with the arguments `given`."""

    def __init__(self, base: type[Optimizer], optimizer: Optimizer, name: str, given: Any) -> None:
        super().__init__(base, optimizer, name)
        self._state, self._groups = optimizer.state, optimizer.param_groups
        self._stand_ins: tuple[Any, Any] | None = None
        if inner_optimizers.inner_of(optimizer):
            self._present()  # what looks at an optimizer inside is not seen
            return
        self.hide()
        if self._holds_parameters(vars(optimizer), given):
            self.open()

    def hide(self) -> None:
        """Puts stand-ins in the place of groups and states."""
        groups: list[Any] = [Lazy.of(group, self.open, is_group=True) for group in self._groups]
        self._stand_ins = Lazy.of(self._state, self.open, is_group=False), groups
        vars(self.optimizer).update(state=self._stand_ins[0], param_groups=groups)

    def show(self) -> None:
        """Puts the groups and states back, and what the method has put into their place."""
        own = vars(self.optimizer)
        if self._stand_ins is None:
            return
        (state, groups), self._stand_ins = self._stand_ins, None
        if own["param_groups"] is groups:
            shown: list[Any] = [x.real if isinstance(x, Lazy) else x for x in groups]
            self._groups[:] = shown
            own["param_groups"] = self._groups
        if own["state"] is state:
            own["state"] = self._state

    def open(self) -> None:
        """Presents the values, once."""
        if self._stand_ins is None or bookkeeping(self.optimizer).presented is not self:
            return
        replaced = vars(self.optimizer)["state"] if vars(self.optimizer)["state"] is not self._stand_ins[0] else None
        if replaced is not None:
            vars(self.optimizer)["state"] = self._stand_ins[0]
        self.show()
        self._present()
        if replaced is not None:
            self.optimizer.state = replaced

    def _present(self) -> None:
        replaced_params.follow(self.optimizer)
        external_writes.drop_stale(self.optimizer)
        self._check_graphs()
        self.begin()

    def finish(self) -> None:
        """Stores what the method wrote."""
        if self._stand_ins is not None and vars(self.optimizer)["state"] is not self._stand_ins[0]:
            self.open()
        self.show()
        if not isinstance(self.optimizer.state, States):
            inner_optimizers.put_states(self.optimizer, States.of(self.optimizer.state))
        if not self.presentation.is_on:
            return
        stored = self.store(new=False)
        self.end()
        for p in stored.params_written():
            external_writes.remember(self.optimizer, p)
        state_writes.remember_states(self.optimizer)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspends the context as that of a step; stand-ins are not there meanwhile either."""
        if self.presentation.is_on:
            with super().suspended():
                yield
            return
        self.show()
        bookkeeping(self.optimizer).presented = None
        try:
            yield
        finally:
            bookkeeping(self.optimizer).presented = self
            self._state, self._groups = self.optimizer.state, self.optimizer.param_groups
            self.hide()

    # --- what goes in and comes out -------------------------------------------------------------------------------

    def result(self, x: Any) -> Any:
        """What the method returns, checked; code of the method that runs later has a context of its own.

        Raises:
            UnsupportedUpdate: it refers to weights or states, and what is written to it would not be seen.
        """
        if isinstance(x, (CoroutineType, AsyncGeneratorType)):
            getattr(x, "close", lambda: None)()  # else Python says that nobody has awaited it
            raise self._rejected(f"returns a {type(x).__name__}, whose code runs later, among other code")
        if isinstance(x, (*LAZY, GeneratorType)):
            return _resumed(self, x if isinstance(x, GeneratorType) else (item for item in x))
        if isinstance(x, _GeneratorContextManager):
            x.gen = _resumed(self, x.gen)
            return x
        if isinstance(x, (FunctionType, MethodType)) and getattr(x, "__self__", None) is not self.optimizer:
            return _later(self, x)
        params = {id(p) for group in self._groups for p in group["params"]}
        owners = {id(v.owner) for v in self.presentation.values} - params
        memories = {memory_of(t) for v in self.presentation.values for t in (v.owner, v.shell)}
        memories |= {memory_of(x) for g in self.presentation.gradients.of.values() for x in (g.owner, g.wide)}
        for leaf in leaves(x) if self.presentation.is_on else ():
            if isinstance(leaf, torch.Tensor) and id(leaf) not in params and leaf.numel():
                if id(leaf) in owners or memory_of(leaf) in memories:
                    raise self._rejected("returns memory of a parameter, gradient or state, not a copy")
                if leaf.grad_fn is not None:
                    raise self._rejected("returns a tensor with a graph, whose gradients would go to the fp32 values")
        return x

    def _rejected(self, why: str) -> UnsupportedUpdate:
        return UnsupportedUpdate(
            f"{self.presentation.kind}() {why}. During it parameters and states present exact fp32 values, which are "
            "stored in the optimizer's formats when it returns; no weight was changed. Change the method, or do its "
            "work outside with collage_neuron.exact_value and set_exact_value"
        )

    def _check_graphs(self) -> None:
        for group in self.optimizer.param_groups:
            if any(p.grad is not None and p.grad.requires_grad for p in group["params"]):
                raise self._rejected(
                    "looks at gradients that have a graph (create_graph=True), which fp32 values have not"
                )

    def _holds_parameters(self, attributes: dict[str, Any], given: Any) -> bool:
        """Returns True if the method can reach parameters other than through groups and states."""
        own = {id(p) for group in self._groups for p in group["params"]}
        others = [v for k, v in attributes.items() if k not in ("state", "param_groups")]
        return any(
            id(leaf) in own or (isinstance(leaf, torch.nn.Module) and any(id(p) in own for p in leaf.parameters()))
            for leaf in leaves([others, given])
        )


@contextmanager
def presented_lazily(
    base: type[Optimizer], optimizer: Optimizer, name: str, given: Any = ()
) -> Iterator[MethodContext]:
    """The context of a method that is called with the arguments `given`."""
    ours, context = bookkeeping(optimizer), MethodContext.__new__(MethodContext)
    outer, ours.presented = ours.presented, context
    try:
        context.__init__(base, optimizer, name, given)  # type: ignore[misc]  # it may present values already
        yield context
        context.finish()
    except BaseException as error:
        context.show()
        context.undo(error)
        raise
    finally:
        ours.presented = outer
        context.presentation.clear()
        pool(optimizer).end()


def _later(context: MethodContext, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def later(*args: Any, **kwargs: Any) -> Any:
        if bookkeeping(context.optimizer).presented is not None:
            return function(*args, **kwargs)
        with presented_lazily(context.base, context.optimizer, context.presentation.kind) as own:
            own.open()  # what its code holds already (an iterator over parameters) would not touch the stand-ins
            return own.result(function(*args, **kwargs))

    return later


def _resumed(context: MethodContext, generator: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
    """A generator whose code has a context of its own whenever it goes on."""
    proceed = _later(context, _next)
    call, x = generator.send, None
    while True:
        is_over, item = proceed(call, x)
        if is_over:
            return item
        try:
            call, x = generator.send, (yield item)
        except BaseException as error:
            call, x = generator.throw, error


def _next(call: Callable[[Any], Any], x: Any) -> tuple[bool, Any]:
    """What a generator yields next; or True, and what it returns: its end is no error in the context of a method."""
    try:
        return False, call(x)
    except StopIteration as end:
        return True, end.value


def leaves(x: Any, path: tuple[int, ...] = ()) -> Iterator[Any]:
    """The objects in nested containers."""
    if id(x) in path:
        return
    if isinstance(x, dict):
        for pair in dict.items(x):
            yield from leaves(pair, (*path, id(x)))
    elif isinstance(x, (list, tuple, set, frozenset, deque)):
        for item in x:
            yield from leaves(item, (*path, id(x)))
    else:
        yield x
