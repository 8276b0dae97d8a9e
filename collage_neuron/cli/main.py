"""`python -m collage_neuron`: commands for the shell."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from collage_neuron.cli import compare, doctor, kernels, report


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m collage_neuron", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("doctor", help="a table of what this machine can run, and whether roundings survive on it")
    kernels = commands.add_parser("kernels", help="write the generated kernels in kernels_nki/ that are out of date")
    instead = kernels.add_mutually_exclusive_group()
    instead.add_argument("--check", action="store_true", help="write nothing; say what is out of date, and fail")
    instead.add_argument("--report", action="store_true", help="write nothing; print what each kernel costs")
    compare.add_arguments(
        commands.add_parser("compare", help="a script's model under several strategies, from the same seed, as a table")
    )
    report.add_arguments(
        commands.add_parser("report", help="logs of runs as one HTML page: loss, EDQ by module, lost updates, stalls")
    )
    given = sys.argv[1:] if arguments is None else arguments
    end = given.index("--") if "--" in given and given[0] == "compare" else len(given)
    options = parser.parse_args(given[:end])
    run: dict[str, Callable[[], int]] = {
        "compare": lambda: compare.main(options, given[end + 1 :]),
        "doctor": _doctor,
        "kernels": lambda: _kernels(options),
        "report": lambda: report.main(options),
    }
    return run[options.command]()


def _doctor() -> int:
    text, well = doctor.report()
    print(text)
    return 0 if well else 1


def _kernels(options: argparse.Namespace) -> int:
    if options.report:
        print(kernels.report())
        return 0
    lines = kernels.stale() if options.check else [f"wrote {path}" for path in kernels.write()]
    print("\n".join(lines) or "all kernels are up to date")
    return 1 if options.check and lines else 0
