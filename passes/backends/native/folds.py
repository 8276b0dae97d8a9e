"""The kernel that folds the sums of runs in groups of 64 (`numerics.tensor_sums`): one vector, halved until it is one.

Halves of 64 numbers are too short for torch's loops.
"""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from collage_neuron.numerics.tensor_sums import RUNS
from collage_neuron.passes.backends.native.code import DOUBLE, Code
from collage_neuron.passes.backends.native.jobs import Compiled, Step
from collage_neuron.passes.backends.native.machine import Machine
from collage_neuron.passes.backends.native.writer import PARAMETERS, Kernel, Slot

NAME = "fold_runs"


def compiled_fold(machine: Machine) -> Compiled:
    """The kernel with its code: it reads fp64 sums of runs, and writes fp64 sums of groups."""
    slots = Slot(torch.float64, 0, None), Slot(torch.float64, None, 0, shared=True)
    return Compiled.of(Kernel(NAME, _text(), slots, RUNS, machine.target.width), machine)


def fold_of(compiled: Compiled, runs: Tensor, groups: Tensor) -> Step:
    """The work for the sums of runs of whole groups."""
    row = array("q", [runs.data_ptr(), groups.data_ptr()])
    work = compiled.unit * len(groups)
    jobs = array("q", [compiled.address, row.buffer_info()[0], 0, len(runs), 0, work, 0])
    return Step(jobs=jobs, work=work, elements=len(runs), rows=[row], kept=[runs, groups])


def _text() -> str:
    code = Code(1, iter(range(RUNS)), set())
    x = code.op(DOUBLE, f"load <{RUNS} x double>, ptr %at, align 8").text
    half = RUNS
    while half := half // 2:
        low, high = (code.shuffle(x, "poison", DOUBLE, 2 * half, [*range(i, i + half)]).text for i in (0, half))
        x = code.op(DOUBLE, f"fadd <{half} x double> {low}, {high}").text
    lines = "\n".join(code.lines)
    return f"""
define void @{NAME}({PARAMETERS}) #0 {{
entry:
  %runs = load ptr, ptr %row
  %groups_at = getelementptr ptr, ptr %row, i64 1
  %groups = load ptr, ptr %groups_at
  br label %loop
loop:
  %i = phi i64 [ %begin, %entry ], [ %next, %loop ]
  %w = phi i64 [ %word, %entry ], [ %next_word, %loop ]
  %at = getelementptr double, ptr %runs, i64 %i
{lines}
  %sum = extractelement <1 x double> {x}, i64 0
  %to = getelementptr double, ptr %groups, i64 %w
  store double %sum, ptr %to, align 8
  %next = add i64 %i, {RUNS}
  %next_word = add i64 %w, 1
  %more = icmp slt i64 %next, %end
  br i1 %more, label %loop, label %done
done:
  ret void
}}
"""
