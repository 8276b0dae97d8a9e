"""What a training run leaves behind, and how several are compared: a table, a picture, a JSON file."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median

try:
    import matplotlib
except ModuleNotFoundError as error:
    raise SystemExit('the example draws with matplotlib and counts with tqdm: pip install ".[demo]"') from error

matplotlib.use("Agg")  # draws into a file: no screen is needed
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from collage_neuron.cli import palette


@dataclass
class Result:
    """One strategy's run; losses in nats per byte, times in seconds per step, lost updates in per cent."""

    strategy: str
    bytes_per_parameter: float = float("nan")
    train: list[float] = field(default_factory=list)  # one a step
    valid: dict[int, float] = field(default_factory=dict)  # after so many steps
    lost: list[float] = field(default_factory=list)  # one a watched step
    seconds: list[float] = field(default_factory=list)  # one a stretch of steps

    @property
    def final_train(self) -> float:
        """The mean of the last twentieth of the steps: single batches are noisy."""
        return fmean(self.train[-max(1, len(self.train) // 20) :])

    @property
    def final_valid(self) -> float:
        return self.valid[max(self.valid)]

    @property
    def row(self) -> tuple[str, ...]:
        return (
            self.strategy,
            f"{self.bytes_per_parameter:.1f}",
            f"{self.final_train:.4f}",
            f"{self.final_valid:.4f}",
            f"{fmean(self.lost or [float('nan')]):.2f} %",
            f"{1e3 * median(self.seconds):.1f} ms",
        )


def table(results: list[Result]) -> str:
    """The comparison as aligned text."""
    head = ("strategy", "bytes/parameter", "training loss", "validation loss", "lost updates", "step")
    rows = [head, *(result.row for result in results)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def save(results: list[Result], folder: Path, title: str) -> None:
    """Write ``pretrain.json`` and ``pretrain.png`` into ``folder``; each is there whole or not at all."""
    text = json.dumps([asdict(result) for result in results], indent=1)
    _write_whole(folder / "pretrain.json", lambda path: path.write_text(text))
    _write_whole(folder / "pretrain.png", lambda path: _draw(results, title, path))


def _write_whole(target: Path, write: Callable[[Path], object]) -> None:
    half = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        write(half)
        os.replace(half, target)
    finally:
        half.unlink(missing_ok=True)


def _draw(results: list[Result], title: str, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    figure.suptitle(title)
    _draw_losses(left, results)
    _draw_differences(right, results)
    figure.savefig(path, format="png", dpi=130)
    plt.close(figure)


def _draw_losses(axes: Axes, results: list[Result]) -> None:
    for result in results:
        label = f"{result.strategy}, {result.bytes_per_parameter:g} bytes: {result.final_valid:.3f}"
        _plot(axes, result, list(result.valid), list(result.valid.values()), label)
    axes.set(title="Validation loss", xlabel="training step", ylabel="nats per byte")
    axes.legend(title="strategy, bytes per parameter: last loss")


def _draw_differences(axes: Axes, results: list[Result]) -> None:
    reference = next((result for result in results if result.strategy == "fp32"), results[-1])
    base = _smooth(reference.train)
    for result in results:
        above = [a - b for a, b in zip(_smooth(result.train), base, strict=True)]
        _plot(axes, result, list(range(1, len(above) + 1)), above)
    axes.axhspan(-1e-3, 1e-3, color="0.93", label="linear here, logarithmic outside")
    axes.set_yscale("symlog", linthresh=1e-3)
    axes.set(title=f"Training loss above that of {reference.strategy}, smoothed", xlabel="training step")
    axes.set_ylabel("nats per byte")
    axes.legend(loc="lower right")


def _plot(axes: Axes, result: Result, x: list[int], y: list[float], label: str | None = None) -> None:
    style = "--" if result.strategy == "fp32" else "-"  # what lies on top of fp32 shows between the dashes
    axes.plot(x, y, color=palette.COLOURS[result.strategy], linestyle=style, label=label)


def _smooth(values: list[float]) -> list[float]:
    """The running mean over the last twentieth of the run."""
    width = max(1, len(values) // 20)
    return [fmean(values[max(0, end - width) : end]) for end in range(1, len(values) + 1)]
