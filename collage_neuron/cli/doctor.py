"""`python -m collage_neuron doctor`: shows what this machine can run, and tests whether roundings survive on it."""

from __future__ import annotations

import argparse
import importlib.metadata
import platform
from collections.abc import Callable, Iterator, Sequence

import torch

from collage_neuron.passes.backends.protocol import Backend
from collage_neuron.passes.backends.registry import choose, get, names
from collage_neuron.runtime.preconditions import environment_findings
from collage_neuron.runtime.rounding_probe import CHECKS, failures

Row = tuple[str, str, str]
"""The checked item, the finding, and `ok`, `-` (missing but not needed) or what to do."""

PACKAGES = ("torch", "llvmlite", "torch_xla", "torch-neuronx", "neuronx-cc", "nki", "libneuronxla")


def packages() -> Iterator[Row]:
    """Versions of the relevant packages; only torch is required."""
    yield "python", platform.python_version(), "ok"
    found = {d.metadata["Name"].replace("_", "-"): d.version for d in importlib.metadata.distributions()}
    for name in PACKAGES:
        version = found.get(name.replace("_", "-"))
        yield (name, version, "ok") if version else (name, "not installed", "-")


def environment() -> Iterator[Row]:
    """The settings of the process that change roundings."""
    for finding in environment_findings():
        yield finding.name, finding.value, finding.problem or "ok"


def backends() -> Iterator[Row]:
    """The backend that `auto` takes for parameters on the CPU, and what others lack."""
    yield "parameters on cpu", f"backend {choose('auto', torch.device('cpu')).name}", "ok"
    for name in names():
        lacks = get(name).missing()
        if lacks is not None:
            yield name, lacks, "-"


def devices() -> Iterator[tuple[Backend, Callable[[], torch.device]]]:
    """Backends that this machine offers, each with what opens a device of it."""
    for name in names():
        backend = get(name)
        yield from ((backend, opens) for opens in backend.found())


def probes() -> Iterator[Row]:
    """Checks for each backend that its device keeps every rounding."""
    for backend, device_of in devices():
        where = backend.name
        try:
            device = device_of()
            where = f"{backend.name} on {device}"
            backend.prepare(device)
            failed = failures(backend, device)
        except Exception as error:  # what a plug-in raises, where it cannot run, is its own
            said = [line for line in str(error).splitlines() if line.strip() and line.strip() != "Frames:"]
            yield where, "all", f"cannot run: {said[-1] if said else type(error).__name__}"
            continue
        for check in CHECKS:
            lost = "loses roundings: compensated arithmetic would be worth nothing" if check in failed else "ok"
            yield where, check, lost


def report() -> tuple[str, bool]:
    """The table as text, and True if everything is well."""
    sections = {"packages": packages, "environment": environment, "backends": backends, "probes": probes}
    rows = [(section, *row) for section, find in sections.items() for row in find()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    return "\n".join(lines), all(row[3] in ("ok", "-") for row in rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `doctor`, which has no options."""


def main(options: argparse.Namespace, rest: Sequence[str] = ()) -> int:
    """Prints the table; returns the exit status."""
    text, well = report()
    print(text)
    return 0 if well else 1
