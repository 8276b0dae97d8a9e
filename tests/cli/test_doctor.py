"""`doctor`: its verdict names what is ready, and why the rest is not; nothing is looked for that it does not need."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from collage_neuron.cli import doctor
from collage_neuron.cli.doctor import Row, lines, main, verdict

SOUND: dict[str, list[Row]] = {
    "packages": [("torch", "2.9.0", "ok"), ("nki", "not installed", "-")],
    "environment": [("XLA_USE_BF16", "unset", "ok")],
    "backends": [("parameters on cpu", "backend reference", "ok"), ("native", "llvmlite is not installed", "-")],
    "probes": [("reference on cpu", "7 of 7", "ok"), ("xla on xla:0", "7 of 7", "ok")],
}


def test_the_verdict_names_what_is_ready_and_why_the_rest_is_not() -> None:
    assert verdict(SOUND) == (
        "ready on: reference, xla; not: native, because llvmlite is not installed; "
        "not: nki, because no device of it was found, or a package is missing (rows above)"
    )
    lost = [SOUND["probes"][0], ("xla on xla:0", "6 of 7", "loses roundings: worthless (sum is widened)")]
    said = verdict(SOUND | {"probes": lost})
    assert said.startswith("ready on: reference; ")
    assert "not: xla, because loses roundings: worthless (sum is widened)" in said


def test_a_setting_that_compile_rejects_is_the_whole_verdict() -> None:
    wrong = SOUND | {"environment": [("XLA_USE_BF16", "1", "makes every fp32 value bf16; unset it")]}
    assert verdict(wrong) == "not ready: change XLA_USE_BF16 (reasons above)"


@pytest.mark.parametrize(
    ("strategy", "said"), [("bf16", "ok, but compile takes it"), ("none", "compile raises; unset it")]
)
def test_a_strategy_of_the_environment_is_named(strategy: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLAGE_STRATEGY", strategy)
    *_, row = doctor.environment()
    assert row[:2] == ("COLLAGE_STRATEGY", strategy)
    assert said in row[2]
    assert verdict(SOUND | {"environment": [row]}).startswith("ready" if strategy == "bf16" else "not ready: change C")


def test_what_is_wrong_is_the_exit_status(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SECTIONS", {name: (lambda: iter([("x", "y", "set it")])) for name in SOUND})
    found: dict[str, list[Row]] = {}
    assert list(lines(found))[-1] == "not ready: change x (reasons above)"
    assert main(SimpleNamespace(json=False)) == 1  # type: ignore[arg-type]


def test_json_has_the_rows_and_the_verdict(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "SECTIONS", {name: (lambda rows=rows: iter(rows)) for name, rows in SOUND.items()})
    assert main(SimpleNamespace(json=True)) == 0  # type: ignore[arg-type]
    found = json.loads(capsys.readouterr().out)
    assert found[0] == {"section": "packages", "what": "torch", "value": "2.9.0", "status": "ok"}
    assert (found[-1]["section"], found[-1]["status"]) == ("verdict", "ok")
    assert found[-1]["value"].startswith("ready on: reference")
