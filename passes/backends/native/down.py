"""Kernels of sums over columns: those of runs of 64 rows, in the order of `numerics.matrix_sums`, in one pass.

For vectors of 8::

    run:
      %first = phi i64 ...           ; the first of 16 columns, and what is read of columns
    loop:
      %i = phi i64 ...               ; these columns in the first row of the run, in the second, ...
      %own = phi ptr ...             ; the scalars of the row, with its values
      ...                            ; 16 elements: those with even numbers, those with odd ones, added as doubles
      br i1 %more, label %loop, label %ran
    ran:
      ...                            ; the sums are stored
      br i1 %runs, label %run, label %done

A job is one run of rows. The driver gets whole steps of columns only: `jobs` takes the last columns of a row twice, if
their number is no multiple of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from collage_neuron.numerics.matrix_sums import ENDINGS
from collage_neuron.passes.backends.native.code import DOUBLE, FLOAT, Code, Value
from collage_neuron.passes.backends.native.kernel import FlatWriter, slots_of
from collage_neuron.passes.backends.native.words import load
from collage_neuron.passes.backends.native.writer import PARAMETERS, Kernel, Values
from collage_neuron.passes.ir.update import Update


class DownWriter(FlatWriter):
    """Writes the kernel of one reduction stage; its slots are those that are read, of elements and of columns."""

    columns: int = 0
    """How many of the last slots are of columns."""

    def text(self) -> str:
        """The whole function, and the declarations of what it calls."""
        count = len(self.slots)
        for i in range(count + len(self.results)):
            self.host.put(f"%p{i} = load ptr, ptr {self._place(i)}")
        self.host.put(f"%stride = load i64, ptr {self._place(count + len(self.results))}")
        self.host.put(f"%many = load i64, ptr {self._place(count + len(self.results) + 1)}")
        self.once = self.code(self.width)
        parts = self._computed(self.pieces())
        grown = [
            self._added(f"%lanes{number}_{part}", ENDINGS[result.target].is_square,
                        self.operand(result.args[0], parts[part]))
            for number, result in enumerate(self.results) for part in (0, 1)
        ]  # fmt: skip
        return self.whole([*self._function(grown)])

    def _place(self, number: int) -> str:
        return self.host.op("ptr", f"getelementptr ptr, ptr %row, i64 {number}").text

    def pieces(self) -> Values:
        """Loads what is read of each element in the loop, and what is read of columns before it."""
        first = len(self.slots) - self.columns
        return {
            self.placeholders[slot.read]: load(*((self.once, slot.dtype, f"%p{i}", "%first") if i >= first else
                                                 (self.loop, slot.dtype, f"%p{i}", "%i")))
            for i, slot in enumerate(self.slots)
            if slot.read is not None and self.placeholders[slot.read].users
        }  # fmt: skip

    def split(self, pieces: Values, part: int) -> Values:
        """The inputs of the elements with even (0) or odd numbers (1), and the scalars of the row."""
        values = super().split(pieces, part)
        for i, node in enumerate(self.placeholders[len(self.update.inputs) :]):
            place = self.loop.op("ptr", f"getelementptr float, ptr %own, i64 {i}").text
            values[node] = self.loop.spread(self.loop.op(FLOAT, f"load float, ptr {place}"))
        return values

    def _added(self, name: str, is_square: bool, term: Value) -> Value:
        wide = self.loop.cast("fpext", Value(self.loop.text(term, FLOAT), FLOAT), DOUBLE)
        wide = self.loop.binary("fmul", DOUBLE, wide, wide) if is_square else wide
        return self.loop.binary("fadd", DOUBLE, Value(name, DOUBLE), wide)

    def _function(self, grown: Sequence[Value]) -> Iterator[str]:
        scalars = len(self.placeholders) - len(self.update.inputs)
        yield f"define void @NAME({PARAMETERS}) #0 {{"
        yield "entry:"
        yield from self.host.lines
        yield "  br label %run"
        yield "run:"
        yield "  %first = phi i64 [ %begin, %entry ], [ %next_first, %ran ]"
        yield from self.once.lines
        yield "  br label %loop"
        yield "loop:"
        yield "  %i = phi i64 [ %first, %run ], [ %next, %loop ]"
        yield "  %done_rows = phi i64 [ 0, %run ], [ %next_rows, %loop ]"
        yield "  %own = phi ptr [ %scalars, %run ], [ %next_own, %loop ]"
        for at, value in enumerate(grown):
            doubles = self.loop.type_of(DOUBLE)
            yield f"  %lanes{at // 2}_{at % 2} = phi {doubles} [ zeroinitializer, %run ], [ {value.text}, %loop ]"
        yield from self.loop.lines
        yield "  %next = add i64 %i, %stride"
        yield "  %next_rows = add i64 %done_rows, 1"
        yield f"  %next_own = getelementptr float, ptr %own, i64 {scalars}"
        yield "  %more = icmp slt i64 %next_rows, %many"
        yield "  br i1 %more, label %loop, label %ran"
        yield "ran:"
        yield from self._stored(grown)
        yield f"  %next_first = add i64 %first, {2 * self.width}"
        yield "  %runs = icmp slt i64 %next_first, %end"
        yield "  br i1 %runs, label %run, label %done"
        yield "done:"
        yield "  ret void"
        yield "}"

    def _stored(self, grown: Sequence[Value]) -> list[str]:  # type: ignore[override]
        code: Code = self.code(self.width)
        lanes = [lane for j in range(self.width) for lane in (j, self.width + j)]
        for number in range(len(self.results)):
            even, odd = grown[2 * number : 2 * number + 2]
            both = code.shuffle(even.text, odd.text, DOUBLE, self.width, lanes).text
            place = code.op("ptr", f"getelementptr double, ptr %p{len(self.slots) + number}, i64 %first").text
            code.put(f"store {code.type_of(DOUBLE, 2)} {both}, ptr {place}, align 8")
        return code.lines


def write_down(part: Update, dtypes: Sequence[torch.dtype], columns: int, width: int) -> Kernel:
    """The kernel of a reduction stage for tensors of these dtypes, of which the last `columns` are of columns.

    Raises:
        NotEmitted: there is no code for an operation, an operand or a dtype.
    """
    slots = slots_of(part, dtypes, (), apart=False)
    writer = DownWriter(part, slots, width)
    writer.columns = columns
    return Kernel.named("down", writer.text(), slots, 2 * width, width)
