"""Ask a Trainium device what its documentation leaves open, and write the answers to a JSON file.

::

    python examples/device_probe.py                     # all questions; on trn1 allow a quarter of an hour
    python examples/device_probe.py --only rounding --out out/rounding.json

Without a device the vendor's simulator answers where its package is installed, and the report says so. Each group of
questions runs in a process of its own, so that a kernel the compiler rejects costs its own group only.
"""

import argparse
import importlib
import importlib.metadata
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from device_kernels import Function, Instruction, load
from device_questions import QUESTIONS, Question
from device_torch import QUESTIONS as TORCH_QUESTIONS
from device_torch import TorchQuestion
from torch import Tensor

from collage_neuron.passes.backends import torch_neuron

Json = dict[str, Any]

SETTINGS = {"NKI_PRECISE_FP": "1", "NEURON_RT_STOCHASTIC_ROUNDING_EN": "0", "NEURON_CC_FLAGS": "--auto-cast=none"}
"""What the process runs under unless its environment says otherwise; read when NKI or the runtime starts."""

TOLD = (
    "NEURON_RT_STOCHASTIC_ROUNDING_EN", "NEURON_RT_STOCHASTIC_ROUNDING_SEED", "NEURON_RT_NUM_CORES",
    "NEURON_RT_VISIBLE_CORES", "NEURON_RT_VIRTUAL_CORE_SIZE", "NEURON_LOGICAL_NC_CONFIG", "NEURON_CC_FLAGS",
    "NEURON_PLATFORM_TARGET_OVERRIDE", "NKI_PRECISE_FP", "NKI_SIMULATOR", "PJRT_DEVICE", "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16", "COLLAGE_STRATEGY", "COLLAGE_NEURON_IN_PLACE",
)  # fmt: skip
"""The variables whose values a report has: those that change what is computed, and no others, which may be secret."""

STOCHASTIC = "rounding_stochastic"
"""The group `rounding` once more, with stochastic rounding switched on."""

GROUPS = [*QUESTIONS, STOCHASTIC, *TORCH_QUESTIONS]


@dataclass(frozen=True)
class Machine:
    """What answers: a device, the vendor's simulator or a stand-in, and the dialect of NKI it takes."""

    evidence: str
    dialect: str
    version: str
    device: torch.device
    simulate: Callable[[Function], Function] | None

    def run(self, kernel: Function, *tensors: Tensor) -> Tensor:
        """A kernel on CPU tensors, with a CPU tensor as result."""
        run = self.simulate(kernel) if self.simulate else kernel
        result: Tensor = run(*(t.to(self.device) for t in tensors))
        if self.device.type == "xla":
            import torch_xla

            torch_xla.sync()
        return result.cpu()


NKI = {"nki": ("nki", "nki"), "beta1": ("neuronxcc.nki", "neuronx-cc")}
"""Module and distribution of each dialect."""


def find_machine() -> Machine:
    """What this process can ask, in the dialect that kernels are generated in here. SystemExit if there is no NKI."""
    from collage_neuron.passes.backends.nki.target import installed

    dialect = installed()
    if dialect is None:
        raise SystemExit("device_probe: no NKI that kernels are generated for can be imported; see docker/README.md")
    name, distribution = NKI[dialect]
    nki = importlib.import_module(name)
    return _machine(nki, dialect, getattr(nki, "__version__", "") or _version(distribution))


def _version(distribution: str) -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return "unknown"


def _machine(nki: Any, dialect: str, version: str) -> Machine:
    if torch_neuron.is_installed():
        evidence = "stand-in" if "standin" in version else "device"
        return Machine(evidence, dialect, version, torch_neuron.open_device(), None)
    if "standin" in version:
        return Machine("stand-in", dialect, version, torch.device("cpu"), None)
    with suppress(ImportError, RuntimeError):
        import torch_xla
        import torch_xla.runtime

        device = torch_xla.device()
        if torch_xla.runtime.device_type() == "NEURON":
            return Machine("device", dialect, version, device, None)
    if dialect == "nki":
        return Machine("nki.simulate", dialect, version, torch.device("cpu"), nki.simulate)
    raise SystemExit(
        "device_probe: no Neuron device, and the simulator of `neuronxcc.nki` takes no bf16 tensors of torch"
    )


def answer(question: Question | TorchQuestion, machine: Machine, folder: Path) -> Json:
    """The answer to one question, or the error it ended with."""
    began = perf_counter()
    count = 0

    def ask(instruction: Instruction, *tensors: Tensor) -> Tensor:
        nonlocal count
        count += 1
        source = instruction.source(machine.dialect, question.text)
        return machine.run(load(source, folder / f"{question.name}_{count}.py".replace("*", "")), *tensors)

    try:
        if isinstance(question, TorchQuestion):
            words, numbers = question.answer(machine, folder)
        else:
            words, numbers = question.answer(ask)
        found: Json = {"answer": words, "numbers": numbers}
    except Exception as error:  # whatever the compiler or the runtime raises is the answer
        text = str(error).strip()
        found = {"answer": "error", "error": f"{type(error).__name__}: {text[:2000]}"}
    return {"question": question.text, **found, "seconds": round(perf_counter() - began, 3)}


