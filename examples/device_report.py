"""Collect what a Trainium answers into one file that you can send: `make device`, or python examples/device_report.py.

The doctor, the questions of device_probe.py, steps of every strategy beside the CPU's bits, times of a step and, where
neuron-explorer or neuron-profile is on PATH, the bytes it moved. Each part has a process and a time limit of its own:
one that fails costs its own answers only. Without a Trainium all of it runs on what is here (XLA's CPU, a simulator of
kernels), and the file and the last lines say that nothing was measured on a device.
"""

import argparse
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from datetime import datetime, timezone
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import device_probe
import device_steps

import collage_neuron
from collage_neuron.cli import doctor
from collage_neuron.conversion.budget import VARIABLE
from collage_neuron.passes.backends import torch_neuron

Json = dict[str, Any]

TOOLS = ("neuron-explorer", "neuron-profile")
"""Profilers with `view -d FOLDER --output-format summary-json`: the second up to SDK 2.29, the first after it."""
INSPECT = {"NEURON_RT_INSPECT_ENABLE": "1", "NEURON_RT_INSPECT_DEVICE_PROFILE": "1"}
"""What makes Neuron's runtime write profiles of first runs (tools/neuron-explorer/environment-variables)."""
TIMED = ("plus", "split433", "fp32")
NOT_MEASURED = "NOTHING HERE WAS MEASURED ON A DEVICE: no Trainium was found"


def machine(_: str, options: argparse.Namespace) -> Json:
    """What the answers belong to: evidence, versions, settings, kind of instance."""
    try:
        found = device_probe.describe(device_probe.find_machine())
    except SystemExit as no_nki:
        found = {"evidence": "device" if on_neuron() else "XLA's CPU, or none", "nki": str(no_nki)}
        found |= {"packages": dict(row[:2] for row in doctor.packages()), "settings": device_probe.settings()}
    with suppress(OSError):
        found["instance"] = torch_neuron.PRODUCT.read_text().strip()
    return found


def on_neuron() -> bool:
    """Returns True if torch_xla's device is a Trainium, or TorchNeuron has one."""
    if torch_neuron.is_installed():
        with suppress(Exception):  # what its package raises, where there is no device, is its own
            return torch_neuron.open_device().type == torch_neuron.NAME
    with suppress(ImportError, RuntimeError):
        import torch_xla.runtime

        return str(torch_xla.runtime.device_type()) == "NEURON"
    return False


def doctors(_: str, options: argparse.Namespace) -> Json:
    """The doctor's table and its verdict."""
    rows: dict[str, list[doctor.Row]] = {}
    for _ in doctor.lines(rows):
        pass
    return {"answer": doctor.verdict(rows), "rows": rows}


def questions(group: str, options: argparse.Namespace) -> Json:
    """The answers to a group of the probe's questions."""
    return device_probe.answer_here(group, device_probe.find_machine())


def steps(strategy: str, options: argparse.Namespace) -> Json:
    """Steps of a strategy beside the CPU's."""
    return device_steps.every_optimizer(strategy, device_steps.FEW if options.quick else device_steps.SHAPES)


def times(strategy: str, options: argparse.Namespace) -> Json:
    """Times of a strategy's step; on a CPU of few elements, since they say nothing."""
    return device_steps.timed(strategy, 2**26 if machine("", options)["evidence"] == "device" else 2**12)


