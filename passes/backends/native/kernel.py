"""An update as one function of LLVM's assembly: a loop over the elements, which loads, computes, and stores in place.

Given an update with `param = param - c0 * grad` on bf16, and vectors of 16::

    define void @update_...(ptr %row, ptr %scalars, i64 %begin, i64 %end, ..., ptr %measures) {
      ...                            ; pointers and host scalars, and what depends on those alone: once
    loop:
      %i = phi i64 [ %begin, %entry ], [ %i_next, %loop ]
      ...                            ; 32 elements: those with even numbers, those with odd ones
      %i_next = add i64 %i, 32
      %i_more = icmp slt i64 %i_next, %end
      br i1 %i_more, label %loop, label %done

With measurements there is a loop around this one. Sums are added in fp32 for a few steps (`RUN`), and these runs in
double: conversions of all terms would take longer than the rest of the update. So a sum is within 2**-20 of the sum of
its terms' magnitudes (with blocks, and vectors of 4, 2**-19). Counts are exact.

The driver calls it with whole steps of the loop only. What is left at the end of a tensor it copies to a buffer first.
Updates in which blocks of elements share words have loops of their own: see `blocks`.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from collage_neuron.numerics.reductions import ENDINGS, OF_TENSOR, REDUCTIONS
from collage_neuron.passes.backends.native.blocks import BlockWriter, size_of_blocks
from collage_neuron.passes.backends.native.llvm_builder import NAME, RESULT, NotEmitted, Value, loop
from collage_neuron.passes.backends.native.machine import Machine
from collage_neuron.passes.backends.native.writer import PARAMETERS, Kernel, Slot, Values, Writer
from collage_neuron.passes.ir.stage import ancestors
from collage_neuron.passes.ir.update import Update


def slots_of(update: Update, apart: bool, dtypes: Iterable[torch.dtype] = repeat(torch.float32)) -> list[Slot]:
    """The tensors of an update, of these dtypes; one that is read and written is one slot, unless they are `apart`."""
    place = {} if apart else {key: j for j, key in enumerate(update.outputs)}
    read = [(i, place.get(key), key in update.blocks) for i, key in enumerate(update.inputs)]
    known = {written for _, written, _ in read}
    more = [(None, j, key in update.blocks) for j, key in enumerate(update.outputs) if j not in known]
    return [Slot(dtype, *slot) for slot, dtype in zip([*read, *more], dtypes, strict=False)]


def write_kernel(update: Update, apart: bool, dtypes: Sequence[torch.dtype], width: int) -> Kernel:
    """The kernel of `update` for slots of these dtypes, and vectors of `width` fp32 numbers.

    Raises:
        NotEmitted: there is no code for an operation, an operand or a dtype.
    """
    block, slots = size_of_blocks(update), slots_of(update, apart, dtypes)
    text = BlockWriter(update, slots, width, block=block).text() if block else FlatWriter(update, slots, width).text()
    return Kernel.named("update", text, slots, block or 2 * width, width)


@dataclass(frozen=True)
class Compiled:
    """A kernel with its code."""

    kernel: Kernel
    described: array[int]
    """What the driver reads of it: see `driver.KERNEL`."""
    address: int
    """That of the description."""
    unit: int
    """The work of a step: elements in loops of all kernels count alike."""

    @classmethod
    def of(cls, machine: Machine, write: Callable[..., Kernel], *given: Any) -> Compiled | None:
        """The kernel that `write` makes of what is given, and of the machine's width; None if it cannot."""
        try:
            kernel = write(*given, machine.target.width)
        except NotEmitted:
            return None
        words = [n for s in kernel.slots for n in (s.dtype.itemsize, int(s.written is not None), int(s.shared))]
        unit = kernel.step // (2 * kernel.width)
        # The driver is given the address of this array, which lives as long as what is returned.
        described = array("q", [machine.address(kernel), kernel.step, unit, len(kernel.slots), *words])
        return cls(kernel, described, described.buffer_info()[0], unit)


