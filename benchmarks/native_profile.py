"""What the machine code of each strategy takes: nanoseconds, bytes and instructions for each element of a parameter.

Kernels run alone on one thread, without the host's part, on tensors that fit the cache: the last column is the time of
copying as many bytes there, which no kernel can beat by much. Instructions are those of the loops, read from LLVM's
assembly::

    python benchmarks/native_profile.py
    python benchmarks/native_profile.py --strategies split433 plus --elements 16384
    python benchmarks/native_profile.py --strategies split423 --assembly    # the instructions, to be read
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, c_int64, c_void_p
from time import perf_counter
from typing import NamedTuple

import torch
from built import parameters

import collage_neuron
from collage_neuron.passes.backends import registry
from collage_neuron.passes.backends.native.backend import Native
from collage_neuron.passes.backends.native.driver import JOB
from collage_neuron.passes.backends.native.jobs import Step, lay_out
from collage_neuron.passes.backends.native.kernel import RUN, write_kernel
from collage_neuron.passes.backends.native.machine import binding
from collage_neuron.passes.backends.native.writer import Kernel
from collage_neuron.passes.backends.protocol import Launch, Measure

CODE = CFUNCTYPE(None, c_void_p, c_void_p, *[c_int64] * 5, c_void_p)
"""The signature of a kernel: see `writer.PARAMETERS`."""


class Profiled(Native):
    """Native code that keeps the launches of the last step."""

    name = "profiled"

    def run(self, launches: Sequence[Launch]) -> Sequence[Measure]:
        self.launches = launches
        return super().run(launches)


class Row(NamedTuple):
    """One strategy: the least over rounds, to which others on the machine only add."""

    bytes: float
    nanoseconds: float
    copy: float
    instructions: float
    compile_seconds: float

    def __str__(self) -> str:
        share = self.nanoseconds / self.copy
        return (
            f"{self.bytes:>7.1f}{self.nanoseconds:>9.3f}{self.copy:>9.3f}{share:>9.2f}"
            f"{self.instructions:>9.2f}{self.compile_seconds:>11.2f}"
        )


def launched(strategy: str, elements: int, monitored: bool) -> tuple[Profiled, Launch]:
    """The third step of AdamW on one matrix, and the backend that ran it."""
    backend = Profiled()
    registry.register(backend)
    try:
        torch.manual_seed(0)
        made = torch.optim.AdamW(parameters([(elements // 1024, 1024)]), lr=1e-3)
        optimizer = collage_neuron.compile(made, strategy=strategy, backend="profiled", validate="off")
        if monitored:
            collage_neuron.monitor(optimizer)
        for _ in range(3):
            optimizer.step()
    finally:
        registry.unregister("profiled")
    return backend, backend.launches[0]


def kernel_of(backend: Profiled, launch: Launch) -> Kernel:
    dtypes = [t.dtype for t in launch.reads[0]]
    return write_kernel(launch.update, False, dtypes, backend.engine.machine.target.width)


def calls(backend: Profiled, step: Step, kernel: Kernel) -> Callable[[], None]:
    """A call of the kernel for all elements."""
    job = dict(zip(JOB, step.jobs, strict=True))
    code = CODE(backend.engine.machine.address(kernel))
    measures = torch.zeros(max(1, step.measures), kernel.width, dtype=torch.float64)
    given = job["row"], job["scalars"], 0, step.elements, 0, step.elements, 0, measures.data_ptr()

    def call(alive: torch.Tensor = measures) -> None:
        code(*given)

    return call


def instructions(assembly: str, kernel: Kernel) -> float:
    """Instructions for an element: of inner loops, of two vectors a step, and of the loop over blocks or runs."""
    lines = [line for line in assembly.splitlines() if re.match(r"\.LBB\w+:|\t[a-z]", line)]
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith(".L")}
    jumps = [(labels[to], i) for i, line in enumerate(lines) for to in re.findall(r"\tj\w+\t(\.LBB\w+)", line)]
    loops = [(first, last) for first, last in jumps if first <= last]
    inner = [a for a in loops if not any(a != b and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    inside = 2 * kernel.width
    around, found = kernel.step if kernel.step > inside else inside * RUN, 0.0
    for i, line in enumerate(lines):
        if line.startswith("\t") and any(first <= i <= last for first, last in loops):
            is_inner = any(first <= i <= last for first, last in inner)
            found += 1 / (inside if is_inner else around)
    return found


def seconds(call: Callable[[], object], times: int) -> float:
    start = perf_counter()
    for _ in range(times):
        call()
    return (perf_counter() - start) / times


def profile(strategy: str, elements: int, rounds: int, monitored: bool) -> Row:
    backend, launch = launched(strategy, elements, monitored)
    kernel = kernel_of(backend, launch)
    step = lay_out([launch], backend.engine.kernels)
    assert step is not None
    tensors = launch.reads[0]
    written = sum(t.nbytes for t, slot in zip(tensors, kernel.slots, strict=True) if slot.written is not None)
    moved = sum(t.nbytes for t in tensors) + written
    source = torch.zeros(moved // 2, dtype=torch.uint8)
    target = torch.empty_like(source)
    call, copy = calls(backend, step, kernel), lambda: target.copy_(source)
    times = max(1, (1 << 21) // elements)
    laps = [(seconds(call, times), seconds(copy, times)) for _ in range(rounds)]
    own, copied = (1e9 * min(column) / elements for column in zip(*laps, strict=True))
    fresh = Profiled().engine
    start = perf_counter()
    fresh.machine.address(kernel)
    compiling = perf_counter() - start
    text = fresh.machine.target.assembly(binding(), kernel.text)
    return Row(moved / elements, own, copied, instructions(text, kernel), compiling)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = list(collage_neuron.STRATEGIES)
    parser.add_argument("--strategies", nargs="+", choices=known, default=known)
    parser.add_argument("--elements", type=int, default=1 << 14, help="a multiple of 1024 (default 2**14)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--monitored", action="store_true", help="with the sums and counts of a monitor")
    parser.add_argument("--assembly", action="store_true", help="print the instructions instead")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> None:
    given = options(argv)
    torch.set_num_threads(1)
    print(f"{'strategy':<20}{'bytes':>7}{'ns':>9}{'copy ns':>9}{'x copy':>9}{'instr.':>9}{'compile s':>11}")
    for strategy in given.strategies:
        if given.assembly:
            backend, launch = launched(strategy, given.elements, given.monitored)
            print(backend.engine.machine.target.assembly(binding(), kernel_of(backend, launch).text))
        else:
            print(f"{strategy:<20}{profile(strategy, given.elements, given.rounds, given.monitored)}", flush=True)


if __name__ == "__main__":
    main()
