"""Pairwise sums of tensors, in the order of `numerics.tensor_sums`: runs of 128 elements, and groups of 64 runs.

A reduction stage takes one pass over memory, in which the sums of runs are stored; another kernel folds them in groups.

For vectors of 8, and a norm::

    run:
      ...                            ; a run of 128 elements
    loop:
      ...                            ; 16 elements: those with even numbers, those with odd ones
      ...                            ; 4 of the even ones, as doubles, squared, added to lanes 0, 2, 4 and 6
      br i1 %more, label %loop, label %ran
    ran:
      ...                            ; the lanes are folded, and stored as the word that the run shares
      br i1 %runs, label %run, label %done

A lane is added to in the order of the elements, whatever the width of vectors. The driver copies the end of a tensor to
a buffer, and elements beyond its end count as 0.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, repeat
from typing import Any

import torch
from torch import Tensor

from collage_neuron.numerics.matrix_sums import ENDINGS
from collage_neuron.numerics.tensor_sums import LANES, OF_TENSOR, RUN, RUNS, Reduction, groups_in
from collage_neuron.passes.backends.native.jobs import Compiled, Step
from collage_neuron.passes.backends.native.kernel import FlatWriter, slots_of
from collage_neuron.passes.backends.native.llvm_builder import DOUBLE, FLOAT, Code, NotEmitted, Value
from collage_neuron.passes.backends.native.machine import Machine
from collage_neuron.passes.backends.native.memory import is_plain
from collage_neuron.passes.backends.native.writer import PARAMETERS, Kernel, Slot
from collage_neuron.passes.backends.protocol import Launch
from collage_neuron.passes.ir.update import Update

HALF = LANES // 2
"""Lanes of the elements with even numbers, and of those with odd ones."""


_ADDED: Mapping[Any, Reduction] = {**OF_TENSOR, **ENDINGS}


class RunWriter(FlatWriter):
    """Writes the kernel of one reduction stage; its slots are those that are read."""

    def text(self) -> str:
        """The whole function, and the declarations of what it calls."""
        self.head()
        self.load_addresses(range(len(self.slots), len(self.slots) + len(self.results)))
        parts = self._computed(self.pieces())
        valid = [self.valid(part) for part in (0, 1)]
        lanes = Code(HALF, self.host.names, self.host.declared, self.loop.lines)
        grown = [
            self._added(lanes, f"%lanes{number}_{part}", _ADDED[result.target].is_square,
                        self.loop.select(valid[part], self.operand(result.args[0], parts[part]), 0.0, FLOAT))
            for number, result in enumerate(self.results) for part in (0, 1)
        ]  # fmt: skip
        run = ["  %w = phi i64 [ %word, %entry ], [ %next_word, %ran ]", f"  %stop = add i64 %first, {RUN}"]
        ran = [*self._stored_runs(grown, range(len(self.results))), "  %next_word = add i64 %w, 1"]
        return self.whole([*self.looped(run, self._phis(grown), ran)])

    def _added(self, lanes: Code, name: str, is_square: bool, term: Value) -> Value:
        """The lanes called `name` of one half of the elements, with those of this step."""
        return self._added_doubles(lanes, name, self.loop.cast("fpext", term, DOUBLE), is_square)

    def _added_doubles(self, lanes: Code, name: str, wide: Value, is_square: bool = False) -> Value:
        found = Value(name, DOUBLE)
        for first in range(0, self.width, HALF):
            part = lanes.shuffle(wide.text, "poison", DOUBLE, self.width, [*range(first, first + HALF)])
            # A square of 24 bits is exact in double, so it may be rounded or not before it is added.
            if is_square:
                found = lanes.call("fmuladd", DOUBLE, part, part, found)
            else:
                found = lanes.binary("fadd", DOUBLE, found, part)
        return found

    def _phis(self, grown: Sequence[Value]) -> Iterator[str]:
        for at, value in enumerate(grown):
            name = f"%lanes{at // 2}_{at % 2}"
            yield f"  {name} = phi <{HALF} x double> [ zeroinitializer, %run ], [ {value.text}, %loop ]"

    def _stored_runs(self, grown: Sequence[Value], numbers: Sequence[int]) -> list[str]:
        """Folds the lanes of results: those of even numbers are 0, 2, 4, 6, those of odd ones 1, 3, 5, 7."""
        code = self.code(1)
        for i, number in enumerate(numbers):
            even, odd = (x.text for x in grown[2 * i : 2 * i + 2])
            four = _added_halves(code, even, odd, HALF)
            even, odd = (code.shuffle(four, four, DOUBLE, HALF, [j, j + 1]).text for j in (0, 2))
            two = _added_halves(code, even, odd, 2)
            first, second = (code.op(DOUBLE, f"extractelement <2 x double> {two}, i64 {j}") for j in (0, 1))
            place = code.op("ptr", f"getelementptr double, ptr %p{len(self.slots) + number}, i64 %w").text
            code.put(f"store double {code.binary('fadd', DOUBLE, first, second).text}, ptr {place}, align 8")
        return code.lines


def _added_halves(code: Code, x: str, y: str, size: int) -> str:
    """The second half of x added to its first, and behind it that of y."""
    half = size // 2
    first, second = ([*range(at, at + half), *range(size + at, size + at + half)] for at in (0, half))
    low, high = (code.shuffle(x, y, DOUBLE, size, lanes).text for lanes in (first, second))
    return code.op(DOUBLE, f"fadd <{size} x double> {low}, {high}").text


def write_runs(part: Update, dtypes: Sequence[torch.dtype], width: int) -> Kernel:
    """The kernel of a reduction stage for tensors of these dtypes; NotEmitted if there is none."""
    if any(key in part.blocks for key in part.inputs):
        raise NotEmitted("runs of values whose words blocks share")
    reads = slots_of(part, dtypes, (), apart=False)
    (stage,) = part.stages
    written = [Slot(torch.float64, None, i, shared=True) for i in range(len(stage.reduced))]
    return Kernel.named("runs", RunWriter(part, reads, width).text(), (*reads, *written), RUN, width)


def compiled_runs(part: Update, dtypes: Sequence[torch.dtype], machine: Machine) -> Compiled | None:
    """That kernel with its code; None if there is none."""
    try:
        kernel = write_runs(part, dtypes, machine.target.width)
    except NotEmitted:
        return None
    return Compiled.of(kernel, machine)


def are_plain(reads: Sequence[Tensor]) -> bool:
    """Returns True if the numbers of all are those in their memory, and they are of one size."""
    return (
        all(is_plain(type(t)) and t.is_cpu and not t.is_neg() for t in reads) and len({*map(Tensor.numel, reads)}) == 1
    )


def runs_of(
    compiled: Compiled, launch: Launch, scalars: Tensor, numbers: Sequence[int]
) -> tuple[Step, Tensor, list[int]]:
    """The work for some parameters of a launch: it writes the sums of runs of each result of each parameter.

    Returns it, the tensor of these sums, whole groups of each one after the other, and how many groups each has.
    """
    reads = [[t.contiguous() for t in launch.reads[i]] for i in numbers]
    results = len(launch.update.stages[0].reduced)
    groups = [n for row in reads for n in repeat(groups_in(row[0].numel()), results)]
    runs = torch.zeros(sum(groups) * RUNS, dtype=torch.float64, device="cpu")  # the rest of a group counts as 0
    step = _step(compiled, reads, [scalars[i].data_ptr() for i in numbers], runs, groups)
    step.kept.extend([reads, scalars, runs])
    return step, runs, groups


def _step(
    compiled: Compiled, reads: Sequence[Sequence[Tensor]], scalars: Sequence[int], runs: Tensor, groups: Sequence[int]
) -> Step:
    """The work: `scalars` are addresses, and `groups` the number of groups of each result of each parameter."""
    sizes = [row[0].numel() for row in reads]
    places = [runs.data_ptr() + 8 * RUNS * n for n in accumulate(groups, initial=0)]
    results = len(groups) // len(reads)
    found = (places[i : i + results] for i in range(0, len(groups), results))
    rows = [array("q", [*map(Tensor.data_ptr, row), *out]) for row, out in zip(reads, found, strict=True)]
    work = [compiled.unit * -(-size // RUN) for size in sizes]
    before = [*accumulate(work, initial=0)]
    step = Step(work=before[-1], elements=sum(sizes), rows=rows)
    for row, address, size, first, own in zip(rows, scalars, sizes, before, work, strict=False):
        step.jobs.extend([compiled.address, row.buffer_info()[0], address, size, first, own, 0])
    return step


FOLD = "fold_runs"
"""The name of the kernel that folds groups of 64 runs: one vector, halved until it is one number.

