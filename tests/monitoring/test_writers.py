"""Where a monitor's numbers go: nothing is read for it early, what a kill leaves is gone on with, no step is lost."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from models import backward, mlp, run_script
from monitored import sync, trained
from torch import nn

import collage_neuron
from collage_neuron import JsonLog, Live, Record, TensorBoard, Writer
from collage_neuron.errors import LogError
from collage_neuron.monitoring.metrics import ADVICE
from collage_neuron.monitoring.run_log import read_log
from collage_neuron.monitoring.writers import UNREAD, line


class Kept(Writer):
    """Remembers what it gets."""

    def __init__(self) -> None:
        self.got: list[Any] = []

    def begin(self, about: Any) -> None:
        self.got.append(about["strategy"])

    def write(self, record: Record, logged: Any) -> None:
        self.got.append((record.step, dict(logged)))

    def close(self) -> None:
        self.got.append("closed")


def run(monitored: Any, seeds: range, **logged: Any) -> None:
    """Steps whose loss is logged, and what else is given."""
    model, optimizer, monitor = monitored
    for seed in seeds:
        optimizer.zero_grad()
        loss = backward(model, seed)
        optimizer.step()
        monitor.log(loss=loss, **logged)
        sync(next(model.parameters()).device)


def started(to: Writer | list[Writer], device: str | torch.device = "cpu", **options: Any) -> Any:
    return trained(options.pop("strategy", "plus"), steps=0, device=device, to=to, **options)


# When they are fed ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "xla"])
def test_neither_records_nor_losses_are_read_until_the_queue_is_full(
    where: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    read: list[str] = []
    for name in ("tolist", "item", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name), name, read))
    device = request.getfixturevalue("xla") if where == "xla" else "cpu"
    most = 8 if where == "xla" else UNREAD  # whose steps take longer
    unread, kept = most if where == "xla" else None, Kept()
    plain, monitored = (started(to, device, unread=unread, make=mlp) for to in (Kept(), kept))
    for _, optimizer, _ in (plain, monitored):
        optimizer.param_groups[0]["collage_validate"] = "off"  # which reads samples
    plain[2].close()
    of_a_step = reads(plain, read, most)  # its number
    assert reads(monitored, read, most) == of_a_step
    assert kept.got == ["plus"]
    monitored[2].log(again=torch.zeros((), device=device))
    assert read == of_a_step
    run(monitored, range(most, most + 2))
    assert [x[0] for x in kept.got[1:]] == [1, 2]
    assert all(isinstance(x[1]["loss"], float) for x in kept.got[1:])
    assert [r.step for r in monitored[2].history] == list(range(1, most + 3))


def reads(monitored: Any, read: list[str], steps: int) -> list[str]:
    """What so many steps read, the first two of which, that record, aside."""
    run(monitored, range(2))
    read.clear()
    run(monitored, range(2, steps))
    return list(read)


def counted(method: Any, name: str, calls: list[str]) -> Any:
    def call(t: torch.Tensor, *arguments: Any) -> Any:
        calls.append(name)
        return method(t, *arguments)

    return call


def test_what_is_logged_belongs_to_the_step_before_even_if_that_was_read_already() -> None:
    kept = Kept()
    model, optimizer, monitor = monitored = started(kept, every=2)
    run(monitored, range(3))
    backward(model, 3)
    optimizer.step()
    assert monitor.latest().step == 4
    monitor.log(loss=5)
    monitor.log(lr=torch.tensor(0.5), memory={"peak": 7})
    assert kept.got[1:] == [(2, {"loss": kept.got[1][1]["loss"]})]
    monitor.close()
    assert kept.got[2:] == [(4, {"loss": 5, "lr": 0.5, "memory": {"peak": 7}}), "closed"]
    monitor.close()
    monitor.log(loss=1)  # nobody is left to get it
    assert kept.got[-1] == "closed"


def test_what_is_no_number_is_refused_at_the_first_step() -> None:
    _, _, monitor = monitored = started(Kept(), every=10)
    run(monitored, range(1))
    for value, said in (
        ({"loss": torch.ones(2)}, r"loss is a tensor of shape \[2\]"),
        ({"memory": {"peak": "much"}}, r"memory\.peak is str"),
        ({"loss": np.ones(2)}, "loss is ndarray"),  # has __float__, as every array has
        ({"loss": torch.ones((), dtype=torch.complex64)}, r"loss is a tensor of shape \[\] and torch\.complex64"),
    ):
        with pytest.raises(TypeError, match=f"{said}; log a number, a tensor with one element"):
            monitor.log(**value)
    with pytest.raises(ValueError, match="'step' is the monitor's own name"):
        monitor.log(step=3)
    with pytest.raises(TypeError, match=r"'runs/a\.jsonl', which is not a Writer; wrap it"):
        started("runs/a.jsonl")  # type: ignore[arg-type]


def test_what_waits_is_written_when_python_ends_and_when_the_monitor_goes(tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    run(started(JsonLog(log)), range(2))
    assert read_log(log, "run").steps == [1, 2]  # its optimizer is gone
    run_script(
        tmp_path,
        "import sys, torch, collage_neuron\n"
        "p = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))\n"
        "optimizer = collage_neuron.compile(torch.optim.AdamW([p]))\n"
        "monitor = collage_neuron.monitor(optimizer, to=collage_neuron.JsonLog(sys.argv[1]))\n"
        "for _ in range(3):\n"
        "    p.grad = torch.ones_like(p)\n"
        "    optimizer.step()\n"
        "    monitor.log(loss=1.5)\n",
        tmp_path / "other.jsonl",
    )
    assert read_log(tmp_path / "other.jsonl", "other").series(lambda r: r["loss"]) == ([1, 2, 3], [1.5] * 3)


class Full(Kept):
    """A writer whose disk is full at the second step."""

    def write(self, record: Record, logged: Any) -> None:
        if record.step == 2:
            raise OSError(28, "No space left on device")
        super().write(record, logged)


def test_a_writer_that_fails_is_left_out_and_no_step_is_lost() -> None:
    full, kept = Full(), Kept()
    model, _, monitor = monitored = started([full, kept], unread=1)
    run(monitored, range(2))
    with pytest.warns(RuntimeWarning, match=r"Full.* failed \(OSError: .*No space left.*training continues.*make room"):
        run(monitored, range(2, 3))
    run(monitored, range(3, 5))
    monitor.close()
    assert [x[0] for x in kept.got[1:-1]] == [1, 2, 3, 4, 5]
    assert [x[0] for x in full.got[1:-1]] == [1]
    assert full.got[-1] == "closed"
    other, plain, watch = started([])
    run((other, plain, watch), range(5))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


# The log -------------------------------------------------------------------------------------------------------------


def test_a_log_is_what_report_reads(tmp_path: Path) -> None:
    path = tmp_path / "runs" / "deep" / "plus.jsonl"
    _, _, monitor = monitored = started(JsonLog(path, seed=3), every=2)
    run(monitored, range(4), memory={"peak": 2**20})
    monitor.close()
    log = read_log(path, "plus")
    assert log.steps == [2, 4]
    about = {"strategy": "plus", "arithmetic": "fp32", "bytes_per_parameter": 12.0, "optimizer": "AdamW", "seed": 3}
    assert about.items() <= log.about.items()
    assert log.about["versions"]["torch"] == torch.__version__
    found, record = log.records[-1], monitor.latest()
    assert record is not None
    assert set(found["modules"]) == {"embedding", "norm", "qkv"}
    assert found["total"]["pair"]["ratio"] == pytest.approx(record.total.pair.ratio, rel=1e-7)
    assert found["total"]["stalled"] == pytest.approx(record.total.stalled)
    assert found["memory"] == {"peak": 2**20}
    assert 5 < found["loss"] < 10


def test_a_resumed_run_writes_on_and_half_a_line_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for half in ("", '{"step": 3, "lo'):
        with path.open("a") as file:
            file.write(half)
        _, _, monitor = monitored = started(JsonLog(path))
        run(monitored, range(2), again=len(half))
        monitor.close()
    log = read_log(path, "a")
    assert (log.steps, log.truncated) == ([1, 2], False)
    assert log.series(lambda r: r["again"])[1] == [15, 15]
    assert len(path.read_text().splitlines()) == 6


def test_what_is_no_log_stays_and_what_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("loss 3.2\n")
    with pytest.raises(LogError, match=r"notes\.txt, line 1 .*name another file"):
        JsonLog(tmp_path / "notes.txt")
    assert (tmp_path / "notes.txt").read_text() == "loss 3.2\n"
    with pytest.raises(OSError, match=r"notes\.txt/a\.jsonl cannot be written .*; name a file in a folder of yours"):
        JsonLog(tmp_path / "notes.txt" / "a.jsonl")


def test_two_monitors_do_not_write_one_log(tmp_path: Path) -> None:
    log, other = JsonLog(tmp_path / "a.jsonl"), JsonLog(tmp_path / "b.jsonl")
    _, _, monitor = started(log)
    for given in ([log], [other, other]):
        with pytest.raises(ValueError, match=r"JsonLog\(.*\) is given twice; each monitor needs its own log: name"):
            started([*given])
    with pytest.raises(LogError, match=r"a\.jsonl is being written by another JsonLog.*close\(\) its monitor"):
        JsonLog(log.path)
    for closed in (monitor, other):
        closed.close()
    JsonLog(log.path).close()


@pytest.mark.parametrize("name", ["step", "total", "groups", "modules"])
def test_a_first_line_that_would_be_read_as_a_step_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is the monitor's own name for a part of its records"):
        JsonLog(tmp_path / "a.jsonl", **{name: 5})
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_json_has_not_are_null(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    _, _, monitor = monitored = started(JsonLog(path, clip=math.inf, betas=(0.9, math.nan)))
    run(monitored, range(1), lr=math.inf, third=1 / 3)
    monitor.close()
    about, found = (json.loads(x, parse_constant=lambda name: pytest.fail(name)) for x in path.read_text().splitlines())
    assert (about["clip"], about["betas"]) == (None, [0.9, None])
    assert (found["lr"], found["third"]) == (None, 0.33333333)


# TensorBoard ---------------------------------------------------------------------------------------------------------


class Points:
    """A SummaryWriter as far as is needed."""

    def __init__(self) -> None:
        self.points: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.points.setdefault(tag, []).append((global_step, scalar_value))


def test_tensorboard_gets_a_curve_a_number_and_two_a_module() -> None:
    points = Points()
    _, _, monitor = monitored = started(TensorBoard(points), every=2)
    run(monitored, range(4), memory={"peak": 5})
    monitor.close()
    modules = {f"collage_modules/{name}/{x}" for name in ("embedding", "norm", "qkv") for x in ("edq", "lost")}
    own = {"edq", "edq_hi", "lost", "lost_hi", "zero", "raw_norm", "stalled/exp_avg_sq", "low_norm/param"}
    own |= {"low_norm/exp_avg_sq", "loss", "memory/peak"}
    assert set(points.points) == modules | {f"collage/{name}" for name in own}
    total = monitor.history[-1].total
    assert points.points["collage/edq"][-1] == (4, total.pair.ratio)
    assert points.points["collage/edq_hi"][-1] == (4, total.high.ratio)
    assert points.points["collage/memory/peak"] == [(2, 5), (4, 5)]


# A live line ---------------------------------------------------------------------------------------------------------


def record_of(strategy: str) -> Record:
    p = nn.Parameter(torch.ones(100, dtype=torch.bfloat16))
    optimizer = collage_neuron.compile(torch.optim.SGD([p], lr=1.0), strategy=strategy)
    monitor = collage_neuron.monitor(optimizer)
    p.grad = torch.tensor([0.0] * 10 + [2.0**-12] * 60 + [0.5] * 30, dtype=torch.bfloat16)
    optimizer.step()
    found = monitor.latest()
    assert found is not None
    return found


def test_a_line_says_what_arrives_and_what_would_in_bf16_alone() -> None:
    assert line(record_of("plus"), {"loss": 2.5}) == "step 1  loss 2.5  EDQ 1.0000 (hi 1.000)  lost 0.00 % (hi 66.7 %)"
    assert line(record_of("bf16"), {}) == "step 1  EDQ 1.0000  lost 66.67 %"


def test_a_run_that_becomes_nan_is_said_to_be_by_every_writer(tmp_path: Path) -> None:
    lines: list[str] = []
    points, log = Points(), tmp_path / "a.jsonl"
    model, optimizer, monitor = monitored = started([Live(lines.append), TensorBoard(points), JsonLog(log)])
    run(monitored, range(1))
    for loss in (1.5, math.inf):
        next(model.parameters()).grad.fill_(math.nan)
        optimizer.step()
        monitor.log(loss=loss, of={"val": math.nan})
    monitor.close()
    total = monitor.history[-1].total
    assert (total.finite, math.isnan(total.pair.lost), monitor.history[0].total.finite) == (False, True, True)
    assert lines[0].startswith("step 1  loss ")
    since = f"NaN or Inf in the update since step 2; if it stays so, {ADVICE}"
    assert lines[1:] == [f"step 2  loss 1.5  {since}", f"step 3  loss inf  {since}"]
    for tag in ("edq", "lost", "raw_norm", "of/val"):
        assert [(step, math.isnan(x)) for step, x in points.points[f"collage/{tag}"]][-2:] == [(2, True), (3, True)]
    read = read_log(log, "a")
    assert (read.nonfinite, read.broken, read.records[-1]["total"]["pair"]["lost"]) == ([2, 3], True, None)


def test_a_bar_a_function_or_stderr_shows_it(capsys: pytest.CaptureFixture[str]) -> None:
    tqdm = pytest.importorskip("tqdm")
    with tqdm.tqdm(total=3) as bar:
        run(started(Live(bar.set_postfix_str)), range(3))
        assert bar.postfix.startswith("step 3  loss ")
        assert "stalled" in bar.postfix
    capsys.readouterr()
    run(started(Live()), range(2))
    assert [text[:7] for text in capsys.readouterr().err.splitlines()] == ["step 1 ", "step 2 "]
