"""What bounds a step on XLA's CPU backend: the loops and copies of its compiled graph, its bytes, its page faults."""

from __future__ import annotations

import math
import multiprocessing
import os
import re
import resource
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from built import build
from contenders import Contender
from worker import warm_up
from workloads import Shape, Workload

ELEMENT_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "f64": 8}
FREE = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element"}
"""Instructions that move nothing."""

_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%(?P<name>\S+) = (?P<shape>\(.*?\)|\S+) (?P<opcode>[\w-]+)\((?P<operands>[^)]*)"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True)
class Instruction:
    """An instruction of the optimised entry computation, and the bytes it reads and writes."""

    opcode: str
    read: int
    written: int


@dataclass(frozen=True)
class Cost:
    """What one step took of the processor."""

    wall: float
    user: float
    kernel: float
    page_faults: int


def profile(strategy: str, arithmetic: str, workload: Workload) -> str:
    """Compiles and runs the step in a process of its own, with XLA writing down what it made of it."""
    contender = Contender(strategy, arithmetic, "xla")
    with TemporaryDirectory() as folder:
        context = multiprocessing.get_context("spawn")  # XLA reads its flags once a process
        ours, theirs = context.Pipe()
        process = context.Process(target=run, args=(theirs, folder, contender, workload.shapes))
        process.start()
        theirs.close()
        try:
            traffic, cost = ours.recv()
        except EOFError:
            raise RuntimeError(f"the process of {contender.name} ended; its error is above") from None
        process.join()
        graph = max(Path(folder).glob("*cpu_after_optimizations.txt"), key=lambda path: path.stat().st_size)
        instructions = list(entry(graph.read_text()))
        buffers = graph.with_name(graph.name.replace(".txt", "-buffer-assignment.txt")).read_text()
    return describe(contender, workload, instructions, temporaries(buffers), traffic, cost)


def run(pipe: Connection, folder: str, contender: Contender, shapes: Sequence[Shape]) -> None:
    os.environ["XLA_FLAGS"] = f"--xla_dump_to={folder} --xla_dump_hlo_as_text {os.environ.get('XLA_FLAGS', '')}"
    built = build(contender, shapes)
    warm_up(built)
    before, start = resource.getrusage(resource.RUSAGE_SELF), perf_counter()
    built.launch()
    built.finish()
    wall, after = perf_counter() - start, resource.getrusage(resource.RUSAGE_SELF)
    user, kernel = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    pipe.send((built.traffic, Cost(wall, user, kernel, after.ru_minflt - before.ru_minflt)))


def entry(text: str) -> Iterator[Instruction]:
    """The instructions of a module's entry computation that move data."""
    sizes: dict[str, int] = {}
    for line in text[text.index("\nENTRY") :].splitlines()[2:]:
        found = _INSTRUCTION.match(line)
        if found is None:
            continue
        sizes[found["name"]] = size_of(found["shape"])
        if found["opcode"] not in FREE:
            operands = re.findall(r"%([^\s,)]+)", found["operands"])
            yield Instruction(found["opcode"], sum(sizes[o] for o in operands), sizes[found["name"]])


def size_of(shape: str) -> int:
    """Bytes of an array or of a tuple's arrays, from HLO text."""
    return sum(
        ELEMENT_BYTES[element] * math.prod(int(d) for d in dims.split(",") if d)
        for element, dims in _ARRAY.findall(shape)
    )


def temporaries(buffer_assignment: str) -> int:
    """Bytes that XLA allocates anew for each run of a graph."""
    return sum(int(n) for n in re.findall(r"^allocation \d+: size (\d+), preallocated-temp", buffer_assignment, re.M))


def describe(
    contender: Contender,
    workload: Workload,
    instructions: Sequence[Instruction],
    temporary: int,
    traffic: int,
    cost: Cost,
) -> str:
    n = workload.parameters
    kinds: Mapping[str, list[Instruction]] = {
        "loops (fusions)": [i for i in instructions if i.opcode in ("call", "fusion")],
        "copies of buffers": [i for i in instructions if i.opcode == "copy"],
        "other": [i for i in instructions if i.opcode not in ("call", "fusion", "copy")],
        "together": list(instructions),
    }
    lines = [f"{contender.name}: what one step does, in bytes a parameter", ""]
    lines += [f"{'':<20}{'number':>8}{'read':>8}{'written':>9}"]
    lines += [
        f"{name:<20}{len(found):>8}{sum(i.read for i in found) / n:>8.1f}{sum(i.written for i in found) / n:>9.1f}"
        for name, found in kinds.items()
    ]
    time = (
        f"{1e3 * cost.wall:.0f} ms; processor time {1e3 * cost.user:.0f} ms in the program and "
        f"{1e3 * cost.kernel:.0f} ms in the kernel, which served {cost.page_faults:,} page faults"
    )
    return "\n".join(
        [
            *lines,
            f"{'needed at least':<20}{'':>8}{traffic / n:>17.1f}  (read and written)",
            f"{'temporaries':<20}{'':>8}{temporary / n:>17.1f}  allocated anew by each step",
            "",
            time,
        ]
    )
