"""`compare`: the same start for every strategy, in this process or in one for each strategy, and the command."""

from __future__ import annotations

import math
import re
import subprocess
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from worlds import run_script

from collage_neuron.cli import builtin_gpt, compare
from collage_neuron.cli.compare import Run, losses_in
from collage_neuron.cli.main import main
from collage_neuron.monitoring.run_log import read_logs

pytestmark = pytest.mark.usefixtures("rejecting")


def test_the_builtin_gpt_prints_its_losses(capsys: pytest.CaptureFixture[str]) -> None:
    printed = []
    for _ in range(2):
        builtin_gpt.main(["--seed", "3", "--steps", "3"])
        printed.append(losses_in(capsys.readouterr().out))
    assert printed[0] == printed[1]
    assert len(printed[0]) == 3
    assert printed[0][0] == pytest.approx(math.log(256), abs=1)


@pytest.fixture
def forked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forked off the server of tests, which has imported torch."""

    def run(command: list[str], stdout: BinaryIO, env: dict[str, str], **_: Any) -> SimpleNamespace:
        status = 1
        with suppress(AssertionError):
            run_script(tmp_path, Path(command[1]).read_text(), *command[2:], environ=env)
            status = 0
        stdout.write((tmp_path / "stdout.txt").read_bytes() + (tmp_path / "stderr.txt").read_bytes())
        return SimpleNamespace(returncode=status)

    monkeypatch.setattr(subprocess, "run", run)


LINE = """
import sys, torch, collage_neuron
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
model, optimizer = collage_neuron.compile(model, optimizer, bytes=12)
for step in range(3):
    x = torch.randn(8, 4)
    loss = (model(x.bfloat16()).float() - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.6f}, {optimizer.param_groups[0]['collage_strategy']}")
"""


@pytest.mark.usefixtures("forked")
def test_a_script_is_a_process_for_each_strategy_and_seed(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The variable overrides the line in the script; nothing else is told to it."""
    script.write_text(LINE)
    command = ["compare", str(script), "--strategies", "light", "fp32", "--out", "out", "--seeds", "3", "--", "{seed}"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert [line.split()[:2] for line in said.splitlines()[1:3]] == [["light", "10.0"], ["fp32", "16.0"]]
    printed = {name: Path(f"out/{name}-3.txt").read_text() for name in ("light", "fp32")}
    for name, text in printed.items():
        assert f"COLLAGE_STRATEGY={name} overrides the strategy; compile was given bytes=12" in text
        assert text.count(f", {name}\n") == 3
    assert losses_in(printed["light"])[0] == losses_in(printed["fp32"])[0]
    assert "\nLoss is the last that a run printed.\n" in said
    assert "\nWhole run is wall time with imports and generating code" in said
    assert "\nCharts: `collage_neuron report out`.\n" in said
    assert [(log.name, log.steps) for log in read_logs([Path("out")])] == [("fp32", [1, 2, 3]), ("light", [1, 2, 3])]


REGISTERS = (
    "from collage_neuron.extend import STRATEGIES, Strategy\nSTRATEGIES['mine'] = Strategy('mine', *['bf16x2'] * 3)\n"
)


@pytest.mark.usefixtures("forked")
def test_a_strategy_that_a_script_registers(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its row stands where it was named; a misspelt name fails before anything is trained."""
    script.write_text(REGISTERS + LINE)
    assert main(["compare", str(script), "--strategies", "fp32", "mine", "--", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:3]
    assert [line.split()[:2] for line in lines] == [["fp32", "16.0"], ["mine", "14.0"]]
    assert main(["compare", str(script), "--strategies", "fp32", "mien", "--out", "wrong", "--", "0"]) == 1
    assert "COLLAGE_STRATEGY is 'mien'; set it to one of bf16," in capsys.readouterr().err
    assert [path.name for path in Path("wrong").iterdir()] == ["mien-0.txt"]
    script.write_text((REGISTERS + LINE).replace("bytes=12", "verbose=False"))
    assert main(["compare", str(script), "--strategies", "mine", "--", "0"]) == 2
    assert "the bytes of mine, which the script registers, are not known" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--strategies", "bf16"], "prints no loss; print one as `loss 2.345`"),
        (["--seeds", "0", "1"], "write it after --, as: -- --seed {seed}"),
        (["--strategies", "plus"], "did not say that it compiles with COLLAGE_STRATEGY=plus"),
        (["--out", "mine.py"], "mine.py cannot be written (File exists); name a folder with --out"),
    ],
)
def test_what_a_process_cannot_be_asked_for(
    more: list[str], words: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = "import sys; print('COLLAGE_STRATEGY=bf16 overrides the strategy; its loss is low', sys.argv)"
    script.write_text(silent if "--strategies" in more else LINE)
    assert main(["compare", str(script), *more]) == 2
    assert words in capsys.readouterr().err


def test_one_seed_of_the_default_strategies_recommends_nothing_and_says_how_to(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(LINE)
    monkeypatch.setattr(compare, "run_process", lambda _, strategy, seed, out: Run(strategy, seed, 12.0, [2.0]))
    assert main(["compare", str(script)]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[1:9]] == list(compare.DEFAULT)
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    recommended = re.findall(r"`(split\d+)`", readme.split("| any device, any learning rate")[1].split("\n")[0])
    assert len(recommended) == 4
    assert set(recommended) < set(compare.DEFAULT)
    assert said.splitlines()[-1].startswith("One seed cannot tell a difference from chance: `--seeds 0 1 2` gives")
