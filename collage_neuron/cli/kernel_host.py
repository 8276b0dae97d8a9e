"""What a step's kernel costs the host before any compiler: seconds and memory to choose, write and trace it."""

from __future__ import annotations

import math
import resource
import sys
from collections.abc import Callable
from time import perf_counter
from typing import NamedTuple

import torch

from collage_neuron import torch_privates
from collage_neuron.cli.kernel_sizes import Shapes
from collage_neuron.passes.backends.nki.calls import program_of
from collage_neuron.passes.backends.nki.custom_op import update_tensors
from collage_neuron.passes.backends.nki.lower import Kernel
from collage_neuron.passes.backends.nki.target import Machine
from collage_neuron.passes.ir.update import Update


class Host(NamedTuple):
    """Seconds, and what the memory of the process grew by at its peak, MiB."""

    choose: float
    """To choose instructions and engines: once for an update."""
    write: float
    """To write the text of the kernel of all tensors, to check it, and to compile it as Python."""
    trace: float
    """To put its call into a graph, with tensors that have no memory."""
    peak: float


def host_of(update: Update, lower: Callable[[Update], Kernel], shapes: Shapes) -> Host:
    """What the kernel of a step on parameters of these shapes takes; the second kernel of a process finds caches."""
    before, began = _peak(), perf_counter()
    kernel = lower(update)
    chosen = perf_counter()
    machine = Machine(kernel.target, kernel.dialect)
    key = program_of(machine, tuple((kernel, 0, math.prod(s), kernel.cut(s)) for s in shapes))
    written = perf_counter()
    _trace(kernel, shapes, key)
    done = perf_counter()
    return Host(chosen - began, written - chosen, done - written, _peak() - before)


def _trace(kernel: Kernel, shapes: Shapes, key: str) -> None:
    with torch_privates.fake_tensors():
        tensors = [
            torch.empty(s, dtype=getattr(torch, a.dtype), device="cpu") for s in shapes for a in kernel.arguments
        ]
        update_tensors(tensors, [torch.empty(128, len(kernel.columns), dtype=torch.float32, device="cpu")], key)


def _peak() -> float:
    """The largest memory of this process so far, MiB; Linux counts in KiB, macOS in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << (20 if sys.platform == "darwin" else 10))


TITLES = ("kernel", "target", "dialect", "tensors", "choose s", "write s", "trace s", "peak MiB")


def row(name: str, machine: Machine, tensors: int, host: Host) -> tuple[str, ...]:
    """A row of the table."""
    seconds = (f"{x:.2f}" for x in (host.choose, host.write, host.trace))
    return (name, machine.target, machine.dialect, str(tensors), *seconds, f"{host.peak:.0f}")


HEAD = """\
The host, on one core's share, before any compiler of Neuron: seconds to choose the instructions of the update, to write
the kernel of all tensors, and to put its call into a graph; and what the process's largest memory grew by. Times are of
this machine, under its load.
"""