def wanted(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Sections of the report, each with what it is asked of."""
    several = {
        "questions": ("rounding", "aliasing", "loops") if options.quick else device_probe.GROUPS,
        "steps": ("plus", "split433") if options.quick else device_steps.ALL,
        "times": TIMED[:1] if options.quick else TIMED,
        "profile": TIMED[:1],
    }
    for section in options.only:
        yield from ((section, name) for name in several.get(section, ("",)))


def here(section: str, name: str, options: argparse.Namespace) -> Json:
    """A part in this process, with the error that it ended with if it did."""
    began = perf_counter()
    try:
        with (
            redirect_stderr(StringIO()),
            simulator(options.simulator if section in ("questions", "steps", "times") else None),
        ):
            found: Json = {"found": PARTS[section](name, options)}
    except (Exception, SystemExit) as error:
        found = {"error": f"{type(error).__name__}: {error}"[:4000]}
    return {**found, "seconds": round(perf_counter() - began, 1)}


def apart(section: str, name: str, options: argparse.Namespace, settings: Mapping[str, str] | None = None) -> Json:
    """A part in a process of its own."""
    with TemporaryDirectory() as folder:
        out = Path(folder) / "part.json"
        command = [sys.executable, __file__, "--part", section, name, "--out", str(out), *passed_on(options)]
        environment = {**os.environ, **device_probe.settings_of(name), **(settings or {})}
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False, timeout=options.patience
            )
        except subprocess.TimeoutExpired:
            return {"error": f"not done after {options.patience} s", "seconds": options.patience}
        if out.exists():
            found: Json = json.loads(out.read_text())
            return found
        return {"error": f"exit status {done.returncode}", "log": (done.stdout + done.stderr)[-4000:]}


def passed_on(options: argparse.Namespace) -> list[str]:
    """The options of a part."""
    return ["--quick"] * options.quick + (["--simulator", str(options.simulator)] if options.simulator else [])


def profile(strategy: str, options: argparse.Namespace) -> Json:
    """The bytes and times of each graph of a strategy's steps, as Neuron's profiler sums them up."""
    tool = next((found for name in TOOLS if (found := shutil.which(name))), None)
    if tool is None:
        return {"answer": f"neither {' nor '.join(TOOLS)} is on PATH"}
    with TemporaryDirectory() as folder:
        timed = apart("times", strategy, options, {**INSPECT, "NEURON_RT_INSPECT_OUTPUT_DIR": folder})
        command = [tool, "view", "-d", folder, "--output-format", "summary-json"]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=options.patience)
    graphs = list(numbers_in(json.loads(done.stdout[re.search(r"[\[{]", done.stdout).start() :])))  # type: ignore[union-attr]
    return {"answer": traffic(graphs, timed), "tool": Path(tool).name, "graphs": graphs, "step": timed}


def numbers_in(x: object) -> Iterator[dict[str, float]]:
    """The numbers of each summary; its texts (names of hosts, paths) are left out."""
    if isinstance(x, dict) and "total_time" in x:
        yield {key: value for key, value in x.items() if isinstance(value, (int, float))}
        return
    for value in x.values() if isinstance(x, dict) else x if isinstance(x, list) else ():
        yield from numbers_in(value)


def traffic(graphs: Sequence[Mapping[str, float]], timed: Json) -> str:
    """Whether buffers that a step takes over are moved once: bytes of the graph with most of them, over the fewest."""
    least = next(iter(timed.get("found", {}).values()), None)
    moved = max(graphs, key=lambda x: x.get("hbm_write_bytes", 0), default={})
    if least is None or "hbm_write_bytes" not in moved:
        return f"{len(graphs)} graphs, and no bytes of them"
    read, written = moved["hbm_read_bytes"] / least["least read"], moved["hbm_write_bytes"] / least["least written"]
    return f"read {read:.2f} and wrote {written:.2f} times the fewest bytes, in {1e3 * moved['total_time']:.3f} ms"


PARTS: dict[str, Callable[[str, argparse.Namespace], Json]] = {
    "machine": machine, "doctor": doctors, "questions": questions, "steps": steps, "times": times, "profile": profile,
}  # fmt: skip
"""The sections of the report: what each finds out of the whole, of a group of questions, or of a strategy."""


def collect(options: argparse.Namespace) -> Json:
    """The report, a part after the other. This process opens no device, so that each part finds it free."""
    report: Json = {
        "what": "collage_neuron, device report",
        "version": collage_neuron.__version__,
        "quick": options.quick,
    }
    report["when"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
    parts = list(wanted(options))
    for i, (section, name) in enumerate(parts, 1):
        print(f"[{i}/{len(parts)}] {section} {name}".rstrip(), end=" ", flush=True)
        part = here(section, name, options) if options.quick or section == "profile" else apart(section, name, options)
        report.setdefault(section, {})[name or "all"] = part
        print(f"... {part['error'].splitlines()[0][:90] if 'error' in part else 'done'}", flush=True)
        device_probe.write(headed(report, options), options.out)  # kept, whatever becomes of the next part
    return headed(report, options)


def headed(report: Json, options: argparse.Namespace) -> Json:
    """The report after what it is evidence of."""
    evidence = report.get("machine", {}).get("all", {}).get("found", {}).get("evidence", "unknown")
    simulated = f", and kernels on the stand-in of {options.simulator}" if options.simulator else ""
    note = "" if (evidence, simulated) == ("device", "") else NOT_MEASURED
    return {"evidence": evidence + simulated, "note": note, **report}


def answers(x: object, name: str = "") -> Iterator[tuple[str, str]]:
    """Every answer in a section, by the names that lead to it."""
    if isinstance(x, dict) and ("answer" in x or "error" in x):
        yield name, str(x.get("error", x.get("answer"))).partition("\n")[0]
    elif isinstance(x, dict):
        for key, value in x.items():
            yield from answers(value, name if key == "found" else f"{name} {key}".strip())


def summary(report: Json) -> Iterator[str]:
    """What the file has in short, for the terminal."""
    for section in ("doctor", "steps", "profile"):
        yield from (f"{section} {name}: {said}" for name, said in answers(report.get(section, {})))
    for name, said in answers(report.get("questions", {})):
        yield f"question {name}: {said}"
    for strategy, part in report.get("times", {}).items():
        for place, t in part.get("found", {}).items():
            rate = (t["least read"] + t["least written"]) / t["seconds"] / 1e9
            yield f"time {strategy}, {place}: {1e3 * t['seconds']:.2f} ms for {t['elements']} elements, {rate:.1f} GB/s"
    yield f"evidence: {report['evidence']}"
    if report["note"]:
        yield report["note"]


def simulator(folder: Path | None) -> AbstractContextManager[Any]:
    """Inside, kernels run on the stand-in for NKI in `folder`, which is no part of the package: tests/support."""
    if folder is None:
        return nullcontext()
    sys.path.insert(0, str(folder))
    found = importlib.import_module("nki_standin")
    entered: AbstractContextManager[Any] = found.install("nki", "trn1", found.Device(overflow="infinity"))
    return entered


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    sections = list(PARTS)
    command = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command.add_argument("--out", type=Path, default=Path("out/device_report.json"), help="the file (%(default)s)")
    command.add_argument("--only", nargs="+", choices=sections, default=sections, help="sections of the report")
    command.add_argument(
        "--quick", action="store_true", help="some of each section, in this process: a check that it runs"
    )
    command.add_argument(
        "--patience", type=float, default=1800, metavar="S", help="seconds a part may take (%(default)s)"
    )
    command.add_argument("--simulator", type=Path, metavar="FOLDER", help="where a stand-in for NKI is: tests/support")
    command.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    return command.parse_args(arguments)


def main(arguments: list[str] | None = None) -> Json:
    """Reads the command line, collects, writes the file and says where it is."""
    options = options_of(arguments)
    for name, value in device_probe.SETTINGS.items():
        os.environ.setdefault(name, value)
    os.environ.pop(VARIABLE, None)  # each strategy is asked by name
    section, name = options.part or ("", "")
    report = here(section, name, options) if section else collect(options)
    device_probe.write(report, options.out)
    if not section:
        print("", *summary(report), f"the report, to be read and then sent: {options.out}", sep="\n")
    return report


if __name__ == "__main__":
    main()
