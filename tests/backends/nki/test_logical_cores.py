"""Where two physical cores would run one kernel, backend nki says so, with the remedy, before anything is updated.

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
REMEDY = r"two would run each kernel.*Set NEURON_LOGICAL_NC_CONFIG=1 before the process starts.*backend='xla'"


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (VARIABLE, FLAGS, target.TARGET):
        monkeypatch.delenv(name, raising=False)
    with nki_standin.install("nki", "trn2"):
        yield


def on(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_kind", lambda device: kind)


def test_with_one_core_said_a_kernel_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    on("NC_v3", monkeypatch)
    monkeypatch.setenv(VARIABLE, "1")
    assert target.machine_of(XLA) == ("trn2", "nki")
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv(FLAGS, "--auto-cast=none --lnc=1")
    assert target.machine_of(XLA) == ("trn2", "nki")


@pytest.mark.parametrize(
    ("kind", "variable", "flags", "said"),
    [
        ("NC_v3", None, "", "nothing is set, and 2 is the default of neuronx-cc"),
        ("NC_v4", None, "-O1", "nothing is set"),
        ("NC_v3", "2", "", "NEURON_LOGICAL_NC_CONFIG=2"),
        ("NC_v3d", None, "", "it is a NC_v3d: two cores, seen as one"),
        ("NC_v3d", "1", "", "it is a NC_v3d"),
        ("NC_v3", "1", "--model-type=transformer --lnc 2", "NEURON_CC_FLAGS has -lnc 2"),
        ("NC_v3", "1", "--logical-nc-config=2", "NEURON_CC_FLAGS has --logical-nc-config 2"),
        ("NC_v3", "", "", "NEURON_LOGICAL_NC_CONFIG="),
    ],
)
def test_whatever_says_otherwise_is_named_with_the_remedy(
    kind: str, variable: str | None, flags: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(kind, monkeypatch)
    monkeypatch.setenv(FLAGS, flags)
    if variable is not None:
        monkeypatch.setenv(VARIABLE, variable)
    with pytest.raises(NoMachine, match=rf"\({said}.*{REMEDY}"):
        get("nki").prepare(XLA)


def test_trn1_has_no_logical_cores_and_a_cpu_simulates_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    monkeypatch.setenv(target.TARGET, "trn2")
    assert target.machine_of(torch.device("cpu")) == ("trn2", "nki")
    monkeypatch.delenv(target.TARGET)
    on("NC_v2", monkeypatch)
    assert target.machine_of(XLA) == ("trn1", "nki")


@pytest.mark.parametrize(("cores", "runs"), [("1", True), (2, False), (None, False)])
def test_torch_neuron_is_asked(cores: object, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of its type, which torch need not know here; None: a torch_neuronx without the function."""
    utils = SimpleNamespace() if cores is None else SimpleNamespace(get_logical_neuron_cores=lambda: cores)
    monkeypatch.setitem(sys.modules, "torch_neuronx", SimpleNamespace(utils=utils))
    monkeypatch.setitem(sys.modules, "torch_neuronx.utils", utils)
    on("trn2", monkeypatch)
    device: torch.device = SimpleNamespace(type="neuron")  # type: ignore[assignment]
    if runs:
        assert target.machine_of(device) == ("trn2", "nki")
        return
    with pytest.raises(NoMachine, match="get_logical_neuron_cores.* is 2" if cores else "nothing is set"):
        target.machine_of(device)
