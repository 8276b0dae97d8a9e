"""Kernels are called for the physical cores that the machine says; where that is no one number, nothing is updated.

The devices are played: names and variables as documented, nothing of a Trainium.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import nki_standin
import pytest
import torch

from collage_neuron.errors import NoMachine
from collage_neuron.passes.backends.nki import target
from collage_neuron.passes.backends.nki.target import FLAGS, VARIABLE
from collage_neuron.passes.backends.registry import get

XLA = torch.device("xla:0")
REMEDY = r"for another number.*Set NEURON_LOGICAL_NC_CONFIG to 1 or 2 before the process starts.*backend='xla'"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (VARIABLE, FLAGS, target.TARGET):
        monkeypatch.delenv(name, raising=False)
    with nki_standin.install("nki", "trn2"):
        yield


def on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_kind", lambda device: kind)


@pytest.mark.parametrize(
    ("kind", "variable", "flags", "cores"),
    [
        ("NC_v3", "1", "", 1),
        ("NC_v3", None, "--auto-cast=none --lnc=1", 1),
        ("NC_v3", None, "", 2),  # the documented default
        ("NC_v4", None, "-O1", 2),
        ("NC_v3", " 2", "", 2),
        ("NC_v3d", None, "", 2),
        ("NC_v3d", "2", "--model-type=transformer --lnc 2", 2),
    ],
)
def test_a_kernel_is_called_for_the_cores_that_are_said(
    kind: str, variable: str | None, flags: str, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(kind, monkeypatch)
    monkeypatch.setenv(FLAGS, flags)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    assert target.machine_of(XLA)[1:] == ("nki", cores)


@pytest.mark.parametrize(
    ("kind", "variable", "flags", "said"),
    [
        ("NC_v3d", "1", "", "NEURON_LOGICAL_NC_CONFIG=1; it is a NC_v3d: two cores"),
        ("NC_v3", "1", "--model-type=transformer --lnc 2", "NEURON_LOGICAL_NC_CONFIG=1; NEURON_CC_FLAGS has -lnc 2"),
        (
            "NC_v3",
            "1",
            "--logical-nc-config=2",
            "NEURON_LOGICAL_NC_CONFIG=1; NEURON_CC_FLAGS has --logical-nc-config 2",
        ),
        ("NC_v3", "", "", "NEURON_LOGICAL_NC_CONFIG="),
        ("NC_v3", "4", "", "NEURON_LOGICAL_NC_CONFIG=4"),
    ],
)
def test_what_contradicts_is_named_with_the_remedy(
    kind: str, variable: str | None, flags: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(kind, monkeypatch)
    monkeypatch.setenv(FLAGS, flags)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    with pytest.raises(NoMachine, match=rf"\({said}.*{REMEDY}"):
        get("nki").prepare(XLA)


def test_trn1_has_no_logical_cores_and_a_cpu_simulates_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(target.TARGET, "trn2")
    assert target.machine_of(torch.device("cpu")) == ("trn2", "nki", 1)
    monkeypatch.setenv(VARIABLE, "2")
    assert target.machine_of(torch.device("cpu")) == ("trn2", "nki", 2)
    monkeypatch.delenv(target.TARGET)
    on("NC_v2", monkeypatch)
    assert target.machine_of(XLA) == ("trn1", "nki", 1)


@pytest.mark.parametrize(("cores", "wanted"), [("1", 1), (2, 2), (None, 2), (4, None)])
def test_torch_neuron_is_asked(cores: object, wanted: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of its type, which torch need not know here; None: a torch_neuronx without the function."""
    utils = SimpleNamespace() if cores is None else SimpleNamespace(get_logical_neuron_cores=lambda: cores)
    monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "torch_neuronx.utils", utils)
    on("trn2", monkeypatch)
    device: torch.device = SimpleNamespace(type="neuron")  # type: ignore[assignment]
    if wanted:
        assert target.machine_of(device) == ("trn2", "nki", wanted)
        return
    with pytest.raises(NoMachine, match=r"get_logical_neuron_cores.* is 4.*backend='reference'"):
        target.machine_of(device)
