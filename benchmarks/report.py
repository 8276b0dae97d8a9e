"""The numbers of a run as a table and as JSON."""

from __future__ import annotations

import json
import os
import platform
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median, quantiles
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from contenders import COPY, FUSED, Contender
from worker import Lap, Ready
from workloads import Workload

from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE


@dataclass(frozen=True)
class Spread:
    """Median and quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        low, _, high = quantiles(values, n=4, method="inclusive")
        return cls(median(values), low, high)

    def __str__(self) -> str:
        spread = f" ({self.low:.2f}-{self.high:.2f})" if self.low < self.high else ""
        return f"{self.median:.2f}{spread}"


@dataclass(frozen=True)
class Row:
    """One contender's line."""

    name: str
    kept: float
    """Bytes a parameter, kept between steps."""
    transient: float | None
    """Bytes a parameter, beside them at the peak of a step."""
    traffic: float
    """Bytes a parameter that a step must move."""
    rounds: int
    milliseconds: Spread
    to_fused: Spread | None
    """Time against torch's fused fp32 AdamW, in the same round."""
    kernel: Spread | None
    """The same, of the backend's part alone."""
    bound: float | None
    """Milliseconds of the bytes that it moves, at the speed of the copy: no step can be faster."""
    to_copy: Spread | None
    """Time against copying as many bytes as the contender must move, in the same round."""
    host: Spread
    """Milliseconds until `step()` returned, without the backend's part on the CPU."""
    compile_seconds: float
    compilations: int


Laps = Mapping[Contender, Sequence[Sequence[Lap]]]
"""The steps of each contender, by process."""


def rows(workload: Workload, laps: Laps, ready: Mapping[Contender, Ready]) -> list[Row]:
    return [_row(c, workload, laps, ready) for c in laps]


def _row(c: Contender, workload: Workload, laps: Laps, ready: Mapping[Contender, Ready]) -> Row:
    own, n = ready[c], workload.parameters
    by_bytes = own.traffic / ready[COPY].traffic if COPY in ready else 1.0
    fused, copies = laps.get(FUSED["fp32"]), laps.get(COPY)
    every = [lap for process in laps[c] for lap in process]
    return Row(
        name=c.name,
        kept=own.kept / n,
        transient=None if own.transient is None else own.transient / n,
        traffic=own.traffic / n,
        rounds=len(every),
        milliseconds=Spread.of([1e3 * lap.total for lap in every]),
        to_fused=_ratio(laps[c], fused, 1.0, lambda lap: lap.total),
        kernel=None if every[0].kernel is None else _ratio(laps[c], fused, 1.0, lambda lap: lap.kernel or 0.0),
        bound=None if copies is None else 1e3 * by_bytes * median(lap.total for process in copies for lap in process),
        to_copy=_ratio(laps[c], copies, by_bytes, lambda lap: lap.total),
        host=Spread.of([1e3 * lap.host for lap in every]),
        compile_seconds=own.compile_seconds,
        compilations=own.compilations,
    )


def _ratio(
    laps: Sequence[Sequence[Lap]], others: Sequence[Sequence[Lap]] | None, factor: float, time: Callable[[Lap], float]
) -> Spread | None:
    """Round by round: what disturbs a round disturbs both. A slow contender took part in the first rounds only."""
    if others is None:
        return None
    pairs = [pair for own, other in zip(laps, others, strict=True) for pair in zip(own, other, strict=False)]
    return Spread.of([time(lap) / (factor * other.total) for lap, other in pairs])


COLUMNS = (
    ("contender", lambda r: r.name),
    ("kept", lambda r: f"{r.kept:.0f}"),
    ("+ peak", lambda r: "?" if r.transient is None else f"{r.transient:.1f}"),
    ("moves", lambda r: f"{r.traffic:.0f}"),
    ("rounds", lambda r: str(r.rounds)),
    ("ms", lambda r: f"{r.milliseconds.median:.1f}"),
    ("bound", lambda r: "" if r.bound is None else f"{r.bound:.1f}"),
    ("x fused fp32", lambda r: str(r.to_fused or "")),
    ("kernel", lambda r: "" if r.kernel is None else f"{r.kernel.median:.2f}"),
    ("x copy", lambda r: str(r.to_copy or "")),
    ("host ms", lambda r: f"{r.host.median:.1f}"),
    ("compile s", lambda r: f"{r.compile_seconds:.1f} ({r.compilations})" if r.compilations else ""),
)

LEGEND = """\
kept          bytes a parameter of parameter, gradient and states
+ peak        bytes a parameter beside them at the peak of a step: rise of the resident memory (VmHWM), by itself
moves         bytes a parameter that a step must read and write at least, each stored component and the gradient once
rounds        steps timed, of all processes; a slow contender sits out after the first ones (--patience)
ms            median of a step; on XLA step(), torch_xla.sync() and waiting for the device
bound         ms that a plain copy takes to move as many bytes
x fused fp32  time over that of torch.optim.AdamW(fused=True) in fp32 in the same round; median (quartiles)
kernel        the same of the backend's part alone
x copy        time over that of a plain copy that moves as many bytes, in the same round; median (quartiles)
host ms       the rest of the step: planning; on XLA until step() returned, tracing included
compile s     native: the first call of the backend; XLA: all graphs of the process (how many), the probe's included
Validation is off: validation_cost.py times it."""


def table(found: Sequence[Row]) -> str:
    cells = [[title for title, _ in COLUMNS]] + [[show(r) for _, show in COLUMNS] for r in found]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    )


def machine() -> dict[str, Any]:
    return {
        "processor": _processor(),
        "vectors": vectors(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": [round(x, 2) for x in os.getloadavg()],
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def vectors() -> str:
    """The widest of native code: an update takes twice as many instructions with half of that."""
    return "" if NATIVE.missing() else f"{32 * NATIVE.engine.machine.target.width} bits"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def settings_of(given: Namespace) -> dict[str, str]:
    """The options of a run, as they are stored with it; not where it is stored, which is a path of a machine."""
    return {name: str(value) for name, value in vars(given).items() if name != "json"}


def content(settings: Mapping[str, Any], results: Mapping[tuple[Workload, int], Sequence[Row]]) -> dict[str, Any]:
    """What is stored of a run: rows by workload and number of threads."""
    found = [
        {"workload": str(w), "parameters": w.parameters, "tensors": len(w.shapes), "threads": threads}
        | {"rows": [asdict(r) for r in own]}
        for (w, threads), own in results.items()
    ]
    return {"machine": machine(), "settings": dict(settings), "results": found}


def save(path: Path, what: Mapping[str, Any]) -> None:
    """Writes a file that is there whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile("w", dir=path.absolute().parent, prefix=path.name, delete=False) as f:
        f.write(json.dumps(what, indent=1) + "\n")
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)
