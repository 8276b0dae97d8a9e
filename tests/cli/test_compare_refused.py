"""Scripts that `compare` cannot compare: each is named, with what to do."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import collage_neuron
from collage_neuron.cli import compare
from collage_neuron.cli.main import main
from collage_neuron.cli.user_script import make_of
from collage_neuron.errors import ScriptError

pytestmark = pytest.mark.usefixtures("rejecting")

BROKEN = {
    "": "defines no make()",
    "make = 3": "defines no make()",
    "def make(size): return 1": "wants arguments (missing a required argument: 'size')",
    "def make(): return 1": "returns a int; return model, optimizer, loss",
    "def make(): return 1, 2": "returns a tuple of 2",
    "def make(): return 1, 2, 3": "returns a int where a Module belongs",
    "import torch\ndef make(): return torch.nn.Linear(1, 1), 2, 3": "returns a int where a Optimizer belongs",
}


@pytest.mark.parametrize(("text", "words"), BROKEN.items())
def test_a_broken_script_is_named_with_what_to_do(
    text: str, words: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(text)
    assert main(["compare", str(script), "--steps", "1"]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert str(script) in said


def module_with(**changes: Any) -> ModuleType:
    """A module whose make() is right but for the changes."""
    model = torch.nn.Linear(1, 1)
    parts: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1), "loss": None}
    parts["loss"] = lambda: model(torch.ones(1, 1, dtype=next(model.parameters()).dtype)).sum()
    parts |= changes
    module = ModuleType("changed")
    module.__dict__["make"] = lambda: tuple(parts.values())
    return module


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (3.0, "a float as loss; return a function"),
        (lambda: 3.0, "returns a float that cannot be trained on"),
        (lambda: torch.ones(1), "without .item"),
        (lambda: torch.ones(2, requires_grad=True), "one number with a gradient"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(ScriptError, match=words):
        compare.train(make_of(module_with(loss=loss), "changed"), "plus", 0, 1)


def test_a_script_that_compiles_itself_is_refused() -> None:
    optimizer = collage_neuron.compile(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))
    with pytest.raises(ScriptError, match="leave that line out"):
        make_of(module_with(optimizer=optimizer), "changed")()


def test_a_script_that_is_not_there_and_a_number_of_steps_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(tmp_path / "none.py")]) == 2
    assert "is not a file" in capsys.readouterr().err
    assert main(["compare", "--strategies", "fp8"]) == 2
    assert "unknown strategy 'fp8'; choose from bf16, " in capsys.readouterr().err
    (tmp_path / "a.txt").write_text("")
    assert main(["compare", "--out", str(tmp_path / "a.txt")]) == 2
    # Nothing was trained.
    said = f"compare: {tmp_path / 'a.txt'} cannot be written (File exists); name a folder with --out\n"
    assert capsys.readouterr().err == said
    steps = dict.fromkeys(("0", "twenty"), "number of steps: give 1 or more")
    seeds = dict.fromkeys(("-1", str(2**32), "one"), "seed: give 0 to 4294967295")  # NumPy takes none of these
    for option, wrong in (("--steps", steps), ("--seeds", seeds)):
        for text, said in wrong.items():
            with pytest.raises(SystemExit):
                main(["compare", option, text])
            assert f"'{text}' is not a {said}" in capsys.readouterr().err


def test_an_optimizer_that_cannot_be_compiled_is_a_sentence_not_a_traceback(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = script.read_text()
    script.write_text(text.replace("AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)", "LBFGS(model.parameters())"))
    assert main(["compare", str(script), "--steps", "1"]) == 2
    assert "LBFGS cannot be compiled" in capsys.readouterr().err


FAILING = {
    "import nosuchmodule": ("line 1, in <module>", "No module named 'nosuchmodule'"),
    "def make(:": ("line 1", "SyntaxError"),
    "def make(): raise OSError('no data')": ("line 1, in make", "OSError: no data"),
    "": ("in loss", "inputs.to(torch.bfloat16)"),  # the script in which inputs have torch's default dtype
}


@pytest.mark.parametrize(("text", "words"), FAILING.items(), ids=["import", "syntax", "make", "dtype"])
def test_a_script_that_fails_is_shown_from_its_own_line_on(
    text: str, words: tuple[str, str], script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = text or script.read_text().replace(", dtype=next(model.parameters()).dtype", "")
    script.write_text(text)
    monkeypatch.chdir(script.parent)
    steps = ["--steps", "1"] if "make" in text else ["--strategies", "plus"]  # without make() it is a process
    assert main(["compare", script.name, *steps]) == 1  # relative, as one types it
    said = capsys.readouterr().err
    assert all(word in said for word in words)
    assert "compare.py" not in said
    assert f"compare: {script.name} failed" in said.splitlines()[-1]


def test_an_error_that_is_not_of_the_script_is_shown_whole(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "table", lambda runs: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        main(["compare", str(script), "--steps", "1", "--strategies", "bf16"])
