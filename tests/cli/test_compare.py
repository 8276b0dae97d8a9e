"""`compare`: the same start for every strategy, the table, and what is said of a script that cannot be compared."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from collage_neuron.cli import builtin_gpt, compare
from collage_neuron.cli.compare_process import losses_in
from collage_neuron.cli.compare_script import load_script, make_of
from collage_neuron.cli.compare_table import UNCOMPILED, Run, above, bytes_with_adam, recommendation, remarks, table
from collage_neuron.cli.main import main
from collage_neuron.errors import ScriptError

pytestmark = pytest.mark.usefixtures("rejecting")

SCRIPT = """
import random, sys
import torch
from torch import nn

WIDTH = int(sys.argv[1]) if len(sys.argv) > 1 else 4

def make():
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 10)
    shift = random.random()

    def loss():
        x = torch.randn(8, WIDTH, dtype=next(model.parameters()).dtype)
        return (model(x).float() - x.float().sum(1, keepdim=True) - shift).square().mean()

    return model, optimizer, loss, scheduler
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)  # where the figure goes
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return path


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


def test_the_same_seed_gives_the_same_run(script: Path) -> None:
    make = load_script(script, [])
    assert compare.train(make, "plus", 3, 5).losses == compare.train(make, "plus", 3, 5).losses


def test_the_table_has_a_row_a_strategy_and_only_columns_with_numbers() -> None:
    runs = [Run("bf16", s, 8, [3.0 + s], [0.25]) for s in (0, 1)] + [
        Run("fp32", s, 16, [2.5 + s], [0.5]) for s in (0, 1)
    ]
    lines = table(runs).splitlines()
    assert lines[0].split() == ["strategy", "bytes/parameter", "loss", "above", "fp32", "step"]
    assert lines[1].split() == ["bf16", "8.0", "3.5000", "+0.5000", "±", "0.0000", "250.0", "ms"]
    assert "above" not in table(runs[:2])


def test_remarks_say_what_is_chance_and_which_strategy_is_enough() -> None:
    one = [Run("light", 0, 10, [2.1]), Run("fp32", 0, 16, [2.1])]
    assert "from one seed" in remarks(one)[0]
    assert "fp32 is not among" in recommendation(one[:1])
    light = [Run("light", s, 10, [2.1 + 0.2 * s]) for s in (0, 1)]
    bf16 = [Run("bf16", s, 8, [3.0 + 0.2 * s]) for s in (0, 1)]
    fp32 = [Run("fp32", s, 16, [2.1 + 0.21 * s]) for s in (0, 1)]
    assert "light, 10 bytes" in " ".join(remarks(bf16 + light + fp32).pop().split())


def test_runs_that_do_not_start_alike_are_remarked_on() -> None:
    runs = [Run("plus", 0, 12, [2.1]), Run("fp32", 0, 16, [2.2]), Run(UNCOMPILED, 0, math.nan, [2.5])]
    assert "do not start alike" in remarks(runs)[0]
    assert "do not start alike" not in remarks(runs[1:])[0]


