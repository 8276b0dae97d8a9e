"""Methods of the user's class other than `step`: `eval` and `train` of schedule-free optimizers, `update_hessian`, ...

On the bf16 parameters they would read and write high words only. So every public method and property that the class
and its bases add to `torch.optim.Optimizer` runs while parameters and states present exact fp32 values, which are then
stored in the formats of the optimizer (`eager`). Static and class methods are excluded, since they have no
parameters other than their arguments. `step` itself, when it is recorded or runs as written, calls the methods
unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch.optim import Optimizer

from collage_neuron.optimizer.lazy_tables import Lazy
from collage_neuron.optimizer.method_context import presented_lazily
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.store import States

SPECIAL = ("__call__", "__enter__", "__exit__")
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
        get, put, remove = (f and _exact(base, name, f) for f in (found.fget, found.fset, found.fdel))
        return property(get, put, remove, found.__doc__)
    if isinstance(found, (staticmethod, classmethod, type)) or not callable(getattr(base, name)):
        return None
    return _exact(base, name, getattr(base, name))


def _exact(base: type[Optimizer], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(vars(self).get("state"), (States, Lazy)):
            return method(self, *args, **kwargs)  # in the constructor, when parameters have no low words yet
        context = bookkeeping(self).presented
        if context is not None:
            return method(self, *args, **kwargs)  # a step or a method calls it
        with presented_lazily(base, self, f"{base.__name__}.{name}", (args, kwargs)) as context:
            given = context.given(list(args)), context.given(kwargs)
            return context.result(method(self, *given[0], **given[1]))

    return run
