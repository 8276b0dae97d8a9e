"""Writers for trackers: what they hand on, and that the packages, where they are installed, keep it offline."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import collage_neuron
from collage_neuron import MLflow, Record, WandB, Writer


def measured(to: Writer) -> Record:
    """Two steps of a small model, with a loss; what was measured of the second."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model, optimizer = collage_neuron.compile(model, optimizer, backend="reference")
    with collage_neuron.monitor(optimizer, model, to=to) as monitor:
        for step in (1, 2):
            model(torch.ones(3, 4, dtype=torch.bfloat16)).float().sum().backward()
            optimizer.step()
            monitor.log(loss=1.5 / step, clip=math.inf)
    found = monitor.latest()
    assert found is not None
    return found


class Run:
    """Remembers what a run of wandb is told."""

    def __init__(self) -> None:
        self.axes: dict[str, str | None] = {}
        self.about: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []
        self.config = SimpleNamespace(update=lambda given, allow_val_change: self.about.update(given))

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, data: dict[str, Any]) -> None:
        self.rows.append(data)


def test_wandb_draws_over_the_optimizers_own_steps() -> None:
    run = Run()
    found = measured(WandB(run, modules=False))
    assert run.axes == {"collage/*": "collage/step", "collage_modules/*": "collage/step"}
    assert run.about["collage"]["strategy"] == "split433"
    assert [(row["collage/step"], row["collage/loss"]) for row in run.rows] == [(1, 1.5), (2, 0.75)]
    assert run.rows[-1]["collage/edq"] == found.total.pair.ratio
    assert not any(tag.startswith("collage_modules") for row in run.rows for tag in row)


@pytest.mark.filterwarnings("ignore")  # of the package, which is not ours to mend
def test_wandb_keeps_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(mode="offline", dir=str(tmp_path), project="collage")
    found = measured(WandB(run))
    assert run.config["collage"]["strategy"] == "split433"
    assert run.summary["collage/step"] == 2
    assert run.summary["collage/edq"] == found.total.pair.ratio
    assert "collage_modules/weight/edq" in run.summary.keys()  # noqa: SIM118 - a summary is not a dict
    run.finish()
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.filterwarnings("ignore")  # of the package, which is not ours to mend
def test_mlflow_keeps_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder of files is all that the test needs
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        found = measured(MLflow(mlflow))
    kept = mlflow.get_run(run.info.run_id).data
    assert kept.tags["collage.strategy"] == "split433"
    assert kept.metrics["collage/edq"] == pytest.approx(found.total.pair.ratio)
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "collage/loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.5), (2, 0.75)]


def test_mlflow_is_given_finite_numbers_and_text() -> None:
    told: list[Any] = []
    there = SimpleNamespace(
        log_metrics=lambda metrics, step: told.append((step, metrics)), set_tags=lambda tags: told.append(tags)
    )
    measured(MLflow(there))
    tags, *points = told
    assert tags["collage.strategy"] == "split433"
    assert tags["collage.versions.torch"] == torch.__version__
    assert [step for step, _ in points] == [1, 2]
    assert [metrics["collage/nonfinite"] for _, metrics in points] == [1, 1]
    assert all(isinstance(x, (int, float)) and x - x == 0 for _, metrics in points for x in metrics.values())
