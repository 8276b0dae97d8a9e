"""The command line: run what is missing, print the tables, then write them, the figure and the records into docs.

The ways: bf16; amax (torchao's recipe: largest magnitudes in every step); propagated (scales inferred from the graph,
never measured); offsets (the same, measured at due steps: what matmul="fp8" does); unscaled; and frozen, bf16 whose
layers are not trained. The records of a study are kept, in a folder and beside the page; run the command again to
resume it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from study.jobs import ROOT, Store

from fp8 import jobs, page
from fp8.check_torchao import differences_from_torchao
from fp8.trainium import gains

DOCS = ROOT / "docs" / "development"


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the study; returns the exit status."""
    options = parser().parse_args(arguments)
    if options.check_torchao:
        different = differences_from_torchao()
        print(f"elements that differ from torchao's layer, outputs and gradients: {different}")
        return int(different > 0)
    if options.trn2:
        print(gains())
        return 0
    runs = list(jobs.plan(options.quick))
    beside = None if options.quick else DOCS / "fp8" / "records.json"
    store = Store(options.out / ("fp8-quick" if options.quick else "fp8"), options.keep, beside)
    if not options.table:
        jobs.run_all(runs, store)
    records = jobs.there(runs, store)
    text = page.tables(records, runs)
    print(text)
    if options.quick:
        print(f"records: {store.folder}; only the whole study writes {DOCS / 'fp8.md'}")
        return 0
    page.write(records, text, DOCS)
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python benchmarks/fp8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--quick", action="store_true", help="few steps: does all of it run? writes no documentation")
    add("--table", action="store_true", help="run nothing: write the tables of the records that are there")
    add("--keep", action="store_true", help="accept records that other sources made, too; the page says how many")
    add("--check-torchao", action="store_true", help="compare the layers of amax with torchao's, and run nothing")
    add("--trn2", action="store_true", help="print what trn2 would gain, from documented figures, and run nothing")
    add("--out", type=Path, default=ROOT / "out", help="folder for the records (default: out)")
    return made
