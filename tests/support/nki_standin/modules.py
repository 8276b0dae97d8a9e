"""The stand-in's modules in `sys.modules`, for the time of a `with` and no longer."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from nki_standin.errors import fail

VERSION = "0.7.0+standin"


class StandinModule(ModuleType):
    """A module that says what it does not have."""

    __version__ = VERSION
    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        fail(f"{self.__name__}.{name} is not in the stand-in")


def module(name: str, members: dict[str, Any]) -> StandinModule:
    """A module of that name with these members."""
    made = StandinModule(name, "The stand-in of tests/support/nki_standin, not the vendor's package.")
    made.__dict__.update(members)
    return made


@contextmanager
def registered(modules: dict[str, ModuleType]) -> Iterator[None]:
    """`modules` can be imported inside; afterwards all is as before. RuntimeError inside another stand-in.

    A real package of that name is set aside with its submodules for the time, and put back.
    """
    roots = {name.partition(".")[0] for name in modules}
    before = {name: m for name, m in sys.modules.items() if name.partition(".")[0] in roots}
    if any(isinstance(m, StandinModule) for m in before.values()):
        raise RuntimeError(f"a stand-in for {min(roots)} is already installed; leave its `with` first")
    _replace(roots, modules)
    try:
        yield
    finally:
        _replace(roots, before)


def _replace(roots: set[str], modules: dict[str, ModuleType]) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] in roots]:
        del sys.modules[name]
    sys.modules.update(modules)
