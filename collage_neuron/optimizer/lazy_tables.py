"""Stands in for `state` and the groups of an optimizer in a method, until the method looks at weights or states."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from typing import Any

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