class Bound:
    """What is known of the slots of one update."""

    def __init__(self, update: Update, kernels: Kernels) -> None:
        self._kernels = kernels
        self._slots = [slots_of(update, apart) for apart in (False, True)]
        self.both = [(s.read, s.written) for s in self._slots[False] if s.read is not None and s.written is not None]
        """Places of the keys that are read and written: mostly the same tensor, which is one slot then."""
        self.only_written = [s.written for s in self._slots[False] if s.read is None and s.written is not None]
        self.block = 0
        with suppress(NotEmitted):  # of blocks of several sizes, for which there is no kernel either
            self.block = size_of_blocks(update)

    def written(self, apart: bool) -> list[bool]:
        """Which slots are written; where words lie `apart` from those they replace, these have slots of their own."""
        return [slot.written is not None for slot in self._slots[apart]]

    def shared(self, apart: bool) -> list[bool]:
        """For each slot True if blocks share its words."""
        return [slot.shared for slot in self._slots[apart]]

    def kernel(self, update: Update, apart: bool, dtypes: tuple[torch.dtype, ...]) -> Compiled | None:
        """The kernel for slots of these dtypes; None if there is no code for one of them, or for an operation."""
        return self._kernels.compiled(write_kernel, update, apart, dtypes)


T = TypeVar("T")


