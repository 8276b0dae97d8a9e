"""`compare`: the same start for every strategy, in this process or in one for each strategy, and the command."""

from __future__ import annotations

import math
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import pytest
from worlds import run_script

from collage_neuron.cli import builtin_gpt, compare
from collage_neuron.cli.compare_results import UNCOMPILED, above
from collage_neuron.cli.main import main
from collage_neuron.cli.user_script import load_script, losses_in, make_of

pytestmark = pytest.mark.usefixtures("rejecting")


def test_every_strategy_starts_alike_and_is_measured(script: Path) -> None:
    runs = compare.compare(load_script(script, []), ("bf16", "plus", "fp32", UNCOMPILED), (0, 1), 40)
    assert [(run.strategy, run.seed) for run in runs[:3]] == [("bf16", 0), ("bf16", 1), ("plus", 0)]
    by_seed = {seed: {run.losses[0] for run in runs[:-2] if run.seed == seed} for seed in (0, 1)}
    assert all(len(first) == 1 for first in by_seed.values())
    assert by_seed[0] != by_seed[1]
    assert [run.bytes_per_parameter for run in runs[:6:2]] == [8, 12, 16]
    assert all(len(run.losses) == 40 and len(run.records) == 20 for run in runs[:-2])
    bf16, plus, fp32 = runs[0], runs[2], runs[4]
    assert bf16.edq < plus.edq
    assert plus.edq == pytest.approx(1, abs=2**-6)
    assert bf16.lost > plus.lost >= fp32.lost
    assert abs(plus.final - fp32.final) < abs(bf16.final - fp32.final)
    assert above("fp32", runs) == [0, 0]


def test_the_command_prints_the_table_and_hands_on_arguments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", str(script), "--strategies", "plus", "fp32", "--steps", "4", "--", "7"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "bytes/parameter" in said
    assert "\nEDQ (effective descent quality): the share of the wanted update that arrives" in said
    assert "\nStep is the forward pass, the backward pass and the update" in said
    assert sys.argv == [str(script), "7"]


def test_the_builtin_gpt_is_such_a_script() -> None:
    run = compare.train(make_of(builtin_gpt, "builtin_gpt"), "plus", 0, 3)
    assert run.losses[0] == pytest.approx(math.log(256), abs=1)
    assert "head" in run.records[-1].modules


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
def test_an_unchanged_script_is_a_process_for_each_strategy_and_seed(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The variable overrides the line in the script; nothing else is told to it."""
    pytest.importorskip("plotly")
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
    assert "\nLoss is the last that a run printed, here from `step 2: loss " in said
    assert "\nWhole run is wall time with imports and generating code" in said
    assert "compare mine.py --seeds 0 1 2 -- {seed}` gives a rec".replace("mine.py", str(script)) in said
    assert "figure: out/compare.html" in said
    assert "Strategies compared: mine.py" in Path("out/compare.html").read_text()


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
        (["--steps", "3"], "mine.py defines no make(), which --steps is for"),
        (["--seeds", "0", "1"], "write it after --, as: -- --seed {seed}"),
        (["--strategies", "uncompiled"], "always compiles: leave out uncompiled"),
        (["--out", "mine.py"], "mine.py cannot be written (File exists); name a folder with --out"),
    ],
)
def test_what_a_process_cannot_be_asked_for(
    more: list[str], words: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = "import sys; print('COLLAGE_STRATEGY=bf16 overrides the strategy; its loss is low', sys.argv)"
    script.write_text(silent if "bf16" in more else LINE)
    assert main(["compare", str(script), *more]) == 2
    assert words in capsys.readouterr().err


def test_a_variable_that_is_left_set_does_not_make_all_rows_the_same(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLLAGE_STRATEGY", "bf16")
    assert main(["compare", str(script), "--steps", "1"]) == 2
    assert "COLLAGE_STRATEGY is set, and would override every strategy" in capsys.readouterr().err


def test_without_plotly_the_table_is_printed_all_the_same(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["compare", str(script), "--strategies", "plus", "--steps", "1"]) == 0
    said = capsys.readouterr()
    assert "bytes/parameter" in said.out
    assert "no figure, which needs plotly; pip install '.[report]'" in said.err
