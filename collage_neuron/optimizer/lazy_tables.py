"""Lazy dictionaries of a twin (`method_twin`), whose tensors are created on first access."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

KEYED = ("__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop", "setdefault")
WHOLE = ("__iter__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "__reversed__",
         "__reduce__", "__copy__", "clear", "copy", "items", "keys", "popitem", "update", "values")  # fmt: skip


def _made_first(name: str) -> Any:
    inherited = getattr(defaultdict, name)

    @wraps(inherited)
    def method(self: Lazy, *args: Any, **kwargs: Any) -> Any:
        if self.make is not None and not (self.is_group and name in KEYED and args[0] != "params"):
            self.make()
        return inherited(self, *args, **kwargs)

    return method


class Lazy(defaultdict[Any, Any]):
    """The `state` of a twin, or one of its groups, whose `params` are created on first access."""

    make: Callable[[], None] | None = None
    is_group = False

    @classmethod
    def of(cls, factory: Any, make: Callable[[], None], group: Mapping[str, Any] | None = None) -> Lazy:
        """An empty table, or one with the settings of a group."""
        made = cls(factory)
        dict.update(made, {k: v for k, v in (group or {}).items() if k != "params"})
        made.make, made.is_group = make, group is not None
        return made


for _name in (*KEYED, *WHOLE):  # in Lazy itself, so that C code that copies a dict takes the road of subclasses
    setattr(Lazy, _name, _made_first(_name))
