"""What an object holds, read without running any of its code: attributes, slots, and what kind of object it is."""

from __future__ import annotations

from functools import lru_cache
from types import MemberDescriptorType
from typing import Any


def is_c_iterator(x: Any) -> bool:
    """Returns True for an iterator whose position Python cannot write: all except instances of Python classes."""
    return hasattr(type(x), "__next__") and names_in(x) is None and not slots_in(x)


def names_in(x: Any) -> dict[str, Any] | None:
    """The attributes of an object, read without its `__getattr__`, which may do anything."""
    try:
        names = object.__getattribute__(x, "__dict__")
    except AttributeError:
        return None
    return names if isinstance(names, dict) else None


def slots_in(x: Any) -> tuple[str, ...]:
    """The names of the slots that the classes of an object declare."""
    kind: Any = type(x)
    return _slots_of(kind)


def slot(x: Any, name: str, missing: Any) -> Any:
    """What a slot of an object holds, or `missing`."""
    try:
        return object.__getattribute__(x, name)
    except AttributeError:
        return missing


@lru_cache(4096)
def _slots_of(kind: Any) -> tuple[str, ...]:
    written = [vars(cls) for cls in kind.__mro__ if "__slots__" in vars(cls)]
    return tuple({k: None for names in written for k, v in names.items() if isinstance(v, MemberDescriptorType)})


def _is_array(x: Any) -> bool:
    return type(x).__module__ == "numpy" and type(x).__name__ == "ndarray"


class _NumpyMeta(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return _is_array(x)


class NumpyArray(metaclass=_NumpyMeta):
    """numpy's arrays, without importing numpy."""
