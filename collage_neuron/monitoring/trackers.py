"""Writers for experiment trackers: Weights & Biases and MLflow, through their own interfaces."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

from collage_neuron.monitoring.metrics import Record
from collage_neuron.monitoring.writers import Logged, Writer, flat, points


class WandbRun(Protocol):
    """A run of Weights & Biases, as `wandb.init()` returns it."""

    config: Any

    def define_metric(self, name: str, step_metric: str | None = None) -> Any:
        """Makes `step_metric` the axis over which `name` is drawn."""

    def log(self, data: dict[str, Any]) -> object:
        """Adds a row of numbers."""


class WandB(Writer):
    """Numbers for Weights & Biases, under the tags that `TensorBoard` writes: `collage/edq`, `collage/lost`, ...

    They are drawn over `collage/step`, the optimizer's own count, and not over wandb's count of rows: a measured step
    is read later than your own `run.log`, and wandb drops rows whose step has passed. What describes the run is in
    `run.config["collage"]`.

    Args:
        run: what `wandb.init()` returned; you finish it, after the monitor was closed.
        modules: whether to write two curves for each module too.
    """

    def __init__(self, run: WandbRun, modules: bool = True) -> None:
        self._run = run
        self._modules = modules
        for tags in ("collage/*", "collage_modules/*"):
            run.define_metric(tags, step_metric="collage/step")

    def begin(self, about: Mapping[str, Any]) -> None:
        self._run.config.update({"collage": dict(about)}, allow_val_change=True)  # a resumed run says it again

    def write(self, record: Record, logged: Logged) -> None:
        self._run.log({**points(record, logged, self._modules), "collage/step": record.step})


class MlflowMetrics(Protocol):
    """The module `mlflow`, which writes into its active run, or any other object with these functions."""

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> object:
        """Adds a point to each of the curves."""

    def set_tags(self, tags: dict[str, Any]) -> object:
        """Sets tags of the run."""


class MLflow(Writer):
    """Numbers for MLflow, under the tags that `TensorBoard` writes.

    What describes the run becomes tags, `collage.NAME`: tags and not parameters, since MLflow rejects a parameter that
    a resumed run has with another value.

    Args:
        mlflow: the module `mlflow`: its active run is written to, and you end it, after the monitor was closed.
        modules: whether to write two curves for each module too.
    """

    def __init__(self, mlflow: MlflowMetrics, modules: bool = True) -> None:
        self._mlflow = mlflow
        self._modules = modules

    def begin(self, about: Mapping[str, Any]) -> None:
        named = {name.lstrip("/").replace("/", "."): str(value) for name, value in flat("", about)}
        self._mlflow.set_tags({f"collage.{name}": value for name, value in named.items()})

    def write(self, record: Record, logged: Logged) -> None:
        found = points(record, logged, self._modules)
        # Its stores keep numbers; a NaN that was logged would end the write of all others.
        self._mlflow.log_metrics({tag: x for tag, x in found.items() if math.isfinite(x)}, step=record.step)
