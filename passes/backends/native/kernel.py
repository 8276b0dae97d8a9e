"""An update as one function of LLVM's assembly: a loop over the elements, which loads, computes, and stores in place.

Given an update with `param = param - c0 * grad` on bf16, and vectors of 16::

    define void @update_...(ptr %row, ptr %scalars, i64 %begin, i64 %end, ..., ptr %measures) {
      ...                            ; pointers and host scalars, and what depends on those alone: once
    loop:
      %i = phi i64 [ %begin, %entry ], [ %next, %loop ]
      ...                            ; 32 elements: those with even numbers, those with odd ones
      %next = add i64 %i, 32
      %more = icmp slt i64 %next, %end
      br i1 %more, label %loop, label %done

With measurements there is a loop around this one. Sums are added in fp32 for a few steps (`RUN`), and these runs in
double: conversions of all terms would take longer than the rest of the update. So a sum is within 2**-20 of the sum of
its terms' magnitudes (with blocks, and vectors of 4, 2**-19). Counts are exact.

The driver calls it with whole steps of the loop only. What is left at the end of a tensor it copies to a buffer first.
Updates in which blocks of elements share words have loops of their own: see `blocks`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from collage_neuron.numerics.matrix_sums import ENDINGS
from collage_neuron.numerics.reductions import REDUCTIONS
from collage_neuron.numerics.tensor_sums import OF_TENSOR
from collage_neuron.passes.backends.native.blocks import BlockWriter, size_of_blocks
from collage_neuron.passes.backends.native.llvm_builder import Value
from collage_neuron.passes.backends.native.software_pipelining import ahead_of
from collage_neuron.passes.backends.native.writer import PARAMETERS, Kernel, Slot, Values, Writer
from collage_neuron.passes.ir.update import Update


def slots_of(update: Update, reads: Sequence[torch.dtype], writes: Sequence[torch.dtype], apart: bool) -> list[Slot]:
    """The tensors of an update; one that is read and written is one slot, unless they are `apart`."""
    place = {key: i for i, key in enumerate(update.outputs)}
    inputs = [
        Slot(d, i, None if apart else place.get(key), key in update.blocks)
        for i, (key, d) in enumerate(zip(update.inputs, reads, strict=True))
    ]
    known = {slot.written for slot in inputs}
    more = [j for j in range(len(writes)) if j not in known]
    return inputs + [Slot(writes[j], None, j, update.outputs[j] in update.blocks) for j in more]


def write_kernel(update: Update, slots: Sequence[Slot], width: int) -> Kernel:
    """The kernel of `update` for vectors of `width` fp32 numbers.

    Raises:
        NotEmitted: there is no code for an operation, an operand or a dtype.
    """
    block = size_of_blocks(update)
    text = BlockWriter(update, slots, width, block=block).text() if block else FlatWriter(update, slots, width).text()
    return Kernel.named("update", text, slots, block or 2 * width, width)


REDUCED = REDUCTIONS | frozenset(OF_TENSOR) | frozenset(ENDINGS)
"""Operations whose results are no values of elements."""

RUN = 8
"""Steps whose sums are added in fp32: 16 terms in a lane, so at most 15 roundings of 2**-24 each."""


class FlatWriter(Writer):
    """Writes a kernel whose elements are independent of one another: one loop."""

    def text(self) -> str:
        """The whole function, and the declarations of what it calls."""
        self.head()
        pieces = self.pieces()
        parts = self._computed(pieces)
        for number, slot in enumerate(self.slots):
            if slot.written is not None:
                self.store(number, parts)
        valid = [self.valid(part) for part in (0, 1)] if self.measures else []
        sums = [self.grown(number, parts, valid) for number in range(len(self.measures))]
        phis = [self.phi(number, grown, "run", "loop") for number, grown in enumerate(sums)]
        return self.whole([*self.looped(self._end_of_run() if sums else (), phis, self._kept(sums))])

    def _computed(self, pieces: Values) -> list[Values]:
        """The values of all nodes for the elements with even and with odd numbers.

        In turn: a long chain of operations, such as random bits or roots, then has another one to run beside.
        """
        parts = [self.split(pieces, part) for part in (0, 1)]
        if self.update.draws:
            for part, values in enumerate(parts):
                values[self.placeholders[len(self.update.inputs)]] = self.index(part)
        for node in self.nodes:
            if node.op != "call_function" or node.target in REDUCED or node in self.found:
                continue
            if all(x in self.found for x in node.all_input_nodes):
                self.compute_once(node, self.host)
            else:
                for values in parts:
                    self.compute(node, values)
        return parts

    def looped(self, run: Iterable[str], phis: Iterable[str], ran: Iterable[str]) -> Iterator[str]:
        """The function: a loop over runs, and in it the loop over elements.

        `run` are the lines before that, which may set where it ends (`%stop`); `phis` are those of what it adds up, and
        `ran` those after it.
        """
        self.loop.declared.add("declare i64 @llvm.smin.i64(i64, i64)")
        before = [*run]
        end = "%stop" if any(line.startswith("  %stop =") for line in before) else "%end"
        ahead = ahead_of(self.loop.lines)
        yield f"define void @NAME({PARAMETERS}) #0 {{"
        yield "entry:"
        yield from self.host.lines
        yield from ahead.lines("%begin", "first")
        yield f"  %last = sub i64 %end, {2 * self.width}"
        yield "  br label %run"
        yield "run:"
        yield "  %first = phi i64 [ %begin, %entry ], [ %next, %ran ]"
        yield from ahead.phis(("entry", "first"), ("ran", "ahead"), "run")
        yield from before
        yield "  br label %loop"
        yield "loop:"
        yield "  %i = phi i64 [ %first, %run ], [ %next, %loop ]"
        yield from phis
        yield from ahead.phis(("run", "run"), ("loop", "ahead"))
        yield f"  %after = add i64 %i, {2 * self.width}"
        yield "  %ahead = call i64 @llvm.smin.i64(i64 %after, i64 %last)"
        yield from ahead.lines("%ahead", "ahead")
        yield from ahead.rest
        yield f"  %next = add i64 %i, {2 * self.width}"
        yield f"  %more = icmp slt i64 %next, {end}"
        yield "  br i1 %more, label %loop, label %ran"
        yield "ran:"
        yield from ran
        yield "  %runs = icmp slt i64 %next, %end"
        yield "  br i1 %runs, label %run, label %done"
        yield "done:"
        yield "  ret void"
        yield "}"

    def _end_of_run(self) -> Iterator[str]:
        """Where the steps end whose sums are added in fp32."""
        self.loop.declared.add("declare i64 @llvm.smin.i64(i64, i64)")
        yield f"  %far = add i64 %first, {2 * self.width * RUN}"
        yield "  %stop = call i64 @llvm.smin.i64(i64 %far, i64 %end)"

    def _kept(self, sums: Sequence[Value]) -> list[str]:
        code = self.code(self.width)
        for number, grown in enumerate(sums):
            self.keep(code, number, grown)
        return code.lines
