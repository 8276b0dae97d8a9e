"""Writes the page, its figures, and the records that they were made from."""

import json
import math
import platform
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from study import figures
from study.claims import CLAIMS
from study.jobs import Record, Results, code, versions, write_whole
from study.readings import (
    TOLERANCE,
    above,
    best,
    decays,
    diverged,
    final,
    language,
    over_run,
    result,
    spread,
    usable,
)
from study.text import TEXT

CAUTION = """
**These are the few short runs of `--quick`, which show that the study runs. Their numbers mean nothing.**
"""


def write(results: Results, folder: Path, command: str) -> None:
    """`study.md` in the folder, and figures and records in `study/` beside it."""
    beside = folder / "study"
    figures.save_all(results, beside)
    for part, records in results.items():
        write_whole(beside / f"{part}.json", as_lines(records))
    write_whole(folder / "study.md", page(results, command))


def stored(folder: Path, parts: Sequence[str]) -> Results:
    """The records that the page was made from."""
    return {part: json.loads((folder / "study" / f"{part}.json").read_text()) for part in parts}


def older(results: Results) -> str:
    """A note on the number of results that were measured with earlier sources; empty if there are none."""
    count = sum(record["code"] != code(part) for part, records in results.items() for record in records.values())
    return f"\n{count} of the jobs ran with earlier sources of the package or the study (`--keep`).\n" if count else ""


