"""A machine with TorchNeuron, in Python: the device `neuron`, NKI and torch_neuronx. Level of evidence: stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from nki_runs import search_less
from torch.utils import backend_registration

from collage_neuron.passes.backends import reference
from collage_neuron.passes.backends.nki import custom_op, target

if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    collect_ignore_glob = ["test_*.py"]  # torch 2.9 can't have such a device: `make test-newest`


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(custom_op.FOLDER, str(tmp_path / "kernels"))
    monkeypatch.delenv(target.TARGET, raising=False)
    monkeypatch.setenv(target.VARIABLE, "1")  # as docs/trn2.md says
    search_less(monkeypatch)


@pytest.fixture
def neuron() -> Iterator[torch.device]:
    """The device, on a trn2."""
    import torch_neuronx_standin

    target._kind.cache_clear()
    reference._warn_of_host.cache_clear()
    with torch_neuronx_standin.install("trn2"):
        yield torch.device("neuron", 0)
    target._kind.cache_clear()
