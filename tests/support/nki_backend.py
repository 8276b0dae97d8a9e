"""Which NKI the tests run kernels on: the vendor's simulator where its package is, else the stand-in.

`NKI_BACKEND` is auto (default), standin or real; real without the package is an error, never a skip. What the tests
show is evidence of the level that the first line of pytest's output names. The simulator computes in fp32 and rounds
each write to the destination's type (`NKI_PRECISE_FP=1`), for the target in `NEURON_PLATFORM_TARGET_OVERRIDE`.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any
from unittest import mock

import nki_standin
import pytest

SETTINGS = {"NKI_PRECISE_FP": "1", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0"}
"""What the real package reads when it is imported; the second matters on devices."""


def real_nki() -> ModuleType | None:
    """The vendor's package, or None. A public index has a placeholder of its name, which fails when imported."""
    os.environ.update(SETTINGS)
    try:
        nki = importlib.import_module("nki")
        importlib.import_module("nki.isa")
        importlib.import_module("nki.language")
    except Exception:  # a placeholder raises what it likes
        return None
    return nki if hasattr(nki, "simulate") and hasattr(nki, "jit") else None


@cache
def backend() -> str:
    """standin or real. UsageError if NKI_BACKEND asks for what is not there."""
    choice = os.environ.get("NKI_BACKEND", "auto")
    if choice not in ("auto", "standin", "real"):
        raise pytest.UsageError(f"NKI_BACKEND={choice}: choose auto, standin or real")
    if choice == "standin":
        return choice
    found = real_nki() is not None
    if choice == "real" and not found:
        raise pytest.UsageError("NKI_BACKEND=real, but no package `nki` with `simulate` and `jit` can be imported")
    return "real" if found else "standin"


def header() -> str:
    """The line in pytest's header."""
    if backend() == "standin":
        return f"nki: stand-in {nki_standin.VERSION} (evidence: stand-in, not the vendor's simulator, not a device)"
    return f"nki: real {getattr(real_nki(), '__version__', 'of unknown version')} (evidence: nki.simulate)"


def dialects() -> list[str]:
    """The dialects that the backend runs: the vendor's current package has only the newer one."""
    return ["nki"] if backend() == "real" else list(nki_standin.DIALECTS)


@contextmanager
def simulated(kernel: Callable[..., Any], target: str) -> Iterator[Callable[..., Any]]:
    """A kernel as a function of CPU tensors, in the vendor's simulator, for a target."""
    real = real_nki()
    assert real is not None
    with mock.patch.dict(os.environ, {"NEURON_PLATFORM_TARGET_OVERRIDE": target}):
        yield real.simulate(kernel)
