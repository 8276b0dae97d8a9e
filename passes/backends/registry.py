"""The registry of backends by name: built-in ones, imported when first needed, and those that other code registers.

Names can be checked without importing a compiler, since settings are checked wherever an optimizer is built.
"""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch

    from collage_neuron.passes.backends.protocol import Backend

_BACKENDS = "collage_neuron.passes.backends"


class BuiltIn(NamedTuple):
    """A backend of this project that is imported when it is first needed."""

    module: str
    """The module that defines the backend as `BACKEND`."""
    asked: Container[str] | None
    """Types of the devices for which `auto` calls its `suits`; None means all."""


BUILT_IN = {
    "reference": BuiltIn(f"{_BACKENDS}.reference", None),
    "native": BuiltIn(f"{_BACKENDS}.native.backend", ("cpu",)),
    "xla": BuiltIn(f"{_BACKENDS}.xla.backend", ("xla",)),
    "nki": BuiltIn(f"{_BACKENDS}.nki.backend", ("xla", "neuron")),
}
"""The built-in backends; `auto` prefers later ones."""

REGISTERED: dict[str, Backend] = {}
"""The backends beside them: which one runs an update depends on these and on its device."""


def names() -> tuple[str, ...]:
    """The names of all backends."""
    return (*BUILT_IN, *REGISTERED)


def check_name(choice: str) -> None:
    """Raises ValueError unless `choice` is "auto" or the name of a backend."""
    if choice != "auto" and choice not in BUILT_IN and choice not in REGISTERED:
        raise ValueError(f"unknown backend {choice!r}; choose auto, {', '.join(names())}")


def register(backend: Backend) -> None:
    """Registers a backend under its name. `auto` prefers it to built-in ones on devices that it suits.

    Raises:
        TypeError: it does not derive from `protocol.Backend`.
        ValueError: its name is taken.
    """
    # That module imports this one. It imports torch too, which checking a name does not need.
    protocol = importlib.import_module(f"{_BACKENDS}.protocol")
    if not isinstance(backend, protocol.Backend):
        raise TypeError(f"{type(backend).__name__} is not a backend; derive it from {_BACKENDS}.protocol.Backend")
    if backend.name in ("auto", *names()):
        raise ValueError(f"there is a backend {backend.name!r} already; choose another name")
    REGISTERED[backend.name] = backend


def unregister(name: str) -> None:
    """Removes a registered backend. ValueError if none of that name was registered."""
    if name not in REGISTERED:
        raise ValueError(f"no backend {name!r} was registered; registered are: {', '.join(REGISTERED) or 'none'}")
    del REGISTERED[name]


def get(name: str) -> Backend:
    """The backend of that name; ValueError if there is none."""
    check_name(name)
    if name in REGISTERED:
        return REGISTERED[name]
    backend: Backend = importlib.import_module(BUILT_IN[name].module).BACKEND
    return backend


def preferred(device: torch.device) -> Iterator[Backend]:
    """The backends that `auto` considers for parameters on `device`, in order: the latest registered one first."""
    yield from reversed(REGISTERED.values())
    for name, entry in reversed(BUILT_IN.items()):
        if entry.asked is None or device.type in entry.asked:
            yield get(name)


def choose(choice: str, device: torch.device) -> Backend:
    """The backend that runs updates of parameters on `device`; ValueError if `choice` cannot."""
    backend = next(b for b in preferred(device) if b.suits(device)) if choice == "auto" else get(choice)
    backend.prepare(device)
    return backend


def passed_over(taken: Backend, device: torch.device) -> str | None:
    """Why `auto` took this backend and not the one before it on `device`, where something can be installed; or None."""
    for backend in preferred(device):
        if backend is taken:
            return None
        if device.type in backend.devices and (lacks := backend.missing()):
            return f"not {backend.name}, which is faster: {lacks}"
    return None
