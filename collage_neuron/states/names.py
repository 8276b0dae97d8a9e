"""Whose a key of a state is: the optimizer's own, or a further word of one of its states or of the parameter.

Names alone decide that, and all parameters of a group have the same: it is found once for equal names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from collage_neuron.numerics.formats import FORMATS, Format


@dataclass(frozen=True)
class Names:
    """The keys of one parameter's state, by what they are."""

    own: tuple[str, ...]
    """Those that the optimizer's own code knows, in its order."""
    split: tuple[str, ...]
    """Those that have a further word beside them; a key that is such a word itself is not excluded."""
    words: tuple[str, ...]
    """Those of the further words of the parameter."""


class _Endings:
    """Endings of the keys that are ours; read again only where a format was added or exchanged."""

    def __init__(self) -> None:
        self._formats: tuple[Format, ...] = ()
        self._found: frozenset[str] = frozenset()

    def read(self) -> frozenset[str]:
        if (formats := tuple(FORMATS.values())) != self._formats:
            self._found = frozenset(c.suffix for f in formats for c in f.components if c.suffix)
            self._formats = formats
        return self._found


suffixes = _Endings().read
"""Endings of the keys that are ours."""


def is_component(key: str, state: Iterable[str]) -> bool:
    """Whether `key` is a further component of another state (or of the parameter) and not a state of its own."""
    return any(key.endswith(s) and (key[: -len(s)] == "param" or key[: -len(s)] in state) for s in suffixes())


def names_in(state: Mapping[str, Any]) -> Names:
    """The names of the states and words in `state`."""
    return _found(tuple(state), suffixes())


@lru_cache(4096)
def _found(keys: tuple[str, ...], endings: frozenset[str]) -> Names:
    return Names(
        tuple(key for key in keys if not is_component(key, keys)),
        tuple(key for key in keys if any(key + suffix in keys for suffix in endings)),
        tuple(key for key in ("param" + suffix for suffix in endings) if key in keys),
    )
