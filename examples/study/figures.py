"""The figures of the page, each an SVG file drawn from the records."""

import math
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from collage_neuron.cli import palette
from study.jobs import Record, Results, write_whole
from study.readings import TOLERANCE, best, decays, final, language, over_run, result
from study.variants import RELEASED, TRAINED

VARIANTS = {"plus bf16-arithmetic": "other", RELEASED: "uncompiled"}
"""What the palette calls the colours of what is no strategy."""

COLOURS = {name: palette.COLOURS[VARIANTS.get(name, name)] for name in TRAINED}
MANTISSA_COLOURS = {7: "#000000", 6: "#0072B2", 5: "#009E73", 4: "#E69F00", 3: "#D55E00"}

SETTINGS: Any = {"svg.fonttype": "none", "font.size": 9, "axes.grid": True, "grid.alpha": 0.3}
"""What all figures in SVG have in common; with a salt of their own, equal results give equal text."""

Draw = Callable[[Results], Figure]

FIGURES: dict[str, Draw] = {}
"""By file name."""


def figure(draw: Draw) -> Draw:
    FIGURES[f"{draw.__name__}.svg"] = draw
    return draw


def save_all(results: Results, folder: Path) -> list[str]:
    """Draws what can be drawn from the results; returns the names of the files."""
    with plt.rc_context(SETTINGS | {"svg.hashsalt": "study"}):
        for name, draw in FIGURES.items():
            picture, text = draw(results), StringIO()
            picture.savefig(text, format="svg", metadata={"Date": None})  # equal results, equal files
            plt.close(picture)
            write_whole(folder / name, text.getvalue())
    return list(FIGURES)


def style(name: str) -> dict[str, Any]:
    return {"color": COLOURS[name], "linestyle": "--" if name == "fp32" else "-"}


def present(records: Mapping[str, Record], names: Sequence[str] = tuple(COLOURS)) -> list[str]:
    return [name for name in names if name in records]


@figure
def second_moment(results: Results) -> Figure:
    """A second moment whose gradients shrink 100-fold, at beta2 = 0.999."""
    picture, axes = plt.subplots(figsize=(6, 3.4), layout="constrained")
    records = results["second_moment"]
    for name in present(records):
        curve = result(records[name])["curve"]
        axes.plot(curve["step"], curve["kept"], label=name, **style(name))
    exact = result(records["fp32"])["curve"]
    axes.plot(exact["step"], exact["exact"], ":", color="red", label="float64")
    axes.set(yscale="log", xlabel="step", ylabel="mean of v", title="Gradients shrink 100-fold, beta2 = 0.999")
    axes.legend(ncols=2, fontsize=7)
    return picture


@figure
def quadratic(results: Results) -> Figure:
    """Excess loss of each seed."""
    records = results["quadratic"]
    names = present(records)
    controls = [name for name in records if name.startswith("fp32 ")]
    picture, axes = plt.subplots(figsize=(7, 3.4), layout="constrained")
    marks = {"0.95": "o", "0.99": "s", "0.999": "^"}
    for i, name in enumerate([*names, *controls]):
        for j, (beta2, mark) in enumerate(marks.items()):
            losses = result(records[name])["kept"][beta2]
            colour = COLOURS.get(name, "0.5")
            axes.plot([i + (j - 1) * 0.2] * len(losses), losses, mark, color=colour, markersize=4, fillstyle="none")
    for beta2, mark in marks.items():
        axes.plot([], [], mark, color="0.3", fillstyle="none", label=f"beta2 {beta2}")
    axes.set(yscale="log", ylabel="excess loss", title="Noisy quadratic: excess loss of three seeds")
    axes.set_xticks(range(len(names) + len(controls)), [*names, *controls], rotation=35, ha="right", fontsize=7)
    axes.legend(fontsize=7)
    return picture