def questions_of(group: str) -> Sequence[Question | TorchQuestion]:
    """The questions of a group."""
    return TORCH_QUESTIONS.get(group) or QUESTIONS["rounding" if group == STOCHASTIC else group]


def answer_here(group: str, machine: Machine) -> Json:
    """The answers to a group, in this process."""
    with TemporaryDirectory() as folder:
        return {q.name: answer(q, machine, Path(folder)) for q in questions_of(group)}


def settings_of(group: str) -> dict[str, str]:
    """What the process of a group runs under, beside SETTINGS."""
    return {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"} if group == STOCHASTIC else {}


def answer_apart(group: str, folder: Path) -> Json:
    """The report of a process that answers one group: a crash costs no other group."""
    out = folder / f"{group}.json"
    command = [sys.executable, __file__, "--only", group, "--here", "--out", str(out)]
    done = subprocess.run(
        command, env={**os.environ, **settings_of(group)}, capture_output=True, text=True, check=False
    )
    if done.returncode == 0:
        report: Json = json.loads(out.read_text())
        return report
    failed = {"answer": "error", "error": f"exit status {done.returncode}", "log": (done.stdout + done.stderr)[-4000:]}
    return {"answers": {group: {q.name: {"question": q.text, **failed} for q in questions_of(group)}}}


def describe(machine: Machine) -> Json:
    """What the answers belong to."""
    from collage_neuron.cli.doctor import packages

    return {
        "evidence": machine.evidence,
        "nki": {"dialect": machine.dialect, "version": machine.version},
        "device": _device_kind(machine),
        "packages": {name: version for name, version, _ in packages()},
        "settings": settings(),
        "host": platform.platform(),
    }


def settings() -> dict[str, str]:
    """The settings that change what is computed. Of compiler options that name a place, the name is left out."""
    return {name: re.sub(r"\S*/\S*", "(a path)", os.environ[name]) for name in TOLD if name in os.environ}


def _device_kind(machine: Machine) -> str:
    if machine.evidence != "device":
        return machine.evidence
    if machine.device.type == torch_neuron.NAME:
        return torch_neuron.generation_name(machine.device)
    import torch_xla.core.xla_model as xm

    return str(xm.xla_device_kind(machine.device))


def plain(x: object) -> object:
    """`x` as JSON can hold it: numbers that are not finite as text."""
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    return str(x) if isinstance(x, float) and not math.isfinite(x) else x


def write(report: Json, path: Path) -> None:
    """Writes `report` to `path`, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(plain(report), indent=1, allow_nan=False) + "\n")
    os.replace(partial, path)


def table(answers: dict[str, Json]) -> str:
    """One line a question."""
    rows = [
        (q["question"], q.get("error", q["answer"]).splitlines()[0])
        for group in answers.values()
        for q in group.values()
    ]
    width = max(len(question) for question, _ in rows)
    return "\n".join(f"{question:<{width}}  {found}" for question, found in rows)


def ask_all(groups: list[str], here: bool) -> Json:
    """The report on `groups`. The process that starts the others opens no device, so that each finds it free."""
    if here:
        machine = find_machine()
        return {**describe(machine), "answers": {group: answer_here(group, machine) for group in groups}}
    report: Json = {}
    with TemporaryDirectory() as folder:
        for group in groups:
            print(f"asking: {group}", flush=True)
            part = answer_apart(group, Path(folder))
            report = {**part, **report, "answers": {**report.get("answers", {}), **part["answers"]}}
    if "evidence" not in report:
        first = next(iter(next(iter(report["answers"].values())).values()))
        raise SystemExit(f"device_probe: no question could be asked, no report is written\n{first['log']}")
    return report


def main(arguments: list[str] | None = None) -> Json:
    """Reads the command line, asks, writes the report and returns it."""
    command = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    command.add_argument("--only", nargs="+", choices=GROUPS, default=GROUPS, metavar="GROUP", help=", ".join(GROUPS))
    command.add_argument("--out", type=Path, default=Path("out/device_probe.json"), help="the report (%(default)s)")
    command.add_argument("--here", action="store_true", help="ask in this process, not in one for each group")
    settings = command.parse_args(arguments)
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    report = ask_all(list(settings.only), settings.here)
    write(report, settings.out)
    print(f"evidence: {report['evidence']}\n{table(report['answers'])}\n{settings.out}")
    return report


if __name__ == "__main__":
    main()
