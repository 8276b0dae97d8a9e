"""The command line: run what is missing, print the table, then write the page.

The table has the error ||theta - theta64|| / ||theta64 - theta0|| of every strategy, of torch's AdamW in fp32 and of
the peers that are installed, under each condition. The records of a run are kept; run the command again to resume it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

from study.jobs import ROOT, Record, Store, workers

from accuracy import contenders, jobs, language, page, peers, table
from accuracy.conditions import CONDITIONS
from accuracy.contenders import Contender

DOCS = ROOT / "docs"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the comparison; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.figures:
        page.draw(DOCS)
        return 0
    began = perf_counter()
    chosen, missing = who(options)
    kind = "-quick" if options.quick else "-tuning" if options.tuning else ""
    folder = options.out / f"accuracy{kind}"
    planned = list(jobs.plan(options.quick, options.tuning, options.condition, chosen))
    store = Store(folder, options.keep, DOCS / "accuracy" / "records.json" if options.keep and not kind else None)
    if options.page:
        records = jobs.there(planned, store)
    else:
        with workers(options.processes) as pool:
            records = jobs.run_all(planned, store, pool)
    found = table.rows(records)
    print(table.plain(found))
    for name, reason in missing.items():
        print(f"not compared: {name}: {reason}")
    print(times(records, perf_counter() - began, options.processes))
    if options.quick or options.tuning or options.condition or options.only:
        print(f"records: {folder}; only a whole run writes {DOCS / 'accuracy.md'}")
        return 0
    page.write(records, missing, DOCS, jobs.older(records), len(planned) - len(records))
    print(f"page: {DOCS / 'accuracy.md'}")
    return 0


def who(options: argparse.Namespace) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that were asked for, and the packages that cannot be used here, with the reasons."""
    other, missing = peers.found()
    known = [*contenders.own(), *other]
    unknown = sorted(set(options.only) - {c.name for c in known})
    if unknown:
        parser().error(f"there is no contender {unknown[0]!r}; choose from {', '.join(c.name for c in known)}")
    return [c for c in known if not options.only or c.name in options.only], missing


def times(records: Sequence[Record], here: float, processes: int) -> str:
    total = sum(r["seconds"] for r in records) / processes / 60
    return f"{len(records)} jobs, {total:.1f} min on {processes} cores; this time {here / 60:.1f} min"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python benchmarks/accuracy", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--quick", action="store_true", help="few steps: does all of it run? writes no page")
    add("--tuning", action="store_true", help="the seeds for work on formats, without the mixture; writes no page")
    add(
        "--condition",
        action="append",
        default=[],
        choices=[*CONDITIONS, language.NAME],
        help="run this one; repeat for more",
    )
    add("--only", action="append", default=[], metavar="NAME", help="run this contender; repeat for more")
    add("--page", action="store_true", help="run nothing: write the page from the records that are there")
    add("--figures", action="store_true", help="run nothing: draw the figures again, from the records beside the page")
    add(
        "--keep",
        action="store_true",
        help="accept records of other sources, those beside the page too; the page says how many",
    )
    add("--processes", type=int, default=min(2, os.cpu_count() or 1), help="jobs at a time (default: %(default)s)")
    add("--out", type=Path, default=ROOT / "out", help="folder for the records (default: out)")
    return made
