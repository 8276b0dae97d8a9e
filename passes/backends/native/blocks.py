"""Kernels for updates in which blocks of elements share words, or depend on the maximum of a block.

For each block of K elements there are one or more passes over its elements (see `Schedule`), and before, between and
after them scalar code for what is the same for the whole block. With vectors of 16, and two passes::

    block:
      %at = phi i64 ...              ; the number of the first element
      ...                            ; words of the block
    pass0:
      %j0 = phi i64 ...              ; 0, 32, 64, 96
      ...                            ; 32 elements; the largest of each lane so far; what later passes need, to a buffer
      br i1 %j0_more, label %pass0, label %after0
    after0:
      ...                            ; the maximum; scalars that depend on it
    pass1:
      ...
    after1:
      ...                            ; stores the words of the block
      br i1 %at_more, label %block, label %done

The driver calls it with whole blocks only. The last block of a row, if it is shorter, it copies to a buffer first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from collage_neuron.numerics.eft import block_max, narrow
from collage_neuron.numerics.reductions import REDUCTIONS
from collage_neuron.passes.backends.native.llvm_builder import FLOAT, INT, MASK, Code, NotEmitted, Value, loop
from collage_neuron.passes.backends.native.rules import MAGNITUDE
from collage_neuron.passes.backends.native.writer import PARAMETERS, Values, Writer
from collage_neuron.passes.ir.update import Update


def size_of_blocks(update: Update) -> int:
    """Elements of the blocks of an update, 0 if it has none; NotEmitted if it has blocks of several sizes."""
    nodes = [node for node in update.graph.graph.nodes if node.target is block_max]
    sizes = {*update.blocks.values(), *(node.args[1] for node in nodes)}
    if len(sizes) > 1:
        raise NotEmitted(f"blocks of {' and '.join(map(str, sorted(sizes)))} elements in one update")
    return sizes.pop() if sizes else 0


@dataclass
class Schedule:
    """The schedule of an update with blocks: how many passes over a block there are, and what is computed in which.

    The maximum of a block is known after a pass over its elements, so what depends on it needs another one. All passes
    of a block follow one another, while its words are in the cache. What is the same for all elements of a block is
    computed between passes, once. A value that a later pass needs is kept in a buffer, unless it is as easy to compute
    there.
    """

    update: Update
    hosts: set[fx.Node] = field(default_factory=set)
    """What is the same for all elements of a tensor."""
    shared: dict[fx.Node, int] = field(default_factory=dict)
    """What is the same for all elements of a block, with the number of the pass before which it is computed."""
    passes: dict[fx.Node, int] = field(default_factory=dict)
    """All else, with the number of the pass that computes it."""
    free: set[fx.Node] = field(default_factory=set)
    """Of that, what depends on the numbers of elements alone: their random bits."""

    def __post_init__(self) -> None:
        *nodes, output = self.update.graph.graph.nodes
        for node in nodes:
            self._place(node)
        # From the last node back: all that uses a node has its final pass by then.
        for node in reversed(nodes):
            if node in self.passes and node.op == "call_function":
                self.passes[node] = self._latest(node)
        (results,) = output.args
        assert isinstance(results, Sequence)
        kept = zip([*self.update.outputs, *[""] * len(results)], results, strict=False)
        of_elements = [self.pass_of(result) for key, result in kept if key not in self.update.blocks]
        self.count: int = 1 + max([*self.passes.values(), *of_elements])

    def _place(self, node: fx.Node) -> None:
        """Notes the first pass that can compute a node."""
        if node.op == "placeholder":
            return self._place_input(node)
        if node.target in REDUCTIONS:
            return None
        given = [x for x in node.all_input_nodes if x not in self.hosts]
        first = max(map(self.pass_of, given), default=0)
        varying = [x for x in given if x in self.passes]
        if not given:
            self.hosts.add(node)
        elif not varying:
            self.shared[node] = first
        elif node.target is block_max:
            self.shared[node] = first + 1
        else:
            self.passes[node] = first
            if self.free.issuperset(varying):
                self.free.add(node)
        return None

    def _place_input(self, node: fx.Node) -> None:
        if node.target in self.update.blocks:
            self.shared[node] = 0
        elif node.target in self.update.inputs:
            self.passes[node] = 0
        elif node.target == "index":
            self.passes[node] = 0
            self.free.add(node)
        else:
            self.hosts.add(node)

    def _latest(self, node: fx.Node) -> int:
        """The first pass that uses a node, if what it is computed from is there too; else the first that can."""
        first = self.passes[node]
        latest = min(self.uses(node), default=first)
        given = [x for x in node.all_input_nodes if x in self.passes]
        return latest if all(x in self.free or max(self.uses(x)) >= latest for x in given) else first

    def uses(self, node: fx.Node) -> Iterator[int]:
        """The passes that use the value of a node that varies within a block."""
        for user in node.users:
            if user.target is block_max:
                yield self.shared[user] - 1
            else:
                yield self.passes.get(user, self.passes[node])  # it is stored, or measured, where it is computed

    def pass_of(self, result: fx.Node) -> int:
        """The first pass that can use what a node computes, or measures."""
        value = result.args[0] if result.target in REDUCTIONS else result
        assert isinstance(value, fx.Node)
        return self.passes.get(value, self.shared.get(value, 0))


@dataclass
class BlockWriter(Writer):
    """Writes a kernel with passes over blocks of `block` elements."""

    block: int = field(kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block % (2 * self.width):
            raise NotEmitted(f"blocks of {self.block} elements, in steps of {2 * self.width}")
        self.schedule = Schedule(self.update)
        self.section = self.before
        self.body: list[str] = []
        """What is done for a block."""
        self.buffers: dict[fx.Node, tuple[str, str]] = {}
        """The buffers of values that later passes need, and what they are."""

    def text(self) -> str:
        """The whole function, and the declarations of what it calls."""
        self.head()
        for node in self.nodes:
            if node.op == "call_function" and node in self.schedule.hosts:
                self.compute_once(node, self.host)
        self._between(0)
        for number in range(self.schedule.count):
            self._pass(number)
            self._between(number + 1)
        last = f"after{self.schedule.count - 1}"
        words = [("%w", "i64", "%word", "add i64 %w, 1")]
        blocks = loop("block", "entry", ("%at", "%begin", self.block), "%end", self.body, "done", last, words)
        head = f"define void @NAME({PARAMETERS}) #0 {{"
        return self.whole([head, "entry:", *self.host.lines, *blocks, "  ret void", "}"])

    def before_loop(self, node: fx.Node) -> Code:
        """Before all blocks, or before the passes that follow."""
        return self.before if node in self.schedule.hosts else self.section

    # Between passes ------------------------------------------------------------------------------------------------

    def _between(self, number: int) -> None:
        """What is the same for all elements of a block, and known after `number` passes."""
        code = self.code(1)
        for node in self.nodes:
            if self.schedule.shared.get(node) != number:
                continue
            if node.op == "placeholder":
                self.found[node] = self._word(code, node)
            elif node.target is not block_max:
                self.compute_once(node, code)
            elif node not in self.found:  # else the pass has found it
                self.found[node] = code.call("fabs", FLOAT, self.found[node.all_input_nodes[0]])
        if number == self.schedule.count:
            self._store_words(code)
        self.body += code.lines

    def _place_of_word(self, code: Code, number: int) -> str:
        if self.slots[number].dtype != torch.float32:
            raise NotEmitted(f"words of {self.slots[number].dtype} that blocks share")
        return code.op("ptr", f"getelementptr float, ptr %p{number}, i64 %w").text

    def _word(self, code: Code, node: fx.Node) -> Value:
        (number,) = (i for i, s in enumerate(self.slots) if s.read is not None and self.placeholders[s.read] is node)
        return code.op(FLOAT, f"load float, ptr {self._place_of_word(code, number)}")

    def _store_words(self, code: Code) -> None:
        for number, slot in enumerate(self.slots):
            if slot.shared and slot.written is not None:
                result = self.results[slot.written]
                if result not in self.found or (result.target is narrow and result.args[1] != "fp32"):
                    raise NotEmitted(f"{result}, stored as a word that a block shares")
                code.put(f"store float {self.found[result].text}, ptr {self._place_of_word(code, number)}")

    # Passes --------------------------------------------------------------------------------------------------------

    def _pass(self, number: int) -> None:
        """One loop over the elements of a block."""
        self.section, self.loop, self.at = self.code(self.width), self.code(self.width), f"%i{number}"
        self.loop.put(f"%i{number} = add i64 %at, %j{number}")
        parts = self._computed(number)
        maxima = [n for n in self.nodes if n.target is block_max and self._is_found_in(n, number)]
        measures = [i for i, m in enumerate(self.measures) if self.schedule.pass_of(m) == number]
        valid = [self.valid(part) for part in (0, 1)] if maxima or measures else []
        largest = [self._largest(node, parts, valid) for node in maxima]
        sums = {i: self.grown(i, parts, valid) for i in measures}
        for i, slot in enumerate(self.slots):
            is_stored = slot.written is not None and not slot.shared
            if is_stored and self.schedule.pass_of(self.results[slot.written or 0]) == number:
                self.store(i, parts)
        for i, grown in sums.items():
            # LLVM wants the phis of a block before its other instructions.
            self.loop.lines.insert(0, self.phi(i, grown, self._before(number), f"pass{number}"))
        index = f"%j{number}", "0", 2 * self.width
        before, body = self._before(number), self.loop.lines
        turns = loop(f"pass{number}", before, index, f"{self.block}", body, f"after{number}")
        self.body += [*self.section.lines, *turns]
        after = self.code(self.width)
        for i, grown in sums.items():
            self.keep(after, i, grown)
        for node, grown in zip(maxima, largest, strict=True):
            found = after.reduce("smax", INT, grown)
            self.found[node] = Value(after.op(FLOAT, f"bitcast i32 {found.text} to float").text, FLOAT)
        self.body += after.lines

    def _is_found_in(self, node: fx.Node, number: int) -> bool:
        operand = node.all_input_nodes[0]
        return operand in self.schedule.passes and self.schedule.shared[node] == number + 1

    def _computed(self, number: int) -> tuple[Values, Values]:
        """The values of a pass, for the elements with even and with odd numbers."""
        pieces = self.pieces() if number == 0 else {}
        both = self.split(pieces, 0), self.split(pieces, 1)
        for node in self.nodes:
            for part, values in enumerate(both):
                if node in self.schedule.passes and node not in values and self._is_needed(node, number):
                    self._value(node, number, part, values)
                if node in values and self._is_kept(node, number):
                    self._keep(node, part, values[node])
        return both

    def _is_needed(self, node: fx.Node, number: int) -> bool:
        if not node.users and node.op == "placeholder":  # an update need not read its gradient
            return False
        return self.schedule.passes[node] == number or number in self.schedule.uses(node)

    def _is_kept(self, node: fx.Node, number: int) -> bool:
        is_index = node.op == "placeholder" and node in self.schedule.free
        return self.schedule.passes[node] == number < max(self.schedule.uses(node), default=0) and not is_index

    def _value(self, node: fx.Node, number: int, part: int, values: Values) -> None:
        if node.op == "placeholder" and node in self.schedule.free:
            values[node] = self.index(part)
        elif self.schedule.passes[node] == number:
            self.compute(node, values)
        else:
            values[node] = self._kept(node, part)

    def _place_of(self, node: fx.Node, part: int) -> str:
        """The address in a buffer: first the even, then the odd elements of a step."""
        buffer, _ = self.buffers[node]
        j = self.loop.op("i64", f"add i64 %j{self.at[2:]}, {part * self.width}").text
        return self.loop.op("ptr", f"getelementptr i32, ptr {buffer}, i64 {j}").text

    def _keep(self, node: fx.Node, part: int, value: Value) -> None:
        """Stores a value in its buffer; a mask as numbers."""
        if node not in self.buffers:
            self.buffers[node] = f"%kept{len(self.buffers)}", value.kind
            t = self.before.type_of(INT)
            self.host.put(f"{self.buffers[node][0]} = alloca {t}, i32 {self.block // self.width}, align 64")
        stored = self.loop.cast("zext", value, INT) if value.kind == MASK else value
        place = self._place_of(node, part)
        self.loop.put(f"store {self.loop.type_of(stored.kind)} {stored.text}, ptr {place}")

    def _kept(self, node: fx.Node, part: int) -> Value:
        kind = self.buffers[node][1]
        stored = INT if kind == MASK else kind
        found = self.loop.op(stored, f"load {self.loop.type_of(stored)}, ptr {self._place_of(node, part)}")
        return self.loop.compare("icmp ne", INT, found, 0) if kind == MASK else found

    def _largest(self, node: fx.Node, parts: Sequence[Values], valid: Sequence[Value]) -> Value:
        """The largest magnitude of each lane, with this step's."""
        # As integers magnitudes are ordered like numbers, and NaN is larger than all others: it is not lost.
        grown = Value(f"%largest_{node.name}", INT)
        for values, mask in zip(parts, valid, strict=True):
            size = self.loop.binary("and", INT, self.loop.bits(self.operand(node.args[0], values)), MAGNITUDE)
            grown = self.loop.call("smax", INT, grown, self.loop.select(mask, size, 0, INT))
        t = self.loop.type_of(INT)
        first = self._before(int(self.at[2:]))
        phi = f"phi {t} [ zeroinitializer, %{first} ], [ {grown.text}, %pass{self.at[2:]} ]"
        self.loop.lines.insert(0, f"  %largest_{node.name} = {phi}")
        return grown

    @staticmethod
    def _before(number: int) -> str:
        """The label before a pass."""
        return f"after{number - 1}" if number else "block"