@figure
def language_models(results: Results) -> Figure:
    """Validation loss above fp32, along the runs."""
    betas = decays(results)
    picture, row = plt.subplots(1, len(betas), figsize=(3.6 * len(betas), 3.9), layout="constrained", squeeze=False)
    for axes, beta2 in zip(row[0], betas, strict=True):
        reference = results["language"][f"fp32 {beta2}"]
        for name in COLOURS:
            record = language(results, name, beta2)
            if record is not None and name != "fp32":
                curves = zip(result(record)["validation"], result(reference)["validation"], strict=True)
                mean = [fmean(x - y for x, y in zip(a, b, strict=True)) for a, b in curves]
                axes.plot(result(record)["steps"], mean, label=name, **style(name))
        axes.axhspan(-1e-3, 1e-3, color="0.93")
        axes.set_yscale("symlog", linthresh=1e-3)
        axes.set(title=f"beta2 = {beta2}", xlabel="step")
    row[0][0].set_ylabel("validation loss above fp32, nats a byte\n(linear in the grey band)")
    picture.legend(*row[0][-1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7)
    return picture


@figure
def learning_rates(results: Results) -> Figure:
    """The last loss against the learning rate that the steps amounted to: fp32 at several, and the others."""
    betas = decays(results)
    picture, row = plt.subplots(1, len(betas), figsize=(3.6 * len(betas), 3.4), layout="constrained", squeeze=False)
    for axes, beta2 in zip(row[0], betas, strict=True):
        fp32 = [(length, loss) for length, loss in _fp32_at_learning_rates(results, beta2) if length > 0.8]
        axes.plot(*zip(*fp32, strict=True), "--.", color="black", label="fp32")
        for name in (n for n in COLOURS if n not in ("fp32", "bf16", "fp32_states")):
            record = language(results, name, beta2)
            if record is not None:
                axes.plot(over_run(record, "step size"), fmean(final(record)), "o", color=COLOURS[name], label=name)
        axes.set(title=f"beta2 = {beta2}", xlabel="length of the steps, times that of fp32")
    row[0][0].set_ylabel("validation loss, nats a byte")
    row[0][-1].legend(fontsize=7)
    return picture


def _fp32_at_learning_rates(results: Results, beta2: str) -> list[tuple[float, float]]:
    """(learning rate as a multiple, loss) of every fp32 run at a decay, in order."""
    records = [*results["language"].values(), *results["controls"].values()]
    lr = results["language"][f"fp32 {beta2}"]["settings"]["lr"]
    fp32 = [r for r in records if r["settings"]["variant"] == "fp32" and f"{r['settings']['beta2']:g}" == beta2]
    return sorted((r["settings"]["lr"] / lr, fmean(final(r))) for r in fp32)


@figure
def descent_quality(results: Results) -> Figure:
    """EDQ and lost updates along the runs at the largest decay."""
    beta2 = decays(results)[-1]
    picture, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for name in COLOURS:
        record = language(results, name, beta2)
        if record is not None and "edq" in result(record):
            steps, found = result(record)["measured steps"], result(record)
            left.plot(steps, [_mean(row) for row in found["edq"]], label=name, **style(name))
            right.plot(steps, [_mean(row) for row in found["lost"]], label=name, **style(name))
    left.set(title=f"EDQ / ||raw update||, beta2 = {beta2}", xlabel="step")
    right.set(title="lost updates of what is kept, per cent", xlabel="step")
    if left.lines:
        left.legend(fontsize=7)
    return picture


def _mean(row: Sequence[float | None]) -> float:
    known = [x for x in row if x is not None]
    return fmean(known) if known else math.nan


@figure
def regions(results: Results) -> Figure:
    """The last loss over learning rates, from the best to the worst seed."""
    grid = results["grid"]
    picture, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained", sharey=True)
    for name in present(grid):
        _band(left, grid[name], name, COLOURS[name])
    for mantissa, colour in MANTISSA_COLOURS.items():
        for rounding, line in (("truncation", "-"), ("nearest", "--"), ("stochastic", ":")):
            name = f"E8M{mantissa} {rounding}"
            if name in grid:
                _band(right, grid[name], name, colour, line)
    for axes, title in ((left, "strategies"), (right, "formats of matrix multiplications, fp32 states")):
        axes.axhline((1 + TOLERANCE) * best(grid), color="red", linewidth=0.8, label="usable below")
        axes.set(xscale="log", xlabel="learning rate", title=title)
        axes.legend(fontsize=6, ncols=2)
    left.set_ylabel("validation loss, nats a byte: worst seed and range")
    return picture


def _band(axes: Axes, record: Record, name: str, colour: str, line: str = "-") -> None:
    losses, lrs = result(record)["validation"], record["settings"]["lrs"]
    worst = [max(row) if all(map(math.isfinite, row)) else math.nan for row in losses]
    axes.plot(lrs, worst, line, color=colour, label=name, linewidth=1.2)
    axes.fill_between(lrs, [min(row) for row in losses], worst, color=colour, alpha=0.08)


@figure
def sharpness(results: Results) -> Figure:
    """Sharpness of the last token's logits along the runs, at a small, a middling and the largest learning rate."""
    grid = results["grid"]
    lrs = grid["fp32"]["settings"]["lrs"]
    chosen = sorted({0, len(lrs) // 2, len(lrs) - 1})
    picture, row = plt.subplots(1, len(chosen), figsize=(3.6 * len(chosen), 3.4), layout="constrained", squeeze=False)
    for axes, at in zip(row[0], chosen, strict=True):
        for mantissa, colour in MANTISSA_COLOURS.items():
            for rounding, line in (("truncation", "-"), ("nearest", "--")):
                name = f"E8M{mantissa} {rounding}"
                if name in grid:
                    found = result(grid[name])
                    means = [fmean(check[at]) for check in found["sharpness"]]
                    axes.plot(found["steps"], means, line, color=colour, label=name)
        axes.set(title=f"learning rate {lrs[at]:g}", xlabel="step", yscale="log")
    row[0][0].set_ylabel("sharpness (Keskar's, per cent)")
    row[0][0].legend(fontsize=6)
    return picture
