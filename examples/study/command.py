"""The study's command line: run what is missing, then write the page."""

import argparse
import importlib
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from study import figures, jobs, page
from study.jobs import ROOT, MissingResult, Results, Store

PARTS = ("second_moment", "weights", "quadratic", "language", "controls", "grid")
"""In the order they run: `controls` needs what `language` measured, `quadratic` what `second_moment` did."""

DOCS = ROOT / "docs" / "development"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit status."""
    options = parser().parse_args(arguments)
    command = "python examples/study" + (" --quick" if options.quick else "")
    folder = options.out / ("study-quick" if options.quick else "study")
    if options.only and options.only.partition("/")[0] not in PARTS:
        parser().error(f"there is no part {options.only.partition('/')[0]!r}; choose one of {', '.join(PARTS)}")
    if options.fresh and options.only:
        parser().error(f"--fresh would drop all results; remove {folder / 'jobs' / options.only} to run that anew")
    if options.fresh:
        shutil.rmtree(folder, ignore_errors=True)
    if options.figures:
        print(f"figures: {', '.join(figures.save_all(page.stored(DOCS, PARTS), DOCS / 'study'))}")
        return 0
    began = perf_counter()
    try:
        results = run(options, Store(folder / "jobs", options.keep), command)
    except MissingResult as error:
        parser().error(str(error))
    print(times(results, perf_counter() - began, options.processes))
    if options.only:
        print(f"results: {folder / 'jobs' / options.only}; no page is written for a part of the study")
        return 0
    target = folder if options.quick else DOCS
    page.write(results, target, command)
    print(f"page: {target / 'study.md'}")
    return 0


def run(options: argparse.Namespace, store: Store, command: str) -> Results:
    """Runs the parts that were asked for; of the others, takes what is there."""
    results: Results = {}
    with jobs.workers(options.processes) as pool:
        for part in PARTS:
            listed = importlib.import_module(f"study.{part}").jobs(options.quick, results)
            if options.only and part != options.only.partition("/")[0]:
                results[part] = jobs.already_run(listed, store)
                continue
            todo = list(listed)
            chosen = [job for job in todo if options.only in (None, part, job.path.with_suffix("").as_posix())]
            if not chosen:
                names = ", ".join(job.path.with_suffix("").as_posix() for job in todo)
                parser().error(f"{options.only} is no job; the jobs of {part} are {names}")
            results[part] = jobs.run_all(chosen, store, pool, command)
    return results


def times(results: Results, here: float, processes: int) -> str:
    """What the study took, each part and all: a resumed study counts what it found at what it once took."""
    lines = []
    for part, records in results.items():
        seconds = [record["seconds"] for record in records.values()]
        lines.append(f"{part:>14}  {len(seconds):3d} jobs  {sum(seconds) / processes / 60:6.1f} min")
    total = sum(record["seconds"] for records in results.values() for record in records.values())
    lines.append(f"total: {total / processes / 60:.1f} min on {processes} cores; this time {here / 60:.1f} min")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python examples/study", description=__doc__)
    add = made.add_argument
    add("--quick", action="store_true", help="few runs, few steps: does all of it run? writes no documentation")
    add("--only", metavar="PART[/JOB]", help=f"run one part ({', '.join(PARTS)}) or one job, and write no page")
    add("--fresh", action="store_true", help="run everything again, also what is there from an earlier time")
    add("--keep", action="store_true", help="take results that other sources measured; the page says how many")
    add("--figures", action="store_true", help="run nothing: draw the figures again, from the records beside the page")
    add("--processes", type=int, default=min(2, os.cpu_count() or 1), help="jobs at a time (default: %(default)s)")
    add("--out", type=Path, default=ROOT / "out", help="folder for the results of each job (default: out)")
    return made
