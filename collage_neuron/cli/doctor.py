"""`python -m collage_neuron doctor`: shows what this machine can run, and tests whether roundings survive on it.

Rows are printed as they are found, since opening a device may take long; the last line is a verdict.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from collage_neuron._version import __version__
from collage_neuron.conversion.budget import VARIABLE
from collage_neuron.numerics.strategies import STRATEGIES
from collage_neuron.passes.backends.protocol import Backend
from collage_neuron.passes.backends.registry import choose, get, names, passed_over
from collage_neuron.runtime.rounding_probe import CHECKS, asked, failures
from collage_neuron.runtime.step_call import environment_findings

Row = tuple[str, str, str]
"""The checked item, the finding, and `ok`, `-` (missing but not needed) or what to do."""

PACKAGES = ("torch", "llvmlite", "torch_xla", "torch-neuronx", "neuronx-cc", "nki", "libneuronxla", "plotly")


def packages() -> Iterator[Row]:
    """Versions of the relevant packages; only torch is required."""
    yield "collage_neuron", __version__, "ok"
    yield "python", platform.python_version(), "ok"
    yield "operating system", platform.platform(terse=True), "ok"
    yield "cpu", torch.backends.cpu.get_cpu_capability(), "ok"
    # An installation that was broken off leaves a folder without a name.
    versions = {_plain(name): d.version for d in importlib.metadata.distributions() if (name := d.metadata["Name"])}
    for name in PACKAGES:
        version = versions.get(_plain(name))
        yield (name, version, "ok") if version else (name, "not installed", "-")


def _plain(name: str) -> str:
    """A package's name in the spelling by which names are compared."""
    return re.sub(r"[-_.]+", "-", name).lower()


def environment() -> Iterator[Row]:
    """The settings of the process that change roundings, and the strategy that overrides others, if there is one."""
    for finding in environment_findings():
        yield finding.name, finding.value, finding.problem or "ok"
    if strategy := os.environ.get(VARIABLE):
        known = "ok, but compile takes it instead of the strategy that it is given"
        yield VARIABLE, strategy, known if strategy in STRATEGIES else "no strategy, so compile raises; unset it"


def backends() -> Iterator[Row]:
    """The backend that `auto` takes for parameters on the CPU and on a GPU, and what others lack."""
    yield _taken(torch.device("cpu"))
    if torch.cuda.is_available():
        yield "cuda", torch.cuda.get_device_name(), "ok"
        yield _taken(torch.device("cuda"))
    else:
        yield "cuda", "not available", "-"
    yield from ((name, lacks, "-") for name in names() if (lacks := get(name).missing()) is not None)


def _taken(device: torch.device) -> Row:
    taken = choose("auto", device)
    why = passed_over(taken, device)
    return f"parameters on {device}", f"backend {taken.name}", f"ok, but {why}" if why else "ok"


def devices() -> Iterator[tuple[Backend, Callable[[], torch.device]]]:
    """Backends that this machine offers, each with what opens a device of it."""
    for name in names():
        backend = get(name)
        yield from ((backend, opens) for opens in backend.found())


LOST = "loses roundings, or numbers that it should add: a step would be wrong"


def probes() -> Iterator[Row]:
    """For each backend, how many checks show that its device keeps every rounding and adds every number."""
    said_of = {torch.device("cpu")}
    for backend, device_of in devices():
        where = backend.name
        try:
            device = device_of()
            where = f"{backend.name} on {device}"
            backend.prepare(device)
            if device not in said_of:
                said_of.add(device)
                yield _taken(device)
            failed = failures(backend, device)
        except Exception as error:  # what a plug-in raises, where it cannot run, is its own
            said = [line for line in str(error).splitlines() if line.strip() and line.strip() != "Frames:"]
            yield where, "none", f"cannot run: {said[-1] if said else type(error).__name__}"
            continue
        wanted = [check for check in CHECKS if check in failed or asked(check, backend, failed)]
        passed = f"{len(wanted) - len(failed)} of {len(wanted)}"
        yield where, passed, f"{LOST} ({', '.join(failed)})" if failed else "ok"


SECTIONS: Mapping[str, Callable[[], Iterator[Row]]] = {
    "packages": packages,
    "environment": environment,
    "backends": backends,
    "probes": probes,
}
"""The parts of the table, in order: what takes longest is last."""

WIDTHS = (11, 32, 22)
"""Widths of the first three columns: rows are printed before the longest is known."""

FOUND = ("xla", "nki")
"""The backends that need a device that is found first."""


def verdict(sections: Mapping[str, Sequence[Row]]) -> str:
    """One line about the rows of all sections: `ready on: native, xla; not: nki, because ...`."""
    settings = sections["environment"]
    wrong = [item for item, _, said in settings if not said.startswith("ok")]
    if wrong:
        return f"not ready: change {', '.join(wrong)} (reasons above)"
    faults = dict(_faults(sections))
    probed = dict.fromkeys(item.partition(" on ")[0] for item, *_ in sections["probes"])
    known = [name for name in probed if name in names() and name not in faults]
    not_ready = (f"not: {name}, because {why}" for name, why in faults.items())
    return "; ".join([f"ready on: {', '.join(known) or 'nothing'}", *not_ready])


def _faults(sections: Mapping[str, Sequence[Row]]) -> Iterator[tuple[str, str]]:
    """Backends that cannot be used, each with the reason."""
    lacking = {item: finding for item, finding, _ in sections["backends"] if item in names()}
    yield from lacking.items()
    probed = {item.partition(" on ")[0]: said for item, _, said in sections["probes"]}
    yield from ((name, said) for name, said in probed.items() if said != "ok" and name in names())
    absent = (name for name in FOUND if name not in {*lacking, *probed})
    yield from ((name, "no device of it was found, or a package is missing (rows above)") for name in absent)


def lines(sections: dict[str, list[Row]]) -> Iterator[str]:
    """The table, row by row, then the verdict; the rows are collected in `sections`."""
    for section, find in SECTIONS.items():
        sections[section] = []
        for row in find():
            sections[section].append(row)
            cells = [cell.ljust(width) for cell, width in zip((section, *row[:2]), WIDTHS, strict=True)]
            yield "  ".join([*cells, row[2]])
    yield verdict(sections)


def objects(sections: Mapping[str, Sequence[Row]]) -> list[dict[str, str]]:
    """The rows and the verdict as objects, for JSON."""
    rows = [(section, *row) for section, section_rows in sections.items() for row in section_rows]
    said = verdict(sections)
    rows.append(("verdict", "collage_neuron", said, "ok" if said.startswith("ready") else "see the rows"))
    return [dict(zip(("section", "what", "value", "status"), row, strict=True)) for row in rows]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `doctor`."""
    parser.add_argument("--json", action="store_true", help="the rows and the verdict as JSON, for a bug report")


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Prints the table and the verdict; returns 0 if everything is well."""
    sections: dict[str, list[Row]] = {}
    for line in lines(sections):
        if not options.json:
            print(line, flush=True)
    if options.json:
        print(json.dumps(objects(sections), indent=2))
    return 0 if all(said == "-" or said.startswith("ok") for rows in sections.values() for *_, said in rows) else 1
