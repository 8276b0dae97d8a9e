"""Which Trainium the device `neuron` is, by the documented way and the others, and what is said where none knows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import nki_standin
import pytest
import torch
import torch_neuronx_standin
from neuron_device import Backend
from on_neuron import parameters

import collage_neuron
from collage_neuron.cli import doctor
from collage_neuron.errors import Fp32Products, NoMachine, UnsupportedModel
from collage_neuron.matmuls import requirements as fp8
from collage_neuron.passes.backends import torch_neuron
from collage_neuron.passes.backends.nki import custom_op, target
from collage_neuron.passes.backends.registry import choose, get
from collage_neuron.runtime.rounding_probe import CHECKS


@pytest.fixture
def nobody_knows(neuron: torch.device, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """All sources fail, each in its own way."""
    monkeypatch.delattr(sys.modules["torch_neuronx.utils"], "get_platform_target")
    monkeypatch.setattr(Backend, "name", "a device")
    monkeypatch.setattr(torch_neuron, "PRODUCT", Path("/no/such/file"))
    return neuron


def test_sources_are_asked_in_turn(nobody_knows: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The variable of NKI, the documented function, the name of the device, its properties, the instance."""
    (tmp_path / "product").write_text("trn2u.48xlarge\n")
    properties = SimpleNamespace(name="Trn3", total_memory=1)
    utils = sys.modules["torch_neuronx.utils"]
    sources: list[tuple[str, Any, str, Any]] = [
        ("trn2", torch_neuron, "PRODUCT", tmp_path / "product"),
        ("trn3", Backend, "get_device_properties", lambda self, device: properties),
        ("trn2", Backend, "name", "NC_v3"),
        ("trn3", utils, "get_platform_target", lambda: "trn3"),
    ]
    for wanted, where, name, value in sources:
        monkeypatch.setattr(where, name, value, raising=False)
        target._kind.cache_clear()
        assert target.machine_of(nobody_knows) == (wanted, "nki", 1)
        assert target.generation(nobody_knows) == wanted
    monkeypatch.setenv(target.TARGET, "gen3")
    assert target.machine_of(nobody_knows).target == "trn2"


def test_where_none_knows_there_is_no_machine_and_what_each_said(nobody_knows: torch.device) -> None:
    said = (
        r"which Trainium neuron:0 is cannot be found out \(torch_neuronx.utils.get_platform_target: AttributeError.*; "
        r"torch\.neuron\.get_device_name: a device; .*get_device_properties: AttributeError.*; the instance type: "
        r"FileNotFoundError.*\): set NEURON_PLATFORM_TARGET_OVERRIDE to trn2 or trn3"
    )
    with pytest.raises(NoMachine, match=said):
        choose("auto", nobody_knows)
    with pytest.raises(NoMachine, match="cannot be found out"):
        collage_neuron.compile(torch.optim.AdamW(parameters(nobody_knows)))


@pytest.mark.parametrize(
    ("text", "name"),
    [("trn2", "trn2"), (" TRN3\n", "trn3"), ("trn2.48xlarge", "trn2"), ("trn3pre", "trn3"), ("NC_v4", "NC_v4"),
     ("NC_v3d", "NC_v3d"), ("gen3", "gen3"), ("inf2.24xlarge", "inf2"), ("m5.large", None), ("", None)],
)  # fmt: skip
def test_names_of_generations(text: str, name: str | None) -> None:
    assert torch_neuron.known(text) == name
    assert name is None or name in target.GENERATIONS


def test_without_torch_neuronx_kernels_cannot_be_called(neuron: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    custom_op.in_place_operator.cache_clear()
    monkeypatch.delattr(sys.modules["torch_neuronx"], "nki_op")
    with pytest.raises(NoMachine, match=r"called through torch_neuronx\.nki_op, which is not here .*2\.13 or newer"):
        get("nki").prepare(neuron)
    monkeypatch.setenv(custom_op.IN_PLACE, "0")
    get("nki").prepare(neuron)


# Whether TorchNeuron is here


def test_a_device_that_is_not_available_is_no_machine(neuron: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_neuron.open_device() == neuron
    monkeypatch.setattr(Backend, "is_available", staticmethod(lambda: False))
    with pytest.raises(NoMachine, match=r"finds no device: torch\.neuron\.is_available\(\) is False"):
        torch_neuron.open_device()


@pytest.mark.parametrize(("version", "installed"), [("2.9.0", False), ("2.10.1", True), ("2.14.0+cpu", True)])
def test_up_to_2_9_torch_neuronx_is_another_one(version: str, installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_neuron, "torch", SimpleNamespace(__version__=version))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert torch_neuron.is_installed() is installed


# The doctor


def rows(section: Any) -> dict[tuple[str, str], str]:
    return {(item, finding): said for item, finding, said in section()}


def test_the_doctor_probes_the_device_without_libneuronxla(neuron: torch.device) -> None:
    found = rows(doctor.probes)
    assert found["parameters on neuron:0", "backend nki"] == "ok"
    assert ("nki on neuron:0", f"{len(CHECKS)} of {len(CHECKS)}") in found
    assert all(said == "ok" for (item, _), said in found.items() if "neuron" in item)


def test_the_doctor_says_why_it_is_not(nobody_knows: torch.device) -> None:
    found: dict[str, list[doctor.Row]] = {}
    list(doctor.lines(found))
    assert "not: nki, because cannot run: which Trainium neuron:0 is cannot be found out" in doctor.verdict(found)


def test_the_doctor_says_that_a_kernel_loses_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch_neuronx_standin.install("trn2", nki_standin.Device(precise=False, overflow="infinity")):
        target._kind.cache_clear()
        found = rows(doctor.probes)
    (said,) = (said for (item, _), said in found.items() if item == "nki on neuron:0")
    assert said.startswith("loses roundings")
    assert "two_sum" in said


# fp8


@pytest.fixture
def _forgets() -> None:
    fp8._tell.cache_clear()


@pytest.mark.usefixtures("_forgets")
@pytest.mark.parametrize("name", ["trn3", "trn2"])
def test_fp8_products_that_are_fp32_are_warned_of(name: str, neuron: torch.device, monkeypatch: Any) -> None:
    monkeypatch.setenv(target.TARGET, name)
    with pytest.warns(Fp32Products, match=r"matmul='fp8' on neuron:0: operands are rounded to fp8.*products are fp32"):
        fp8.check_target(neuron, {"NEURON_CC_FLAGS": fp8.OPTION})


def test_of_trn2_the_flag_of_the_compiler_comes_first(neuron: torch.device) -> None:
    with pytest.raises(UnsupportedModel, match="NCC_EVRF051"):
        fp8.check_target(neuron, {})
