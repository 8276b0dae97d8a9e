"""Kernels of sums: over tensors and over rows and columns (`numerics.reductions`).

Of tensors and rows, runs of 128 elements are added in a pass over memory, which stores the sums.

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
from itertools import accumulate, chain, repeat
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.numerics.reductions import COLUMN, ENDINGS, LANES, OF_TENSOR, RUN, RUNS, Reduction, groups_in
from collage_neuron.passes.backends.native.jobs import Step
from collage_neuron.passes.backends.native.kernel import Compiled, FlatWriter, slots_of
from collage_neuron.passes.backends.native.llvm_builder import DOUBLE, FLOAT, Code, NotEmitted, Value, loop
from collage_neuron.passes.backends.native.words import load
from collage_neuron.passes.backends.native.writer import PARAMETERS, Kernel, Slot, Values
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
        # Beyond the end terms are computed of zeros and may be NaN: they are replaced, not multiplied by 0.
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
    reads = slots_of(part, False, dtypes)
    written = [Slot(torch.float64, None, i, shared=True) for i in range(len(part.stages[0].reduced))]
    return Kernel.named("runs", RunWriter(part, reads, width).text(), (*reads, *written), RUN, width)


def runs_of(
    compiled: Compiled, launch: Launch, scalars: Tensor, numbers: Sequence[int]
) -> tuple[Step, Tensor, list[int]]:
    """The work for some parameters of a launch: it writes the sums of runs of each result of each parameter.

    Returns it, the tensor of these sums, whole groups of each one after the other, and how many groups each has.
    """
    reads = [[t.contiguous() for t in launch.reads[i]] for i in numbers]
    sizes, results = [row[0].numel() for row in reads], len(launch.update.stages[0].reduced)
    groups = [n for size in sizes for n in repeat(groups_in(size), results)]
    runs = torch.zeros(sum(groups) * RUNS, dtype=torch.float64, device="cpu")  # the rest of a group counts as 0
    places = [runs.data_ptr() + 8 * RUNS * n for n in accumulate(groups, initial=0)]
    rows = [array("q", [*map(Tensor.data_ptr, row), *places[i * results : (i + 1) * results]])
            for i, row in enumerate(reads)]  # fmt: skip
    step = Step(elements=sum(sizes), rows=rows, kept=[reads, scalars, runs])
    found, steps = [row.buffer_info()[0] for row in rows], [-(-size // RUN) for size in sizes]
    step.add_jobs(compiled, found, [scalars[i].data_ptr() for i in numbers], sizes, steps)
    return step, runs, groups


STRIP = 1024
"""Columns whose sums are in a buffer: 8 KiB, which stay in the nearest cache."""


class TileWriter(RunWriter):
    """Writes the kernel of sums over columns, in runs of 64 rows, and over rows in the same pass.

    Its slots are those that are read, of elements and of columns. For vectors of 8, loop in loop::

        strip:                       ; 1024 columns; their sums, doubles in a buffer, are 0
          row_of:                    ; one row of these: its scalars, with its values
            run:                     ; 128 elements of the row
              loop:                  ; 16 elements: those with even numbers, those with odd ones, as doubles
                ...                  ; added to the buffer, and 4 at a time to lanes of the run
              ...                    ; the lanes are folded, and stored
          out:
            ...                      ; the buffer is stored

    A job is 64 rows, or those that are left. Rows are whole steps of the loop, or sums are over columns alone:
    `reductions` then takes the last columns of a row twice, if their number is no multiple of a step.
    """

    columns: int = 0
    """How many of the last slots are of columns."""

    def text(self) -> str:
        """The whole function, and the declarations of what it calls."""
        count = len(self.slots) + len(self.results)
        self.load_addresses(range(count))
        self.host.put(f"%columns = load i64, ptr {self.place(count)}")
        self.host.put(f"%many = load i64, ptr {self.place(count + 1)}")
        self.row = Code(1, self.host.names, self.host.declared)
        self.before = Code(self.width, self.host.names, self.host.declared, self.row.lines)
        for i, node in enumerate(self.placeholders[len(self.update.inputs) :]):
            place = self.row.op("ptr", f"getelementptr float, ptr %own, i64 {i}").text
            self.found[node] = self.row.op(FLOAT, f"load float, ptr {place}")
        parts = self._computed(self.pieces())
        lanes = Code(HALF, self.host.names, self.host.declared, self.loop.lines)
        grown = dict[int, list[Value]]()
        for number, result in enumerate(self.results):
            for part in (0, 1):
                term = self._term(result, parts[part])
                if self.is_of_columns(result):
                    self._add_to_columns(number, part, term)
                else:
                    grown.setdefault(number, []).append(self._added_doubles(lanes, f"%lanes{number}_{part}", term))
        return self.whole([*self._function(grown)])

    @staticmethod
    def is_of_columns(result: fx.Node) -> bool:
        """Returns True for a sum over columns."""
        return bool(result.args[1] == COLUMN)

    def compute_once(self, node: fx.Node, code: Code) -> None:
        """Adds the instructions of a node that is the same for a row."""
        super().compute_once(node, self.row)

    def pieces(self) -> Values:
        """Loads what is read of each element and of each column, and asks for the next row."""
        # A strip goes down the rows, so the same columns of the next row are needed next. Values of columns are read
        # again in each row, and are in the cache.
        first = len(self.slots) - self.columns
        return {
            self.placeholders[slot.read]: load(self.loop, slot.dtype, f"%p{i}", *(("%c", "%c") if i >= first else
                                                                               ("%i", "%far")))
            for i, slot in enumerate(self.slots)
            if slot.read is not None and self.placeholders[slot.read].users
        }  # fmt: skip

    def _term(self, result: fx.Node, values: Values) -> Value:
        """What a result adds up, as doubles."""
        term = self.operand(result.args[0], values)
        # The square of an fp32 number is exact as a double, which has 53 bits for its 48.
        wide = self.loop.cast("fpext", Value(self.loop.text(term, FLOAT), FLOAT), DOUBLE)
        return self.loop.binary("fmul", DOUBLE, wide, wide) if ENDINGS[result.target].is_square else wide

    def _buffered(self, code: Code, number: int, part: int, at: str = "%at") -> str:
        """Where the sums of the columns of a step are: those of even ones, and then those of odd ones."""
        first = code.op("i64", f"add i64 {at}, {part * self.width}").text
        return code.op("ptr", f"getelementptr double, ptr %sums{number}, i64 {first}").text

    def _add_to_columns(self, number: int, part: int, term: Value) -> None:
        place, doubles = self._buffered(self.loop, number, part), self.loop.type_of(DOUBLE)
        before = self.loop.op(DOUBLE, f"load {doubles}, ptr {place}, align 64")
        after = self.loop.binary("fadd", DOUBLE, before, term)
        self.loop.put(f"store {doubles} {after.text}, ptr {place}, align 64")

    def _function(self, grown: dict[int, list[Value]]) -> Iterator[str]:
        of_columns = [n for n, result in enumerate(self.results) if self.is_of_columns(result)]
        strip = [f"  %s_far = add i64 %s, {STRIP}", "  %s_end = call i64 @llvm.smin.i64(i64 %s_far, i64 %last_column)"]
        strip += [f"  call void @llvm.memset.p0.i64(ptr align 64 %sums{number}, i8 0, i64 {8 * STRIP}, i1 false)"
                  for number in of_columns]  # fmt: skip
        strip += [f"  %word_of_strip = sdiv i64 %s, {RUN}", *self._rows(grown)]
        out = ["  %at_o = sub i64 %o, %s", *self._stored_columns(of_columns)]
        strip += loop("out", "summed", ("%o", "%s", 2 * self.width), "%s_end", out, "stored")
        yield f"define void @NAME({PARAMETERS}) #0 {{"
        yield "entry:"
        for number in of_columns:  # on whole lines of the cache: vectors in it are aligned
            yield f"  %sums{number} = alloca [{STRIP} x double], align 64"
        yield from self.host.lines
        yield "  %last_column = call i64 @llvm.smin.i64(i64 %end, i64 %columns)"
        yield f"  %more_of_row = add i64 %columns, {RUN - 1}"
        yield f"  %runs_of_row = sdiv i64 %more_of_row, {RUN}"
        yield from loop("strip", "entry", ("%s", "%begin", STRIP), "%last_column", strip, "done", "stored")
        yield "  ret void"
        yield "}"

    def _rows(self, grown: dict[int, list[Value]]) -> Iterator[str]:
        """The rows of a strip, run by run."""
        turn = [f"  %lanes{number}_{part} = phi <{HALF} x double> [ zeroinitializer, %run ], [ {value.text}, %loop ]"
                for number, pair in grown.items() for part, value in enumerate(pair)]  # fmt: skip
        turn += ["  %i = add i64 %base, %c", "  %far = add i64 %i, %columns", "  %at = sub i64 %c, %s"]
        turn += self.loop.lines
        run = [f"  %run_far = add i64 %first, {RUN}", "  %stop = call i64 @llvm.smin.i64(i64 %run_far, i64 %s_end)"]
        run += loop("loop", "run", ("%c", "%first", 2 * self.width), "%stop", turn, "ran")
        run += self._stored_runs([*chain.from_iterable(grown.values())], [*grown])
        words = [("%w", "i64", "%word_of_row", "add i64 %w, 1")]
        runs = loop("run", "row_of", ("%first", "%s", RUN), "%s_end", run, "next", "ran", words)
        scalars = len(self.placeholders) - len(self.update.inputs)
        of_row = [
            ("%own", "ptr", "%scalars", f"getelementptr float, ptr %own, i64 {scalars}"),
            ("%base", "i64", "0", "add i64 %base, %columns"),
            ("%word_of_row", "i64", "%word_of_strip", "add i64 %word_of_row, %runs_of_row"),
        ]
        return loop("row_of", "strip", ("%r", "0", 1), "%many", [*self.row.lines, *runs], "summed", "next", of_row)

    def _stored_columns(self, numbers: Sequence[int]) -> list[str]:
        code = self.code(self.width)
        # Even and odd columns are apart since a vector of bf16 pairs gives them so; here they are interleaved again.
        lanes = [lane for j in range(self.width) for lane in (j, self.width + j)]
        for number in numbers:
            halves = []
            for part in (0, 1):
                place = self._buffered(code, number, part, "%at_o")
                halves.append(code.op(DOUBLE, f"load {code.type_of(DOUBLE)}, ptr {place}, align 64").text)
            even, odd = halves
            both = code.shuffle(even, odd, DOUBLE, self.width, lanes).text
            place = code.op("ptr", f"getelementptr double, ptr %p{len(self.slots) + number}, i64 %o").text
            # A row of the tensor begins at any double.
            code.put(f"store {code.type_of(DOUBLE, 2)} {both}, ptr {place}, align 8")
        return code.lines


def write_tiles(part: Update, dtypes: Sequence[torch.dtype], columns: int, width: int) -> Kernel:
    """The kernel of a reduction stage for tensors of these dtypes, of which the last `columns` are of columns.

    Raises:
        NotEmitted: there is no code for an operation, an operand or a dtype.
    """
    slots = slots_of(part, False, dtypes)
    writer = TileWriter(part, slots, width)
    writer.columns = columns
    text = writer.text()
    step = 2 * width if all(map(writer.is_of_columns, writer.results)) else RUN
    return Kernel.named("tiles", text, slots, step, width)
