"""`NKI_BACKEND` decides what kernels run on, and the real package is never taken for granted."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import nki_backend
import pytest

TARGET = "NEURON_PLATFORM_TARGET_OVERRIDE"


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No choice is remembered from before, and none is kept."""
    monkeypatch.delenv("NKI_BACKEND", raising=False)
    for name in nki_backend.SETTINGS:
        monkeypatch.setenv(name, os.environ.get(name, ""))
    nki_backend.backend.cache_clear()
    yield
    nki_backend.backend.cache_clear()


@pytest.fixture
def vendors(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Something in the place of the vendor's package."""
    nki = ModuleType("nki")
    nki.__dict__.update(__version__="0.7.0", jit=lambda f: f, simulate=lambda kernel: ("simulated", kernel))
    for name, module in {
        "nki": nki,
        "nki.isa": ModuleType("nki.isa"),
        "nki.language": ModuleType("nki.language"),
    }.items():
        monkeypatch.setitem(sys.modules, name, module)
    return nki


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No package of that name can be imported."""
    monkeypatch.setitem(sys.modules, "nki", None)


@pytest.mark.usefixtures("nothing")
def test_without_the_package_it_is_the_stand_in() -> None:
    assert nki_backend.backend() == "standin"
    assert nki_backend.header().startswith("nki: stand-in 0.7.0+standin")
    assert nki_backend.dialects() == ["nki", "beta1"]


@pytest.mark.usefixtures("nothing")
def test_real_without_the_package_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_BACKEND", "real")
    with pytest.raises(pytest.UsageError, match="NKI_BACKEND=real, but no package `nki`"):
        nki_backend.backend()


@pytest.mark.usefixtures("vendors")
@pytest.mark.parametrize("choice", ["auto", "real"])
def test_the_package_is_used_where_it_is(choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_BACKEND", choice)
    assert nki_backend.backend() == "real"
    assert nki_backend.header() == "nki: real 0.7.0 (evidence: nki.simulate)"
    assert nki_backend.dialects() == ["nki"]
    assert os.environ["NKI_PRECISE_FP"] == "1"
    with nki_backend.simulated(print, "trn3") as simulated:
        made: Any = simulated
        assert made == ("simulated", print)
        assert os.environ[TARGET] == "trn3"
    assert os.environ.get(TARGET) != "trn3"