Halves of 64 numbers are too short for torch's loops.
"""


def compiled_fold(machine: Machine) -> Compiled:
    """The kernel with its code: it reads fp64 sums of runs, and writes fp64 sums of groups."""
    slots = Slot(torch.float64, 0, None), Slot(torch.float64, None, 0, shared=True)
    return Compiled.of(Kernel(FOLD, _fold_text(), slots, RUNS, machine.target.width), machine)


def fold_of(compiled: Compiled, runs: Tensor, groups: Tensor) -> Step:
    """The work for the sums of runs of whole groups."""
    row = array("q", [runs.data_ptr(), groups.data_ptr()])
    work = compiled.unit * len(groups)
    jobs = array("q", [compiled.address, row.buffer_info()[0], 0, len(runs), 0, work, 0])
    return Step(jobs=jobs, work=work, elements=len(runs), rows=[row], kept=[runs, groups])


def _fold_text() -> str:
    code = Code(1, iter(range(RUNS)), set())
    x = code.op(DOUBLE, f"load <{RUNS} x double>, ptr %at, align 8").text
    half = RUNS
    while half := half // 2:
        low, high = (code.shuffle(x, "poison", DOUBLE, 2 * half, [*range(i, i + half)]).text for i in (0, half))
        x = code.op(DOUBLE, f"fadd <{half} x double> {low}, {high}").text
    lines = "\n".join(code.lines)
    return f"""
define void @{FOLD}({PARAMETERS}) #0 {{
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
