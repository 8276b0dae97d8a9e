"""The device's report and its probe, made on the stand-in: every section, what fails, what changes the answers."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import device_probe
import device_questions
import device_report
import device_steps
import device_torch
import nki_standin
import numpy as np
import pytest
import torch
from nki_runs import search_less
from nki_standin import Device, dtypes
from torch import Tensor

from collage_neuron.passes.backends.nki import custom_op
from collage_neuron.passes.backends.nki.target import Machine
from collage_neuron.runtime import rounding_probe

# --- the report of a device, made here: every section, what fails, what is left out. Level of evidence: stand-in ------

ROOT = Path(__file__).parents[2]
SIMULATED = ("--simulator", str(ROOT / "tests" / "support"))


@pytest.fixture(autouse=True)
def _own_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(custom_op.FOLDER, str(tmp_path / "kernels"))
    search_less(monkeypatch)
    for name, value in device_probe.SETTINGS.items():  # the program sets them
        monkeypatch.setenv(name, value)
    cached = custom_op.function, rounding_probe._failures_once  # a kernel belongs to the stand-in it was loaded under
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


def made(folder: Path, *options: str) -> dict[str, Any]:
    """The report, as it was written."""
    out = folder / "out" / "report.json"
    device_report.main(["--quick", "--out", str(out), *options])
    return json.loads(out.read_text())  # type: ignore[no-any-return]


@pytest.mark.usefixtures("xla")
def test_it_runs_through_without_a_device_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = made(tmp_path, *SIMULATED)
    assert [part for section in device_report.PARTS for part in report[section].values() if "error" in part] == []
    assert report["evidence"].startswith("XLA's CPU, or none, and kernels on the stand-in of")
    assert report["note"] == device_report.NOT_MEASURED
    assert report["questions"]["loops"]["found"]["indirect_dim"]["answer"] == "of the view"
    places = {name: x["answer"] for name, x in report["steps"]["plus"]["found"].items()}
    assert places["xla on xla:0, SGD"] == places["nki on cpu, SGD"] == "the same bits"
    assert {name.partition(",")[0] for name in places} == set(report["times"]["plus"]["found"])
    first, *_, evidence, note, last = capsys.readouterr().out.splitlines()
    assert first == "[1/9] machine ... done"
    assert (evidence, note) == (f"evidence: {report['evidence']}", device_report.NOT_MEASURED)
    assert last == f"the report, to be read and then sent: {tmp_path / 'out' / 'report.json'}"


def test_a_section_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> dict[str, Any]:
        raise SystemExit("the compiler is not here")

    monkeypatch.setitem(device_report.PARTS, "questions", fails)
    report = made(tmp_path, "--only", "machine", "questions", "profile")
    assert report["questions"]["rounding"]["error"] == "SystemExit: the compiler is not here"
    assert "found" in report["machine"]["all"]
    assert "found" in report["profile"]["plus"]


def options(folder: Path, patience: float) -> argparse.Namespace:
    return device_report.options_of(["--quick", "--out", str(folder / "report.json"), "--patience", str(patience)])


def test_a_part_in_a_process_of_its_own(tmp_path: Path) -> None:
    found = device_report.apart("machine", "", options(tmp_path, 300))
    assert found["found"]["packages"]["torch"] == torch.__version__.partition("+")[0]
    assert device_report.apart("machine", "", options(tmp_path, 0.01))["error"] == "not done after 0.01 s"


def test_a_strategy_of_the_environment_is_not_asked_instead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLAGE_STRATEGY", "bf16")
    found = made(tmp_path, "--only", "steps", *SIMULATED)["steps"]["split433"]["found"]
    assert "1.param_lo" in found["nki on cpu, AdamW"]["differing"]  # bf16 has no such word


def test_nothing_that_may_be_secret_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast=none --cache_dir=s3://mine -O1")
    monkeypatch.setenv("NEURON_RT_ROOT_COMM_ID", "10.1.2.3:63423")
    report = made(tmp_path, "--only", "machine")
    settings = report["machine"]["all"]["found"]["settings"]
    assert settings["NEURON_CC_FLAGS"] == "--auto-cast=none (a path) -O1"
    assert "10.1.2.3" not in json.dumps(report)


SUMMARY = {"file": {"total_time": 2e-3, "hbm_read_bytes": 24, "hbm_write_bytes": 40, "path": "s3://mine"}}


def test_the_profiler_s_bytes_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The profiler is a script that prints a summary after a line of its log; a step moves 12 + 10 bytes at least."""
    tool = tmp_path / "bin" / "neuron-profile"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\necho 'reading '\"$3\"\necho '{json.dumps(SUMMARY)}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
    step = {"found": {"nki on xla:0": {"least read": 12, "least written": 10}}}
    monkeypatch.setattr(device_report, "apart", lambda *_: step)
    found = made(tmp_path, "--only", "profile")["profile"]["plus"]["found"]
    assert found["answer"] == "read 2.00 and wrote 4.00 times the fewest bytes, in 2.000 ms"
    assert found["graphs"] == [{"total_time": 2e-3, "hbm_read_bytes": 24, "hbm_write_bytes": 40}]
    assert device_report.traffic([], step) == "0 graphs, and no bytes of them"