class Kernels:
    """The kernels of all updates in use: the same for all threads, since steps have only their addresses."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        # What is kept must not refer to its update, or neither would ever be freed.
        self._made: WeakKeyDictionary[Update, dict[Any, Any]] = WeakKeyDictionary()
        self._lock = threading.Lock()

    def once(self, make: Callable[..., T], update: Update, *given: Any) -> T:
        """What `make` returns for an update and what else is given."""
        with self._lock:
            made = self._made.get(update)
            if made is None:
                made = self._made[update] = {}
            if (make, given) not in made:
                made[make, given] = make(update, *given)
            found: T = made[make, given]
            return found

    def of(self, update: Update) -> Bound:
        """The slots of an update."""
        return self.once(Bound, update, self)

    def compiled(self, write: Callable[..., Kernel], update: Update, *given: Any) -> Compiled | None:
        """The kernel that `write` makes of an update and what else is given; None if it cannot."""
        return self.once(self._compile, update, write, *given)

    def _compile(self, update: Update, write: Callable[..., Kernel], *given: Any) -> Compiled | None:
        return Compiled.of(self.machine, write, update, *given)


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
        """The values of all nodes for the elements with even and with odd numbers."""
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
                # Both in turn: a long chain of operations, such as random bits or roots, has another one to run beside.
                for values in parts:
                    self.compute(node, values)
        return parts

    def looped(self, run: Iterable[str], phis: Iterable[str], ran: Iterable[str]) -> Iterator[str]:
        """The function: a loop over runs, and in it the loop over elements.

        `run` are the lines before that, which may set where it ends (`%stop`); `phis` are those of what it adds up, and
        `ran` those after it.
        """
        before, step = [*run], 2 * self.width
        end = "%stop" if any(line.startswith("  %stop =") for line in before) else "%end"
        ahead = ahead_of(self.loop.lines)
        body = [
            *phis,
            *ahead.phis(("run", "run"), ("loop", "ahead")),
            f"  %after = add i64 %i, {step}",
            # The last step computes its own chain again, so that nothing is read beyond the end.
            "  %ahead = call i64 @llvm.smin.i64(i64 %after, i64 %last)",
            *ahead.lines("%ahead", "ahead"),
            *ahead.rest,
        ]
        yield f"define void @NAME({PARAMETERS}) #0 {{"
        yield "entry:"
        yield from self.host.lines
        yield from ahead.lines("%begin", "first")
        yield f"  %last = sub i64 %end, {step}"
        yield "  br label %run"
        yield "run:"
        yield "  %first = phi i64 [ %begin, %entry ], [ %i_next, %ran ]"
        yield from ahead.phis(("entry", "first"), ("ran", "ahead"), "run")
        yield from before
        yield from loop("loop", "run", ("%i", "%first", step), end, body, "ran")
        yield from ran
        yield "  %runs = icmp slt i64 %i_next, %end"
        yield "  br i1 %runs, label %run, label %done"
        yield "done:"
        yield "  ret void"
        yield "}"

    def _end_of_run(self) -> Iterator[str]:
        """Where the steps end whose sums are added in fp32."""
        yield f"  %far = add i64 %first, {2 * self.width * RUN}"
        yield "  %stop = call i64 @llvm.smin.i64(i64 %far, i64 %end)"

    def _kept(self, sums: Sequence[Value]) -> list[str]:
        code = self.code(self.width)
        for number, grown in enumerate(sums):
            self.keep(code, number, grown)
        return code.lines


LONG = re.compile(r" = fdiv | = call <\d+ x float> @llvm\.sqrt\.")
CARRIED = re.compile(r" +%\w+ = (?:fadd|fsub|fmul|fdiv|fneg|call) (<\d+ x float>) ")
"""Floating-point arithmetic, by the lines of it, and its type."""


class Ahead(NamedTuple):
    """The lines of a loop in two parts, for software pipelining: what leads to divisions and roots, and the rest.

    A division waits for the root before it, and what follows waits for the division: some 60 cycles, in which a CPU can
    begin instructions of the next step only as far as it has registers to rename, which hold little more than one step.
    With that chain one step ahead, the next step's roots run beside this step's roundings. A loop over x becomes::

        run:                                         ; the chain of the first step is before all loops
          %run_q = phi [ %first_q, %entry ], [ %ahead_q, %ran ]
        loop:
          %q = phi [ %run_q, %run ], [ %ahead_q, %loop ]
          %ahead_q = ...                             ; of %ahead, the step after %i, or %i itself if that is the last
          ...                                        ; the rest of step %i, which begins with its %q

    Results of floating-point arithmetic are carried to the next turn; what else the rest needs (words as they are
    loaded, masks) is computed again, which is as cheap as a register. Nothing is stored ahead, so that the order of
    loads and stores of an element is as before.
    """

    chain: list[str]
    """Those of what is long, and of all that it needs."""
    rest: list[str]
    """The others, and what they need of the chain and is not carried."""
    carried: dict[str, str]
    """The type of each result of the chain that the rest takes from the turn before."""

    def lines(self, at: str, prefix: str) -> list[str]:
        """The chain of the step that begins at `at`; its results have names with a prefix."""
        own = {line.split()[0] for line in self.chain}

        def renamed(name: re.Match[str]) -> str:
            return at if name[0] == "%i" else f"%{prefix}_{name[0][1:]}" if name[0] in own else name[0]

        return [NAME.sub(renamed, line) for line in self.chain]

    def phis(self, first: tuple[str, str], later: tuple[str, str], prefix: str = "") -> Iterator[str]:
        """The lines that carry results into a block, from two others: (the block, the prefix of its results)."""
        for name, kind in self.carried.items():
            sources = ", ".join(f"[ {_prefixed(name, p)}, %{block} ]" for block, p in (first, later))
            yield f"  {_prefixed(name, prefix)} = phi {kind} {sources}"


def _prefixed(name: str, prefix: str) -> str:
    return f"%{prefix}_{name[1:]}" if prefix else name


def ahead_of(lines: Sequence[str]) -> Ahead:
    """The lines of a loop's body, taken apart; nothing is ahead in a loop without divisions and roots."""
    made = {line.split()[0]: line for line in lines if RESULT.match(line)}
    needs = {name: [x for x in NAME.findall(line)[1:] if x in made] for name, line in made.items()}
    chain = ancestors((name for name, line in made.items() if LONG.search(line)), needs.__getitem__).keys()
    others = [line for line in lines if line.split()[0] not in chain]
    wanted = [x for line in others for x in NAME.findall(line) if x in chain]
    carried, again = dict[str, str](), set[str]()
    while wanted:
        name = wanted.pop()
        if arithmetic := CARRIED.match(made[name]):
            carried[name] = arithmetic[1]
        elif name not in again:  # a word or a mask: made again beside the rest, with what it needs
            again.add(name)
            wanted += needs[name]
    rest = [line for line in lines if line.split()[0] not in chain - again]
    ordered = {name: carried[name] for name in made if name in carried}  # equal kernels have equal texts
    return Ahead([line for line in lines if line.split()[0] in chain], rest, ordered)