def as_lines(records: dict[str, Record]) -> str:
    """JSON with one record per line."""
    lines = (f"{json.dumps(name)}: {json.dumps(record)}" for name, record in records.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def page(results: Results, command: str) -> str:
    """The whole page."""
    # processor time: what else the machine does meanwhile does not lengthen it
    seconds = [record["cpu_seconds"] for records in results.values() for record in records.values()]
    language_run = next(iter(results["language"].values()))["settings"]
    grid_run = results["grid"]["fp32"]["settings"]
    return TEXT.format(
        command=command,
        jobs=len(seconds),
        minutes=round(sum(seconds) / 2 / 60),
        versions=", ".join(f"{name} {version}" for name, version in versions().items()),
        machine=platform.machine(),
        caution=CAUTION if "--quick" in command else older(results),
        claims=claims(results),
        second_moment=second_moment(results),
        weights=weights(results),
        quadratic=quadratic(results),
        language=losses(results),
        descent=descent(results),
        controls=controls(results),
        grid=grid(results),
        tolerance=round(100 * TOLERANCE),
        language_run=f"{language_run['steps']} steps, learning rate {language_run['lr']:g}",
        language_seeds=len(language_run["seeds"]),
        grid_run=f"{grid_run['steps']} steps, {len(grid_run['seeds'])} seeds x {len(grid_run['lrs'])} learning rates "
        f"from {grid_run['lrs'][0]:g} to {grid_run['lrs'][-1]:g}",
        oracle_steps=results["weights"]["fp32"]["settings"]["steps"],
        quadratic_steps=results["quadratic"]["fp32"]["settings"]["steps"],
    )


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def claims(results: Results) -> str:
    """The table of claims: one row per claim, with the finding and its numbers."""
    rows = []
    for claim in CLAIMS:
        try:
            holds, numbers = claim.test(results)
        except LookupError:
            holds, numbers = None, "the runs that decide it are missing"
        rows.append((claim.text, claim.source, {True: "holds", False: "**does not hold**", None: "-"}[holds], numbers))
    return table(("claim", "by", "here", "measured"), rows)


def second_moment(results: Results) -> str:
    records = results["second_moment"]
    betas = list(result(records["fp32"])["relative error"])
    streams = list(result(records["fp32"])["relative error"][betas[0]])
    head = ("", *(f"{beta2} {stream}" for stream in streams for beta2 in betas), "cannot decrease (0.999)")
    return table(
        head,
        (
            [
                f"`{name}`",
                *(signed(result(record)["relative error"][b][s]) for s in streams for b in betas),
                f"{100 * result(record)['cannot decrease']['0.999']['random']:.0f} %",
            ]
            for name, record in records.items()
        ),
    )


def signed(x: float) -> str:
    """A relative error as text: in per cent if it is large, else as a power of ten."""
    return f"{100 * x:+.3g} %" if abs(x) >= 1e-3 else f"{x:+.0e}"


def weights(results: Results) -> str:
    records = results["weights"]
    streams = list(result(records["fp32"])["normal"]["error"])
    moving = [s for s in streams if s != "no gradient"]
    head = ("", *moving, "theta = 1, drift", "of these unmoved", "realised decay, pure noise")
    return table(
        head,
        (
            [
                f"`{name}`",
                *(f"{result(r)['normal']['error'][s]:.1e}" for s in moving),
                f"{result(r)['one']['error']['drift']:.1e}",
                f"{100 * result(r)['one']['unmoved']['drift']:.0f} %",
                f"{100 * result(r)['normal']['realised decay']['pure noise']:.1f} %",
            ]
            for name, r in records.items()
        ),
    )


def quadratic(results: Results) -> str:
    records = results["quadratic"]
    betas = list(result(records["fp32"])["kept"])
    rows = (
        [f"`{name}`" + _at(record), *(_spread(result(record)["kept"][b], "{:.3e}") for b in betas)]
        for name, record in records.items()
    )
    return table(("", *betas), rows)


def _at(record: Record) -> str:
    factors = record["settings"]["factors"]
    return "" if set(factors) == {1.0} else " (" + ", ".join(f"x {f:g}" for f in factors) + ")"


def _spread(values: Sequence[float], form: str) -> str:
    return f"{form.format(fmean(values))} ± {form.format(spread(values))}"


def losses(results: Results) -> str:
    """The table of the final validation loss of each variant, with its difference from fp32's."""
    names = dict.fromkeys(name.rpartition(" ")[0] for name in results["language"])
    rows = []
    for name in names:
        cells = [f"`{name}`", _bytes(results["language"][f"{name} {decays(results)[-1]}"])]
        for b in decays(results):
            record, fp32 = results["language"][f"{name} {b}"], results["language"][f"fp32 {b}"]
            cells.append(f"{_spread(final(record), '{:.4f}')} ({fmean(above(record, fp32)):+.4f})")
        rows.append(cells)
    return table(("", "bytes per parameter", *decays(results)), rows)


def _bytes(record: Record) -> str:
    found = result(record)["bytes a parameter"]
    return "-" if found is None else f"{found:g}"


def descent(results: Results) -> str:
    """The table of what the monitor measured of the updates, over the whole runs."""
    columns: dict[str, tuple[str, Callable[[float], str]]] = {
        "EDQ": ("edq", "{:.4f}".format),
        "EDQ of hi alone": ("edq high", "{:.4f}".format),
        "effective / raw": ("length", "{:.3f}".format),
        "lost": ("lost", "{:.2f} %".format),
        "lost by hi alone": ("lost high", "{:.2f} %".format),
        "v stalled": ("stalled", "{:.1f} %".format),
        "length of a step": ("step size", "{:.3f}".format),
    }
    rows = []
    for name, record in results["language"].items():
        cells = ((over_run(record, key), form) for key, form in columns.values())
        rows.append([f"`{name}`", *("-" if x is None else form(x) for x, form in cells)])
    return table(("", *columns), rows)


def controls(results: Results) -> str:
    """The table of fp32 at other learning rates, each with the run that it matches."""
    rows = []
    for title, record in results["controls"].items():
        name, _, beta2 = title.rpartition(" ")
        like = language(results, name.removeprefix("fp32 like "), beta2)
        factor = record["settings"]["lr"] / results["language"][f"fp32 {beta2}"]["settings"]["lr"]
        against = "" if like is None else f"{fmean(final(like)):.4f} ({fmean(above(like, record)):+.4f})"
        rows.append([f"`{name}`", beta2, f"{factor:.3f}", _spread(final(record), "{:.4f}"), against])
    return table(("", "beta2", "learning rate x", "validation loss", "what it matches (above the control)"), rows)


def grid(results: Results) -> str:
    """The table of usable learning rates, diverged runs and sharpness."""
    records = results["grid"]
    limit = (1 + TOLERANCE) * best(records)
    rows = []
    for name, record in records.items():
        lrs = usable(record, limit)
        region = f"{len(lrs)} ({lrs[0]:g} to {lrs[-1]:g})" if lrs else "0"
        runs = sum(map(len, result(record)["training"]))
        losses = [fmean(row) for row in result(record)["validation"] if all(map(math.isfinite, row))]
        sharp = [fmean(row) for row in result(record)["sharpness"][-1]]
        cells = (f"{min(losses):.4f}", region, f"{diverged(record)} of {runs}", f"{sharp[0]:.4f}", f"{sharp[-1]:.3g}")
        rows.append([f"`{name}`", *cells])
    head = ("", "best loss", "usable learning rates", "diverged", "sharpness, lowest rate", "sharpness, highest rate")
    return table(head, rows)