def test_other_bits_on_a_device_are_seen() -> None:
    """Roots and reciprocals are off by up to 2 ulps, which steps with neither do not see."""
    place = device_steps.Place("nki", torch.device("cpu"))
    with nki_standin.install("nki", "trn1", nki_standin.Device(overflow="infinity", ulps=2)):
        exact, near = (device_steps.compared(name, "split433", place, ((4000,),)) for name in ("SGD", "AdamW"))
    assert exact == {"answer": "the same bits", "differing": {}, "off": 0.0}
    assert near["answer"].startswith("param_lo differ; parameters are off by up to ")
    assert 0 < near["off"] < 2**-8


SCRIPTS = {
    "device": ("examples/device_report.py --quick", "examples/device_report.py --simulator tests/support --quick"),
    "doctor": ("-m collage_neuron doctor",) * 2,
}


@pytest.mark.parametrize("target", SCRIPTS)
@pytest.mark.parametrize("neuron", [True, False])
def test_make_takes_the_python_of_neuron(neuron: bool, target: str, tmp_path: Path) -> None:
    """That has the torch of the device, which this project's own environment has not."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    for ready in (".demo", ".ready"):
        (tmp_path / ready).touch()
    for path, says in ((tmp_path / "neuron", "neuron"), (python, "own")):
        path.write_text(
            f'#!/bin/sh\n[ "$1" = -c ] && exit {int(not neuron)}\necho {says} ${{PJRT_DEVICE-unset}} "$@"\n'
        )
        path.chmod(0o755)
    command = ["make", "--silent", target, f"PYTHON={tmp_path / 'neuron'}", f"VENV={tmp_path}", "QUICK=1"]
    environment = {name: value for name, value in os.environ.items() if name not in ("PJRT_DEVICE", "MAKEFLAGS")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    on_neuron, elsewhere = SCRIPTS[target]
    assert done.stdout.splitlines()[-1] == (f"neuron unset {on_neuron}" if neuron else f"own CPU {elsewhere}")


# --- the device probe, asked on the stand-in: its answers are known there, and change with what the stand-in is told --

GROUPS = [group for group in device_probe.GROUPS if group != device_probe.STOCHASTIC]


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
def test_the_cores_of_kernels_are_said(cores: int, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_torch, "machine_of", lambda device: Machine("trn2", "nki", cores))
    on_xla = device_probe.Machine("device", "nki", "0.7", torch.device("xla:0"), None)
    assert device_torch.logical_cores(on_xla, tmp_path)[0] == f"{said}, of a trn2"


def test_what_a_generated_kernel_loses_is_seen(tmp_path: Path) -> None:
    found = words(asked(tmp_path, "generated", device=Device(precise=False, overflow="infinity")))
    assert found["generated_roundings"].startswith("lost in: ")
    assert found["generated_adamw"] == "error"  # which such a machine is refused with


def test_a_dropped_bias_is_seen(tmp_path: Path) -> None:
    found = words(asked(tmp_path, "arithmetic", device=Device(drops_bias=("copy", "sign"))))
    dropped = {name for name, answer in found.items() if answer == "dropped"}
    assert dropped == {f"bias_{name}{how}" for name in ("copy", "sign") for how in ("", "_scaled")}
    assert {name for name, answer in found.items() if answer.startswith("neither")} == {"fused_activation"}


def test_perturbed_functions_are_seen(tmp_path: Path) -> None:
    found = asked(tmp_path, "functions", device=Device(ulps=2))
    errors = [x["numbers"]["largest error in ulp"] for x in found.values()]
    assert all(1.5 < e <= 2.5 for e in errors), errors


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


def test_without_nki_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    said = "(?s)no question could be asked, no report is written.*no NKI that kernels are generated for can be imported"
    with pytest.raises(SystemExit, match=said + "; see docker/README.md"):
        device_probe.main(["--only", "rounding", "--out", str(out)])
    assert not out.exists()
