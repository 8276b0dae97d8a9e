"""Fixtures of the tests of kernels: a short search for engines, and an NKI with a folder of kernels of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nki_backend
import nki_standin
import pytest
from nki_runs import INFINITY, search_less

from collage_neuron.passes.backends.nki import custom_op


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels with a short search for the best engines."""
    search_less(monkeypatch)


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_search: None) -> Iterator[None]:
    """A folder for kernels, which are forgotten afterwards: a kernel belongs to the NKI it was loaded under."""
    cached = custom_op.function
    monkeypatch.setenv(custom_op.FOLDER, str(tmp_path / "kernels"))
    yield
    cached.cache_clear()


@pytest.fixture(params=["nki", "beta1"])
def dialect(request: pytest.FixtureRequest, own_folder: None) -> Iterator[str]:
    """The stand-in of a trn1, in both dialects unless a test names one."""
    with nki_standin.install(request.param, "trn1", INFINITY):
        yield request.param


@pytest.fixture(params=nki_backend.dialects())
def kernels(request: pytest.FixtureRequest, own_folder: None) -> Iterator[str]:
    """A dialect of what runs kernels: the vendor's simulator where it is, else the stand-in of a trn1."""
    if nki_backend.backend() == "real":
        yield request.param
        return
    with nki_standin.install(request.param, "trn1", INFINITY):
        yield request.param
