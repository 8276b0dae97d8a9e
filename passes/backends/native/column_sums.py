"""Kernels of sums over columns, and over rows in the same pass: those of runs of 64 rows, and those of `pairwise_sum`.

Sums over columns are in the order of `numerics.matrix_sums`.

For vectors of 8::

    strip:
      ...                            ; 1024 columns; their sums, doubles in a buffer, are 0
    row_of:
      ...                            ; one row of these: its scalars, with its values
    run:
      ...                            ; 128 elements of the row
    loop:
      ...                            ; 16 elements: those with even numbers, those with odd ones, as doubles
      ...                            ; added to the buffer, and 4 at a time to lanes of the run
      br i1 %more, label %loop, label %ran
    ran:
      ...                            ; the lanes are folded, and stored
      br i1 %more_runs, label %run, label %next
    next:
      br i1 %more_rows, label %row_of, label %out
    out:
      ...                            ; the buffer is stored
      br i1 %more_strips, label %strip, label %done

A job is 64 rows, or those that are left. Rows are whole steps of the loop, or sums are over columns alone:
`reductions` then takes the last columns of a row twice, if their number is no multiple of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain

import torch
import torch.fx as fx

from collage_neuron.numerics.matrix_sums import COLUMN, ENDINGS
from collage_neuron.numerics.tensor_sums import RUN
from collage_neuron.passes.backends.native.kernel import slots_of
from collage_neuron.passes.backends.native.llvm_builder import DOUBLE, FLOAT, Code, Value
from collage_neuron.passes.backends.native.pairwise_sum import HALF, RunWriter
from collage_neuron.passes.backends.native.words import load
from collage_neuron.passes.backends.native.writer import PARAMETERS, Kernel, Values
from collage_neuron.passes.ir.update import Update

STRIP = 1024
"""Columns whose sums are in a buffer: 8 KiB, which stay in the nearest cache."""


class TileWriter(RunWriter):
    """Writes the kernel of one reduction stage; its slots are those that are read, of elements and of columns."""

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

    def _buffered(self, code: Code, number: int, part: int) -> str:
        """Where the sums of the columns of a step are: those of even ones, and then those of odd ones."""
        first = code.op("i64", f"add i64 %at, {part * self.width}").text
        return code.op("ptr", f"getelementptr double, ptr %sums{number}, i64 {first}").text

    def _add_to_columns(self, number: int, part: int, term: Value) -> None:
        place, doubles = self._buffered(self.loop, number, part), self.loop.type_of(DOUBLE)
        before = self.loop.op(DOUBLE, f"load {doubles}, ptr {place}, align 64")
        after = self.loop.binary("fadd", DOUBLE, before, term)
        self.loop.put(f"store {doubles} {after.text}, ptr {place}, align 64")

    def _function(self, grown: dict[int, list[Value]]) -> Iterator[str]:
        self.loop.declared |= {
            "declare i64 @llvm.smin.i64(i64, i64)",
            "declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)",
        }
        of_columns = [n for n, result in enumerate(self.results) if self.is_of_columns(result)]
        yield from self._begun(of_columns)
        yield from self._row_of_runs(grown)
        yield from self._ended(of_columns)

    def _begun(self, of_columns: Sequence[int]) -> Iterator[str]:
        """Up to the beginning of a row."""
        yield f"define void @NAME({PARAMETERS}) #0 {{"
        yield "entry:"
        for number in of_columns:  # on whole lines of the cache: vectors in it are aligned
            yield f"  %sums{number} = alloca [{STRIP} x double], align 64"
        yield from self.host.lines
        yield "  %limit_of_columns = call i64 @llvm.smin.i64(i64 %end, i64 %columns)"
        yield f"  %more_of_row = add i64 %columns, {RUN - 1}"
        yield f"  %runs_of_row = sdiv i64 %more_of_row, {RUN}"
        yield "  br label %strip"
        yield "strip:"
        yield "  %s = phi i64 [ %begin, %entry ], [ %next_s, %stored ]"
        yield f"  %s_far = add i64 %s, {STRIP}"
        yield "  %s_end = call i64 @llvm.smin.i64(i64 %s_far, i64 %limit_of_columns)"
        for number in of_columns:
            yield f"  call void @llvm.memset.p0.i64(ptr align 64 %sums{number}, i8 0, i64 {8 * STRIP}, i1 false)"
        yield f"  %word_of_strip = sdiv i64 %s, {RUN}"
        yield "  br label %row_of"
        yield "row_of:"
        yield "  %r = phi i64 [ 0, %strip ], [ %next_r, %next ]"
        yield "  %own = phi ptr [ %scalars, %strip ], [ %next_own, %next ]"
        yield "  %base = phi i64 [ 0, %strip ], [ %next_base, %next ]"
        yield "  %word_of_row = phi i64 [ %word_of_strip, %strip ], [ %next_word_of_row, %next ]"

    def _row_of_runs(self, grown: dict[int, list[Value]]) -> Iterator[str]:
        """The runs of one row of a strip."""
        yield from self.row.lines
        yield "  br label %run"
        yield "run:"
        yield "  %first = phi i64 [ %s, %row_of ], [ %next_first, %ran ]"
        yield "  %w = phi i64 [ %word_of_row, %row_of ], [ %next_w, %ran ]"
        yield f"  %run_far = add i64 %first, {RUN}"
        yield "  %stop = call i64 @llvm.smin.i64(i64 %run_far, i64 %s_end)"
        yield "  br label %loop"
        yield "loop:"
        yield "  %c = phi i64 [ %first, %run ], [ %next_c, %loop ]"
        for number, value in ((n, pair) for n, pair in grown.items()):
            for part in (0, 1):
                yield (
                    f"  %lanes{number}_{part} = phi <{HALF} x double> [ zeroinitializer, %run ], "
                    f"[ {value[part].text}, %loop ]"
                )
        yield "  %i = add i64 %base, %c"
        yield "  %far = add i64 %i, %columns"
        yield "  %at = sub i64 %c, %s"
        yield from self.loop.lines
        yield f"  %next_c = add i64 %c, {2 * self.width}"
        yield "  %more = icmp slt i64 %next_c, %stop"
        yield "  br i1 %more, label %loop, label %ran"
        yield "ran:"
        yield from self._stored_runs([*chain.from_iterable(grown.values())], [*grown])
        yield f"  %next_first = add i64 %first, {RUN}"
        yield "  %next_w = add i64 %w, 1"
        yield "  %more_runs = icmp slt i64 %next_first, %s_end"
        yield "  br i1 %more_runs, label %run, label %next"

    def _ended(self, of_columns: Sequence[int]) -> Iterator[str]:
        """The next row, or what is done after the last one."""
        scalars = len(self.placeholders) - len(self.update.inputs)
        yield "next:"
        yield "  %next_r = add i64 %r, 1"
        yield f"  %next_own = getelementptr float, ptr %own, i64 {scalars}"
        yield "  %next_base = add i64 %base, %columns"
        yield "  %next_word_of_row = add i64 %word_of_row, %runs_of_row"
        yield "  %more_rows = icmp slt i64 %next_r, %many"
        yield "  br i1 %more_rows, label %row_of, label %out"
        yield "out:"
        yield "  %o = phi i64 [ %s, %next ], [ %next_o, %out ]"
        yield "  %at_o = sub i64 %o, %s"
        yield from self._stored_columns(of_columns)
        yield f"  %next_o = add i64 %o, {2 * self.width}"
        yield "  %more_out = icmp slt i64 %next_o, %s_end"
        yield "  br i1 %more_out, label %out, label %stored"
        yield "stored:"
        yield f"  %next_s = add i64 %s, {STRIP}"
        yield "  %more_strips = icmp slt i64 %next_s, %limit_of_columns"
        yield "  br i1 %more_strips, label %strip, label %done"
        yield "done:"
        yield "  ret void"
        yield "}"

    def _stored_columns(self, numbers: Sequence[int]) -> list[str]:
        code = self.code(self.width)
        # Even and odd columns are apart since a vector of bf16 pairs gives them so; here they are interleaved again.
        lanes = [lane for j in range(self.width) for lane in (j, self.width + j)]
        for number in numbers:
            halves = []
            for part in (0, 1):
                first = code.op("i64", f"add i64 %at_o, {part * self.width}").text
                place = code.op("ptr", f"getelementptr double, ptr %sums{number}, i64 {first}").text
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
    slots = slots_of(part, dtypes, (), apart=False)
    writer = TileWriter(part, slots, width)
    writer.columns = columns
    text = writer.text()
    step = 2 * width if all(map(writer.is_of_columns, writer.results)) else RUN
    return Kernel.named("tiles", text, slots, step, width)
