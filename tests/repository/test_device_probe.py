"""The device probe, asked on the stand-in: its answers are known there, and change with what the stand-in is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import device_kernels
import device_probe
import device_questions
import device_torch
import nki_standin
import numpy as np
import pytest
import torch
from nki_lint import lint
from nki_runs import search_less
from nki_standin import Device, dtypes, tensors
from torch import Tensor

from collage_neuron.passes.backends.nki import custom_op
from collage_neuron.passes.backends.nki.target import Machine
from collage_neuron.runtime import rounding_probe

GROUPS = [group for group in device_probe.GROUPS if group != device_probe.STOCHASTIC]


@pytest.fixture(autouse=True)
def _kernels_of_this_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(custom_op.FOLDER, str(tmp_path / "kernels"))
    search_less(monkeypatch)
    cached = custom_op.function, rounding_probe._failures_once  # a kernel belongs to the stand-in it was loaded under
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def asked(folder: Path, *groups: str, dialect: str = "nki", device: Device | None = None) -> dict[str, Any]:
    """{question: what was found} of some groups, from the written report."""
    out = folder / "report.json"
    with nki_standin.install(dialect, "trn1", device):
        device_probe.main(["--here", "--out", str(out), "--only", *groups])
    report = json.loads(out.read_text())
    assert report["evidence"] == "stand-in"
    assert "standin" in report["nki"]["version"]
    return {name: found for answers in report["answers"].values() for name, found in answers.items()}


def words(found: dict[str, Any]) -> dict[str, str]:
    return {name: x["answer"] for name, x in found.items()}


CORRECT = "correctly rounded"
KNOWN: dict[str, str] = {
    **{f"rounding_{e}": "nearest, ties to even" for e in device_questions.CASTS},
    **{f"subnormals_cast_{e}": "kept" for e in device_questions.CASTS},
    **{f"subnormals_{side}_{e}": "kept" for e in device_questions.PRODUCTS for side in ("in", "out")},
    **{f"fp32_{name}": CORRECT for name in device_questions.ARITHMETIC},
    **{f"fused_{name}": "rounded to fp32 in between" for name in device_questions.FUSED},
    **{f"bias_{name}{how}": "added" for name in device_questions.BIASED for how in ("", "_scaled")},
    "integers_vector": "in fp32",
    "integers_gpsimd": "exactly",
    "scale_and_round": "the same bits",
    **{f"ulp_{name}": CORRECT for name in device_questions.FUNCTIONS},
    "ulp_power": CORRECT,
    "minus_0_added": "-0.0",
    "nan_copied": "nan",
    "generated_roundings": "every rounding is kept",
    "aliasing": "x + y is returned; the tensor that was given holds the new values",
}
"""What the stand-in is by default; what it refuses, and what needs a device, is checked apart."""


@pytest.mark.parametrize("dialect", ["nki", "beta1"])
def test_the_answers_of_the_stand_in(dialect: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NKI_PRECISE_FP", "1")
    found = asked(tmp_path, *GROUPS, dialect=dialect)
    assert {name: answer for name, answer in words(found).items() if name in KNOWN} == KNOWN
    refused = {name for name, x in found.items() if x["answer"] == "error"}
    assert all("StandinError" in found[name]["error"] for name in refused)
    outside = set(device_questions.OUTSIDE) - {"minus_0_added", "nan_copied"}
    assert refused == {f"overflow_{e}" for e in device_questions.CASTS} | outside
    unasked = {name for name, x in found.items() if x["answer"].startswith("not asked: needs a device")}
    assert unasked == {
        "training_graph", "two_kernels", "plain_roundings", "reduce_precision", "rounding_by_bits", "wide_types",
        "integer_sums", "logical_cores",
    }  # fmt: skip
    assert found["indirect_dim"]["answer"] == {"nki": "of the view"}.get(dialect, device_torch.NO_LOOP)


@pytest.mark.parametrize(("cores", "said"), [(1, "one physical core"), (2, "two physical cores")])
def test_the_cores_for_which_kernels_are_called_are_said(
    cores: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_torch, "machine_of", lambda device: Machine("trn2", "nki", cores))
    on_xla = device_probe.Machine("device", "nki", "0.7", torch.device("xla:0"), None)
    assert device_torch.logical_cores(on_xla, tmp_path)[0] == f"{said}, of a trn2"


def test_what_a_generated_kernel_loses_is_seen(tmp_path: Path) -> None:
    found = words(asked(tmp_path, "generated", device=Device(precise=False, overflow="infinity")))
    assert found["generated_roundings"].startswith("lost in: ")
    assert found["generated_adamw"] == "error"  # which such a machine is refused with


@pytest.mark.parametrize("dialect", ["nki", "beta1"])
def test_adamw_as_one_kernel_has_the_reference_s_moments(dialect: str, tmp_path: Path) -> None:
    """A product with a reciprocal is off by 2**-23, which may move the low word of a parameter by one place."""
    found = asked(tmp_path, "generated", dialect=dialect)["generated_adamw"]
    assert found["answer"].startswith("param_lo differ; parameters are off by")
    assert found["numbers"]["off"] <= 2**-12


def test_a_dropped_bias_is_seen(tmp_path: Path) -> None:
    found = words(asked(tmp_path, "arithmetic", device=Device(drops_bias=("copy", "sign"))))
    dropped = {name for name, answer in found.items() if answer == "dropped"}
    assert dropped == {f"bias_{name}{how}" for name in ("copy", "sign") for how in ("", "_scaled")}
    assert {name for name, answer in found.items() if answer.startswith("neither")} == {"fused_activation"}


def test_a_register_that_counts_otherwise_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors.NkiTensor, "_indirect", lambda self, register, _: register.value * self.storage.free)
    found = asked(tmp_path, "loops")["indirect_dim"]
    assert found["answer"] == "of the argument: a tile is misplaced"
    assert found["numbers"] == {"first of each": [0.0, 128.0, 256.0]}


def test_perturbed_functions_are_seen(tmp_path: Path) -> None:
    found = asked(tmp_path, "functions", device=Device(ulps=2))
    errors = [x["numbers"]["largest error in ulp"] for x in found.values()]
    assert all(1.5 < e <= 2.5 for e in errors), errors


OTHER_DEVICES: list[tuple[str, dict[str, Any], str]] = [
    ("subnormals", {"subnormals": "flush"}, "flushed to zero"),
    ("overflow", {"overflow": "infinity"}, "infinity"),
    ("overflow", {"overflow": "saturate"}, "the largest bf16"),
    (device_probe.STOCHASTIC, {"stochastic": True}, "to either neighbour: stochastic?"),
]


@pytest.mark.parametrize(("group", "settings", "answer"), OTHER_DEVICES)
def test_other_devices_are_seen(group: str, settings: dict[str, Any], answer: str, tmp_path: Path) -> None:
    assert set(words(asked(tmp_path, group, device=Device(**settings))).values()) == {answer}


@pytest.mark.parametrize(
    ("cast", "answer"),
    [
        (lambda x, device: (x.view(np.uint32) >> 16).astype(np.uint16), "toward zero"),
        (
            lambda x, device: ((x.view(np.uint32) + np.uint32(0x8000)) >> 16).astype(np.uint16),
            "nearest, ties away from zero",
        ),
    ],
    ids=["truncated", "away"],
)
def test_other_roundings_are_seen(
    cast: Callable[..., Any], answer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dtypes, "_to_bf16", cast)
    assert set(words(asked(tmp_path, "rounding")).values()) == {answer}


def test_a_contracted_product_is_seen() -> None:
    def contracts(_: Any, x: Tensor, y: Tensor, s: Tensor) -> Tensor:
        return (x.double() * s.double() - s.double()).float()

    assert device_questions.fused("tensor_scalar").answer(contracts)[0] == "one rounding, as an FMA"


def test_without_nki_it_says_so_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.json"
    for name, value in device_probe.SETTINGS.items():  # the program sets them
        monkeypatch.setenv(name, value)
    said = "(?s)no question could be asked, no report is written.*no NKI that kernels are generated for can be imported"
    with pytest.raises(SystemExit, match=said + "; see docker/README.md"):
        device_probe.main(["--only", "rounding", "--out", str(out)])
    assert not out.exists()


@pytest.mark.parametrize("dialect", ["nki", "beta1"])
def test_the_kernels_are_in_the_subset(dialect: str) -> None:
    instructions = [*device_questions.CASTS.values(), *device_questions.PRODUCTS.values()]
    instructions += [*device_questions.FUSED.values(), *(i for i, _ in device_questions.ARITHMETIC.values())]
    instructions += [
        *(i for i, _, _ in device_questions.FUNCTIONS.values()),
        *(i for i, _ in device_questions.OUTSIDE.values()),
    ]
    sources = [i.source(dialect, "A title.") for i in instructions] + [device_kernels.in_place(dialect)]
    sources += [device_kernels.LOOPED] if dialect == "nki" else []
    assert [f for source in sources for f in lint(source, "probe.py", dialect)] == []
