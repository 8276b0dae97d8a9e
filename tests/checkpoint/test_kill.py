"""kill -9 at random moments: a run goes on bit for bit from its last checkpoint, and the file is whole at any moment.

A child process is forked from a parent that has imported torch and compiled everything once, trains until it is killed,
and saves after every step with the code of examples/. It tells in shared memory whether it is saving.
"""

from __future__ import annotations

import json
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from models import run_script
from worlds import start_script

EXAMPLES = Path(__file__).parents[2] / "examples"

KILLS = 24

SCRIPT = """
import json, mmap, os, random, signal, sys, time
sys.path.insert(0, sys.argv[1])
import torch
torch.set_num_threads(1)
from pathlib import Path
import checkpoint_file, collage_neuron
from models import bits, differences, mlp, snapshot, train
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

STRATEGIES, KILLS, FOLDER, HOW = ["plus", "fp32", "full"], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
shared = mmap.mmap(-1, 2)  # [a step was taken, it is saving]

if HOW == "in place":  # the control: what everyone writes first
    def save(state, path):
        torch.save(state, path)
    checkpoint_file.save = save


def start(strategy):
    model = mlp()
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy)
    return {"model": model, "optimizer": optimizer, "scheduler": CosineAnnealingLR(optimizer, 1000)}


def go_on(parts, steps):
    for i in steps:
        train(parts["model"], parts["optimizer"], [i])
        parts["scheduler"].step()


def child(strategy, checkpoint):
    parts = start(strategy)
    saved = checkpoint.restore(parts)
    done = saved["done"] if saved else 0
    while True:
        go_on(parts, [done])
        done += 1
        shared[0:2] = bytes((1, 1))
        checkpoint.save(parts, done=done)
        shared[1] = 0


def killed_while_saving(strategy, checkpoint, moment):
    shared[0:2] = bytes(2)
    pid = os.fork()
    if pid == 0:
        try:
            child(strategy, checkpoint)
        finally:
            os._exit(1)  # an error: the child never ends by itself
    while not shared[0]:  # let it take a step: else a slow machine would get nowhere
        if os.waitpid(pid, os.WNOHANG)[0]:
            sys.exit("the child could not go on")
        time.sleep(0.001)
    time.sleep(moment)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    return bool(shared[1])


found = {"while saving": 0, "kills": 0, "left over": 0, "steps": {}, "differences": []}
random.seed(0)
for strategy in STRATEGIES:  # everything is captured and compiled before the first fork
    go_on(start(strategy), range(2))
began = time.perf_counter()
checkpoint_file.Checkpoint(FOLDER / "how_long_it_takes.pt", {}).save(start("plus"))
took = time.perf_counter() - began
for strategy in STRATEGIES:
    checkpoint = checkpoint_file.Checkpoint(FOLDER / f"{strategy}.pt", {"strategy": strategy})
    for _ in range(KILLS // len(STRATEGIES)):
        found["while saving"] += killed_while_saving(strategy, checkpoint, random.uniform(0, 4 * took))
        found["kills"] += 1
        found["left over"] += len(list(FOLDER.glob(".*.tmp")))
        if checkpoint.path.exists():
            checkpoint_file.load(checkpoint.path)  # whole
    parts, whole = start(strategy), start(strategy)
    done = checkpoint.restore(parts)["done"]
    found["steps"][strategy] = done
    go_on(parts, range(done, done + 3))
    go_on(whole, range(done + 3))
    found["differences"] += differences(snapshot(parts["optimizer"]), snapshot(whole["optimizer"]))
print(json.dumps(found))
"""


def kills(folder: Path, how: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run_script(folder, SCRIPT, EXAMPLES, KILLS, folder, how))
    return found


def test_a_run_that_is_killed_again_and_again_is_the_uninterrupted_one(tmp_path: Path) -> None:
    found = kills(tmp_path, "whole or not at all")
    assert found["kills"] == KILLS
    assert found["differences"] == []
    assert all(steps > 3 for steps in found["steps"].values())  # it got on
    assert 0 < found["while saving"] < KILLS  # it was hit where it hurts, and elsewhere: how often is up to the machine
    assert found["left over"] > 0


def test_a_file_that_is_cut_short_anywhere_is_named_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    import checkpoint_file  # as the examples import it

    file = tmp_path / "run.pt"
    checkpoint_file.save({"a": torch.ones(1000), "b": torch.ones(70_000)}, file)
    whole = file.read_bytes()
    assert torch.equal(checkpoint_file.load(file)["a"], torch.ones(1000))
    for length in (0, 1, 100, 5_000, 20_000, 70_000, 200_000, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(checkpoint_file.CheckpointError, match=r"run.pt is truncated, or no checkpoint \(.+\): del"):
            checkpoint_file.load(file)
    with pytest.raises(checkpoint_file.CheckpointError, match=r"cannot be read \(No such file or directory\)"):
        checkpoint_file.load(tmp_path / "none.pt")


# --- the example -----------------------------------------------------------------------------------------------------

FLAGS = ["--quick", "--device", "cpu", "--strategies", "plus", "--steps", "16"]


PRETRAIN = f"""
import os, runpy, sys, warnings
import torch
warnings.resetwarnings()
torch.set_num_threads(1)
os.chdir(sys.argv.pop(1))
sys.path.insert(0, {str(EXAMPLES)!r})
sys.argv[0] = {str(EXAMPLES / "pretrain.py")!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def pretrain(folder: Path, out: str, *flags: str) -> BaseProcess:
    """A process that trains, forked off one that has imported torch and compiled nothing."""
    own = folder / f"process of {out}"
    own.mkdir()
    text = Path(__file__).parents[2] / "passes"
    return start_script(own, PRETRAIN, folder, *FLAGS, "--data", text, "--out", out, *flags)


def result_of(folder: Path, out: str, process: BaseProcess) -> dict[str, Any]:
    """The losses of a run that ended well."""
    process.join(300)
    assert process.exitcode == 0, (folder / f"process of {out}" / "stderr.txt").read_text()
    (result,) = json.loads((folder / out / "pretrain.json").read_text())
    return {k: v for k, v in result.items() if k != "seconds"}


@pytest.mark.slow
def test_the_example_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    whole = pretrain(tmp_path, "whole")
    killed = pretrain(tmp_path, "killed", "--checkpoint", "saved")
    file = tmp_path / "saved" / "plus.pt"
    while not file.exists():
        assert killed.is_alive(), (tmp_path / "process of killed" / "stderr.txt").read_text()
        time.sleep(0.005)
    killed.kill()
    killed.join()
    assert killed.exitcode == -signal.SIGKILL
    done = len(torch.load(file, weights_only=True)["result"]["train"])
    assert 0 < done < 16
    resumed = pretrain(tmp_path, "resumed", "--checkpoint", "saved", "--resume")
    assert result_of(tmp_path, "resumed", resumed) == result_of(tmp_path, "whole", whole)


def test_a_checkpoint_with_other_settings_is_not_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    from checkpoint_file import Checkpoint, CheckpointError  # as the examples import it

    Checkpoint(tmp_path / "plus.pt", {"lr": 0.0005}).save({}, done=1)
    said = r"plus.pt is of a run with lr 0.0005, and this one has 0.001: go on with the same, or"
    with pytest.raises(CheckpointError, match=said):
        Checkpoint(tmp_path / "plus.pt", {"lr": 0.001}).restore({})
