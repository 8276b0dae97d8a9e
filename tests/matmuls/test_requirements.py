"""What is known of neuronx-cc and of each Trainium: which devices are rejected, why, and what the compiler needs."""

from __future__ import annotations

import pytest
import torch

from collage_neuron import UnsupportedModel
from collage_neuron.matmuls.requirements import FLAG, OPTION, check_target
from collage_neuron.passes.backends.nki import target

NEURON = torch.device("xla:0")


def on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's device is of this kind."""
    monkeypatch.delenv(target.TARGET, raising=False)
    monkeypatch.setattr(target, "_kind", lambda device: name)


@pytest.mark.parametrize("kind", ["NC_v2", "trn1", "inf2"])
def test_a_trn1_is_told_that_it_gains_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(kind, monkeypatch)
    with pytest.raises(UnsupportedModel, match=r"gains nothing on trn1: .* same rate in fp8 and in bf16 \(190 TFLOPS"):
        check_target(NEURON)


def test_a_trn2_needs_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    on("NC_v3", monkeypatch)
    with pytest.raises(
        UnsupportedModel, match=r"rejects f8e4m3fn.*NCC_EVRF051.*hlo2tensorizer-options='--experimental"
    ):
        check_target(NEURON, {})
    check_target(NEURON, {"NEURON_CC_FLAGS": f"-O1 {OPTION}"})
    check_target(NEURON, {"NEURON_CC_FLAGS": f"--internal-hlo2tensorizer-options='--verify-hlo=true {FLAG}'"})


@pytest.mark.parametrize("kind", ["NC_v4", "CPU", "TPU v4"])
def test_a_trn3_takes_the_type_and_other_devices_pass(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on(kind, monkeypatch)
    check_target(NEURON, {})
    check_target(torch.device("cpu"), {})