def test_the_command_prints_the_table_and_hands_on_arguments(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["compare", str(script), "--strategies", "plus", "fp32", "--steps", "4", "--", "7"]
    assert main(command) == 0
    assert "bytes/parameter" in capsys.readouterr().out
    assert sys.argv == [str(script), "7"]


def test_the_builtin_gpt_is_such_a_script() -> None:
    run = compare.train(make_of(builtin_gpt, "builtin_gpt"), "plus", 0, 3)
    assert run.losses[0] == pytest.approx(math.log(256), abs=1)
    assert "head" in run.records[-1].modules


LINE = """
import sys, torch, collage_neuron
torch.manual_seed(int(sys.argv[1]))
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = collage_neuron.compile(model, optimizer, bytes=12)
for step in range(3):
    x = torch.randn(8, 4)
    loss = (model(x.bfloat16()).float() - x.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.6f}, {optimizer.param_groups[0]['collage_strategy']}")
"""


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
    assert "figure: out/compare.html" in said
    assert "mine.py under light, fp32" in Path("out/compare.html").read_text()


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--steps", "3"], "mine.py defines no make(), which --steps is for"),
        (["--seeds", "0", "1"], "write it after --, as: -- --seed {seed}"),
        (["--strategies", "uncompiled"], "always compiles: leave out uncompiled"),
    ],
)
def test_what_a_process_cannot_be_asked_for(
    more: list[str], words: str, script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(LINE)
    assert main(["compare", str(script), *more]) == 2
    assert words in capsys.readouterr().err


def test_a_script_that_prints_no_loss_is_named(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script.write_text("import sys; print('COLLAGE_STRATEGY=bf16 overrides the strategy; its loss is low', sys.argv)")
    assert main(["compare", str(script), "--strategies", "bf16"]) == 2
    assert "prints no loss; print one as `loss 2.345`" in capsys.readouterr().err


def test_a_variable_that_is_left_set_does_not_make_all_rows_the_same(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLLAGE_STRATEGY", "bf16")
    assert main(["compare", str(script), "--steps", "1"]) == 2
    assert "COLLAGE_STRATEGY is set, and would override every strategy" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "losses"),
    [
        ("iter 10: loss 2.5, time 3.1ms\niter 20: loss 2.25, time 3ms", [2.5, 2.25]),
        ("step 0: train loss 4.2, val loss 4.25\niter 1: loss 3.0", [4.25]),
        ("{'loss': 2.5, 'epoch': 1}\n{'train_runtime': 3.0, 'train_loss': 9.0}", [2.5]),
        ("10%|# | 1/10 [00:01, loss=2.5]\r20%|## | 2/10 [00:02, loss=-1e-2]", [2.5, -0.01]),
        ("Epoch 0: train_loss=0.75, v_num=0", [0.75]),
        ("loss scale 1024, no-loss 3, losses 4", []),
        ("Loss: inf\nLoss: 3", [math.inf, 3.0]),
        ("loss\n7", []),
    ],
)
def test_losses_are_read_as_scripts_print_them(text: str, losses: list[float]) -> None:
    assert losses_in(text) == losses


def test_a_loss_that_is_not_a_number_is_never_recommended() -> None:
    fp32 = [Run("fp32", s, 16, [2.0 + 0.1 * s]) for s in (0, 1)]
    bf16 = [Run("bf16", s, 8, [math.nan]) for s in (0, 1)]
    assert "recommendation: fp32, 16 bytes" in recommendation(bf16 + fp32)
    assert "bf16 needs less and loses more" in recommendation(bf16 + fp32)
    assert recommendation([Run("fp32", s, 16, [math.nan]) for s in (0, 1)]).endswith("fp32 is not finite")
    assert "nan" in table(bf16 + fp32)


def test_a_strategy_that_is_better_than_fp32_is_near_enough() -> None:
    fp32 = [Run("fp32", s, 16, [2.0 + 0.01 * s]) for s in (0, 1)]
    plus = [Run("plus", s, 12, [1.5 + 0.01 * s]) for s in (0, 1)]
    assert "recommendation: plus, 12 bytes per parameter; over 2 seeds its loss is -0.5000" in recommendation(
        fp32 + plus
    )


def test_bytes_with_adam_are_those_that_compile_names() -> None:
    names = {
        "bf16": 8,
        "light": 10,
        "plus": 12,
        "full": 14,
        "fp32": 16,
        "fp32_states": 12,
        "split423": 11,
        "split311": 7,
    }
    assert {name: bytes_with_adam(name) for name in names} == names


def test_one_seed_of_the_default_strategies_recommends_nothing_and_says_how_to(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(script), "--steps", "1"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[1:8]] == list(compare.DEFAULT)
    assert {"split312", "split323", "split433"} < set(compare.DEFAULT)
    assert "no recommendation from one seed: run with `--seeds 0 1 2`" in said


def test_without_plotly_the_table_is_printed_all_the_same(
    script: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert main(["compare", str(script), "--strategies", "plus", "--steps", "1"]) == 0
    said = capsys.readouterr()
    assert "bytes/parameter" in said.out
    assert "no figure, which needs plotly; pip install '.[report]'" in said.err


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


def test_a_scheduler_that_cannot_step_is_refused() -> None:
    with pytest.raises(ScriptError, match="returns a int as scheduler"):
        make_of(module_with(scheduler=5), "changed")()


def test_a_script_that_compiles_itself_is_refused() -> None:
    import collage_neuron

    optimizer = collage_neuron.compile(torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), 0.1))
    with pytest.raises(ScriptError, match="leave that line out"):
        make_of(module_with(optimizer=optimizer), "changed")()


def test_a_script_that_is_not_there_and_a_number_of_steps_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(tmp_path / "none.py")]) == 2
    assert "is not a file" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "--steps", "0"])
    assert "give 1 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", "--strategies", "fp8"])
    assert "choose from" in capsys.readouterr().err
    for seed in (-1, 2**32):  # NumPy takes none of these
        with pytest.raises(SystemExit):
            main(["compare", "--seeds", "0", str(seed)])
        assert f"{seed} is not a seed: give 0 to 4294967295" in capsys.readouterr().err


def test_an_optimizer_that_cannot_be_compiled_is_a_sentence_not_a_traceback(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(
        SCRIPT.replace("AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)", "Adafactor(model.parameters())")
    )
    assert main(["compare", str(script), "--steps", "1"]) == 2
    assert "Adafactor cannot be compiled" in capsys.readouterr().err


def test_a_model_that_cannot_be_compiled_is_a_sentence_not_a_traceback(
    script: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script.write_text(SCRIPT.replace("nn.Linear(WIDTH, 1)", "nn.Linear(WIDTH, 1).half()"))
    assert main(["compare", str(script), "--steps", "1"]) == 2
    assert "compare: strategy bf16: model parameter 'weight' is torch.float16" in capsys.readouterr().err


FAILING = {
    "import nosuchmodule": ("line 1, in <module>", "No module named 'nosuchmodule'"),
    "def make(:": ("line 1", "SyntaxError"),
    "def make(): raise OSError('no data')": ("line 1, in make", "OSError: no data"),
    SCRIPT.replace(", dtype=next(model.parameters()).dtype", ""): ("in loss", "inputs.to(torch.bfloat16)"),
}


@pytest.mark.parametrize(("text", "words"), FAILING.items(), ids=["import", "syntax", "make", "dtype"])
def test_a_script_that_fails_is_shown_from_its_own_line_on(
    text: str,
    words: tuple[str, str],
    script: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
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
        main(["compare", str(script), "--steps", "1"])
