"""What the writers of kernels share: the values of host and elements, pieces of tensors, measurements."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.numerics.eft import narrow, round_to, stochastic_round, storage_named
from collage_neuron.numerics.reductions import REDUCTIONS, total
from collage_neuron.passes.backends.native import llvm_builder
from collage_neuron.passes.backends.native.llvm_builder import DOUBLE, FLOAT, INT, MASK, Code, NotEmitted, Value, live
from collage_neuron.passes.backends.native.rules import RULES, Rule
from collage_neuron.passes.backends.native.words import WORDS, load, store
from collage_neuron.passes.ir.update import Update

PARAMETERS = "ptr %row, ptr %scalars, i64 %begin, i64 %end, i64 %offset, i64 %limit, i64 %word, ptr %measures"
"""Those of a kernel: addresses of the tensors and of the scalars; the elements to update; what is added to their
numbers in the tensor; the end of those that exist; the number of the first word that a block shares; measurements."""

Values = dict[fx.Node, Value]


class Slot(NamedTuple):
    """One tensor of each parameter that a kernel reads, writes, or both."""

    dtype: torch.dtype
    read: int | None
    """Its place in `update.inputs`, if it is read."""
    written: int | None
    """Its place in `update.outputs`, if it is written."""
    shared: bool = False
    """True if it has one word for each block of elements."""


@dataclass(frozen=True)
class Kernel:
    """The text of an update for some dtypes and a vector width."""

    name: str
    """Made of the text: equal kernels have equal names."""
    text: str
    slots: tuple[Slot, ...]
    step: int
    """Elements in one step of the loop."""
    width: int
    """Elements of a vector."""

    @classmethod
    def named(cls, kind: str, text: str, slots: Sequence[Slot], step: int, width: int) -> Kernel:
        """The kernel with this text, in which it is called `@NAME`; its name begins with `kind`."""
        name = f"{kind}_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
        return cls(name, text.replace("@NAME", f"@{name}"), tuple(slots), step, width)


@dataclass
class Writer:
    """Writes one kernel: what all have in common."""

    update: Update
    slots: Sequence[Slot]
    width: int
    at: str = "%i"
    """The number of the first element that the loop works on."""
    found: Values = field(default_factory=dict)
    """Scalars: what is the same for all elements, or for those of a block."""
    spread: Values = field(default_factory=dict)
    """The same as vectors, where such are needed."""

    def __post_init__(self) -> None:
        names, declared = itertools.count(), {*llvm_builder.INTRINSICS}  # `whole` leaves out what is not called
        self.host = Code(1, names, declared)
        self.before = Code(self.width, names, declared, self.host.lines)
        self.loop = Code(self.width, names, declared)
        self.nodes = list(self.update.graph.graph.nodes)
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.dtypes = {self.placeholders[slot.read]: slot.dtype for slot in self.slots if slot.read is not None}
        self.results: Sequence[fx.Node] = self.nodes[-1].args[0]
        self.measures = [r for r in self.results if r.target in REDUCTIONS]
        for slot in self.slots:
            if slot.dtype not in WORDS:
                raise NotEmitted(f"words of {slot.dtype}")

    def code(self, width: int) -> Code:
        """An empty piece of the function."""
        return Code(width, self.host.names, self.host.declared)

    def whole(self, lines: Sequence[str]) -> str:
        """The text of the function of these lines, as far as they are needed, and what it calls."""
        text = "\n".join(live(lines))
        # What is called was declared when its line was written; `live` may have dropped that line.
        names = {declared: declared[declared.index("@") : declared.index("(")] for declared in self.host.declared}
        return "\n".join([text, *sorted(declared for declared, name in names.items() if f"{name}(" in text)])

    def head(self) -> None:
        """Loads the addresses of tensors, and the scalars."""
        self.load_addresses(range(len(self.slots)))
        count = len(self.update.inputs) + self.update.draws
        for i, node in enumerate(self.placeholders[count:]):
            place = self.host.op("ptr", f"getelementptr float, ptr %scalars, i64 {i}").text
            self.found[node] = self.host.op(FLOAT, f"load float, ptr {place}")

    def load_addresses(self, numbers: Iterable[int]) -> None:
        """Loads those of the tensors with these numbers: slots, and behind them results."""
        for i in numbers:
            self.host.put(f"%p{i} = load ptr, ptr {self.place(i)}")

    def place(self, number: int) -> str:
        """Where what a job has for a kernel is: addresses of tensors, and further numbers."""
        return self.host.op("ptr", f"getelementptr ptr, ptr %row, i64 {number}").text

    def pieces(self) -> Values:
        """Loads what is read of each element, in the loop."""
        return {
            self.placeholders[slot.read]: load(self.loop, slot.dtype, f"%p{i}", self.at)
            for i, slot in enumerate(self.slots)
            if slot.read is not None and not slot.shared and self.placeholders[slot.read].users
        }

    def split(self, pieces: Values, part: int) -> Values:
        """The inputs of the elements with even (0) or with odd numbers (1)."""
        return {node: WORDS[self.dtypes[node]].split(self.loop, piece, part) for node, piece in pieces.items()}

    def compute(self, node: fx.Node, values: Values) -> None:
        """Adds the instructions of a node to the loop."""
        values[node] = rule_of(node)(self.loop, *(self.operand(x, values) for x in node.args))

    def compute_once(self, node: fx.Node, code: Code) -> None:
        """Adds the instructions of a node that is the same for all elements."""
        operands = (self.found[x] if isinstance(x, fx.Node) else x for x in node.args)
        self.found[node] = rule_of(node)(code, *operands)

    def operand(self, x: Any, values: Values) -> Any:
        """An operand for each element."""
        if not isinstance(x, fx.Node) or x in values:
            return values[x] if isinstance(x, fx.Node) else x
        if x not in self.spread:
            self.spread[x] = self.before_loop(x).spread(self.found[x])
        return self.spread[x]

    def before_loop(self, node: fx.Node) -> Code:
        """Where the vector of a scalar is made."""
        return self.before

    def index(self, part: int) -> Value:
        """The numbers of the elements in their parameter."""
        first = self.loop.op("i64", f"add i64 {self.at}, %offset").text
        # Random bits take the numbers of elements modulo 2**32, as `reference.numbers` has them.
        start = self.loop.spread(Value(self.loop.op(INT, f"trunc i64 {first} to i32").text, INT))
        return self.loop.binary("add", INT, start, self._numbers(part))

    def _numbers(self, part: int) -> Value:
        return Value("<" + ", ".join(f"i32 {2 * j + part}" for j in range(self.width)) + ">", INT)

    def store(self, number: int, parts: Sequence[Values]) -> None:
        """Stores the result of a slot for the elements of two parts."""
        slot = self.slots[number]
        assert slot.written is not None
        even, odd = (self._stored(self.results[slot.written], values, slot.dtype) for values in parts)
        store(self.loop, slot.dtype, f"%p{number}", self.at, (even, odd))

    def _stored(self, result: fx.Node, values: Values, dtype: torch.dtype) -> Value:
        """The numbers for a tensor of `dtype`, which may be wider than what the update stores."""
        value: Value = self.operand(result, values)
        storage = storage_named(result.args[1]) if result.target is narrow else None
        if storage is None or storage.dtype == dtype or dtype == torch.float32:
            return value
        raise NotEmitted(f"{storage.name} in a tensor of {dtype}")

    def valid(self, part: int) -> Value:
        """True for the elements below `limit`: in the buffer with the end of a tensor, others follow them."""
        # Limited before it is cut to 32 bits: a tensor may have more elements than these count.
        left = self.loop.op("i64", f"sub i64 %limit, {self.at}").text
        least = self.loop.op("i64", f"call i64 @llvm.smin.i64(i64 {left}, i64 {2 * self.width})").text
        many = self.loop.spread(self.loop.op(INT, f"trunc i64 {least} to i32"))
        return self.loop.compare("icmp slt", INT, self._numbers(part), many)

    def grown(self, number: int, parts: Sequence[Values], valid: Sequence[Value]) -> Value:
        """A sum or a count in `%sum{number}`, one for each lane, with the elements of this step."""
        code, measure = self.loop, self.measures[number]
        (x,) = measure.args
        found = Value(f"%sum{number}", FLOAT if measure.target is total else INT)
        for values, mask in zip(parts, valid, strict=True):
            term = self.operand(x, values)
            # Beyond the end, terms are computed of zeros and may be NaN: they are replaced, not multiplied by 0.
            if measure.target is total:
                found = code.binary("fadd", FLOAT, found, code.select(mask, term, 0.0, FLOAT))
            else:
                counted = code.binary("and", MASK, term, mask)
                found = code.select(counted, code.binary("add", INT, found, 1), found, INT)
        return found

    def phi(self, number: int, grown: Value, before: str, loop: str) -> str:
        """The line with which a loop begins that adds to a sum or a count."""
        t = self.loop.type_of(grown.kind)
        return f"  %sum{number} = phi {t} [ zeroinitializer, %{before} ], [ {grown.text}, %{loop} ]"

    def keep(self, code: Code, number: int, sums: Value) -> None:
        """Adds a vector of sums or counts to the doubles in memory, which the host adds up."""
        doubles = code.type_of(DOUBLE)
        found = code.cast("fpext" if sums.kind == FLOAT else "uitofp", sums, DOUBLE)
        place = code.op("ptr", f"getelementptr {doubles}, ptr %measures, i64 {number}").text
        before = code.op(DOUBLE, f"load {doubles}, ptr {place}, align 8")
        code.put(f"store {doubles} {code.binary('fadd', DOUBLE, before, found).text}, ptr {place}, align 8")


def rule_of(node: fx.Node) -> Rule:
    """The rule of a node."""
    # A number that was just rounded to the type in which it is stored is that number: it is not rounded again.
    operand = node.args[0] if node.args else None
    if node.target is narrow and isinstance(operand, fx.Node):
        rounded = (
            operand.args[1] if operand.target is round_to else "bf16" if operand.target is stochastic_round else None
        )
        if rounded == node.args[1]:
            return lambda code, x, storage: x
    if node.target not in RULES:
        raise NotEmitted(f"the operation {getattr(node.target, '__name__', node.target)}")
    if node.kwargs:
        raise NotEmitted(f"{node.name}, which has keyword arguments")
    return RULES[node.target]
