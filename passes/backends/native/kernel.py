"""An update as one function of LLVM's assembly: a loop over the elements, which loads, computes, and stores in place.

Given an update with `param = param - c0 * grad` on bf16, and vectors of 16::

    define void @update_...(ptr %row, ptr %scalars, i64 %begin, i64 %end, i64 %offset, i64 %limit, ptr %measures) {
      ...                            ; pointers and host scalars, and what depends on those alone: once
    loop:
      %i = phi i64 [ %begin, %entry ], [ %next, %loop ]
      ...                            ; 32 elements: those with even numbers, those with odd ones
      %next = add i64 %i, 32
      %more = icmp slt i64 %next, %end
      br i1 %more, label %loop, label %done

The driver calls it with whole steps of the loop only. What is left at the end of a tensor it copies to a buffer first.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.numerics.eft import narrow, round_to, stochastic_round
from collage_neuron.numerics.reductions import REDUCTIONS, total
from collage_neuron.numerics.storage import storage_named
from collage_neuron.passes.backends.native.code import DOUBLE, FLOAT, INT, MASK, Code, NotEmitted, Value
from collage_neuron.passes.backends.native.rules import ROUNDINGS, RULES, Rule
from collage_neuron.passes.backends.native.words import WORDS, load, store
from collage_neuron.passes.ir.update import Update

PARAMETERS = "ptr %row, ptr %scalars, i64 %begin, i64 %end, i64 %offset, i64 %limit, ptr %measures"


class Slot(NamedTuple):
    """One tensor of each parameter that a kernel reads, writes, or both."""

    dtype: torch.dtype
    read: int | None
    """Its place in `update.inputs`, if it is read."""
    written: int | None
    """Its place in `update.outputs`, if it is written."""


@dataclass(frozen=True)
class Kernel:
    """The text of an update for some dtypes and a vector width."""

    name: str
    """Made of the text: equal kernels have equal names."""
    text: str
    slots: tuple[Slot, ...]
    step: int
    """Elements in one step of the loop."""


def slots_of(update: Update, reads: Sequence[torch.dtype], writes: Sequence[torch.dtype], apart: bool) -> list[Slot]:
    """The tensors of an update; one that is read and written is one slot, unless they are `apart`."""
    place = {key: i for i, key in enumerate(update.outputs)}
    inputs = [
        Slot(d, i, None if apart else place.get(key))
        for i, (key, d) in enumerate(zip(update.inputs, reads, strict=True))
    ]
    known = {slot.written for slot in inputs}
    return inputs + [Slot(d, None, j) for j, d in enumerate(writes) if j not in known]


def write_kernel(update: Update, slots: Sequence[Slot], width: int) -> Kernel:
    """The kernel of `update` for vectors of `width` fp32 numbers.

    Raises:
        NotEmitted: there is no code for an operation, an operand or a dtype.
    """
    text = _Writer(update, slots, width).text()
    name = f"update_{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    return Kernel(name, text.replace("@NAME", f"@{name}"), tuple(slots), 2 * width)


@dataclass
class _Writer:
    """Writes one kernel."""

    update: Update
    slots: Sequence[Slot]
    width: int
    found: dict[fx.Node, Value] = field(default_factory=dict)
    """What the host knows, or depends on that alone: scalars, computed before the loop."""
    spread: dict[fx.Node, Value] = field(default_factory=dict)
    """The same as vectors, where such are needed."""

    def __post_init__(self) -> None:
        names, declared = itertools.count(), set[str]()
        self.host = Code(1, names, declared)
        self.before = Code(self.width, names, declared, self.host.lines)
        self.loop = Code(self.width, names, declared)
        self.nodes = list(self.update.graph.graph.nodes)
        self.placeholders = [node for node in self.nodes if node.op == "placeholder"]
        self.dtypes = {self.placeholders[slot.read]: slot.dtype for slot in self.slots if slot.read is not None}
        self.results: Sequence[fx.Node] = self.nodes[-1].args[0]
        self.measures = [r for r in self.results if r.target in REDUCTIONS]

    def text(self) -> str:
        """The whole function, and the declarations of what it calls."""
        pieces = self._inputs()
        parts = [self._computed(part, pieces) for part in (0, 1)]
        for slot, pointer in zip(self.slots, self._pointers(), strict=True):
            if slot.written is not None:
                result = self.results[slot.written]
                pair = [self._stored(result, values, slot.dtype) for values in parts]
                store(self.loop, slot.dtype, pointer, "%i", (pair[0], pair[1]))
        added = self._added(parts)
        return "\n".join([*self._function(added), *sorted(self.loop.declared)])

    def _pointers(self) -> list[str]:
        return [f"%p{i}" for i in range(len(self.slots))]

    def _inputs(self) -> dict[fx.Node, Value]:
        """Loads the scalars before the loop, and in it the pieces of what is read."""
        for i, pointer in enumerate(self._pointers()):
            place = self.host.op("ptr", f"getelementptr ptr, ptr %row, i64 {i}").text
            self.host.put(f"{pointer} = load ptr, ptr {place}")
        count = len(self.update.inputs) + self.update.draws
        for i, node in enumerate(self.placeholders[count:]):
            place = self.host.op("ptr", f"getelementptr float, ptr %scalars, i64 {i}").text
            self.found[node] = self.host.op(FLOAT, f"load float, ptr {place}")
        pieces = {}
        for slot, pointer in zip(self.slots, self._pointers(), strict=True):
            if slot.dtype not in WORDS:
                raise NotEmitted(f"words of {slot.dtype}")
            if slot.read is not None and self.placeholders[slot.read].users:
                pieces[self.placeholders[slot.read]] = load(self.loop, slot.dtype, pointer, "%i")
        return pieces

    def _computed(self, part: int, pieces: dict[fx.Node, Value]) -> dict[fx.Node, Value]:
        """The values of all nodes for the elements with even (0) or with odd numbers (1)."""
        values: dict[fx.Node, Value] = {}
        if self.update.draws:
            values[self.placeholders[len(self.update.inputs)]] = self._index(part)
        for node in self.nodes:
            if node in pieces:
                values[node] = WORDS[self.dtypes[node]].split(self.loop, pieces[node], part)
            elif node.op == "call_function" and node.target not in REDUCTIONS:
                self._compute(node, values)
        return values

    def _compute(self, node: fx.Node, values: dict[fx.Node, Value]) -> None:
        """Adds the instructions of a node: before the loop if they are the same for all elements."""
        if node in self.found:
            return
        rule = _rule(node)
        if all(x in self.found for x in node.all_input_nodes):
            self.found[node] = rule(self.host, *(self.found[x] if isinstance(x, fx.Node) else x for x in node.args))
        else:
            values[node] = rule(self.loop, *(self._operand(x, values) for x in node.args))

    def _operand(self, x: Any, values: dict[fx.Node, Value]) -> Any:
        """An operand for each element."""
        if not isinstance(x, fx.Node) or x in values:
            return values[x] if isinstance(x, fx.Node) else x
        if x not in self.spread:
            self.spread[x] = self.before.spread(self.found[x])
        return self.spread[x]

    def _index(self, part: int) -> Value:
        """The numbers of the elements in their parameter."""
        first = self.loop.op("i64", "add i64 %i, %offset").text
        start = self.loop.spread(Value(self.loop.op(INT, f"trunc i64 {first} to i32").text, INT))
        return self.loop.binary("add", INT, start, self._numbers(part))

    def _numbers(self, part: int) -> Value:
        return Value("<" + ", ".join(f"i32 {2 * j + part}" for j in range(self.width)) + ">", INT)

    def _stored(self, result: fx.Node, values: dict[fx.Node, Value], dtype: torch.dtype) -> Value:
        """The numbers for a tensor of `dtype`, rounded to it where it is narrower than what the update stores."""
        value: Value = self._operand(result, values)
        storage = storage_named(result.args[1]) if result.target is narrow else None
        if storage is None or storage.dtype == dtype or dtype == torch.float32:
            return value
        names = [name for name in ROUNDINGS if storage_named(name).dtype == dtype]
        if storage.dtype != torch.float32 or not names or not storage_named(names[0]).is_floating:
            raise NotEmitted(f"{storage.name} in a tensor of {dtype}")
        return ROUNDINGS[names[0]](self.loop, value)

    def _added(self, parts: Sequence[dict[fx.Node, Value]]) -> list[_Sum]:
        """What is added in each step to the vector of each sum and count."""
        valid = [self._valid(part) for part in (0, 1)] if self.measures else []
        return [_Sum(i, self._terms(node, parts, valid)) for i, node in enumerate(self.measures)]

    def _valid(self, part: int) -> Value:
        """True for the elements below `limit`: the rest of the buffer with the end of a tensor is not measured."""
        left = self.loop.op("i64", "sub i64 %limit, %i").text
        self.loop.declared.add("declare i64 @llvm.smin.i64(i64, i64)")
        least = self.loop.op("i64", f"call i64 @llvm.smin.i64(i64 {left}, i64 {2 * self.width})").text
        many = self.loop.spread(self.loop.op(INT, f"trunc i64 {least} to i32"))
        return self.loop.compare("icmp slt", INT, self._numbers(part), many)

    def _terms(self, node: fx.Node, parts: Sequence[dict[fx.Node, Value]], valid: Sequence[Value]) -> Value:
        """Two elements of each lane added, in double, or counted."""
        code, (x,) = self.loop, node.args
        terms = [self._operand(x, values) for values in parts]
        if node.target is total:
            first, second = (
                code.cast("fpext", code.select(mask, t, 0.0, FLOAT), DOUBLE)
                for t, mask in zip(terms, valid, strict=True)
            )
            return code.binary("fadd", DOUBLE, first, second)
        first, second = (
            code.cast("zext", code.binary("and", MASK, t, mask), INT) for t, mask in zip(terms, valid, strict=True)
        )
        return code.binary("add", INT, first, second)

    def _function(self, added: Sequence[_Sum]) -> Iterator[str]:
        step = 2 * self.width
        yield f"define void @NAME({PARAMETERS}) #0 {{"
        yield "entry:"
        yield from self.host.lines
        yield "  br label %loop"
        yield "loop:"
        yield "  %i = phi i64 [ %begin, %entry ], [ %next, %loop ]"
        yield from (s.phi(self.loop) for s in added)
        yield from self.loop.lines
        yield from (s.addition(self.loop) for s in added)
        yield f"  %next = add i64 %i, {step}"
        yield "  %more = icmp slt i64 %next, %end"
        yield "  br i1 %more, label %loop, label %done"
        yield "done:"
        for s in added:
            yield from s.kept(self.loop)
        yield "  ret void"
        yield "}"


class _Sum(NamedTuple):
    """A sum or a count, in a vector that grows from step to step."""

    number: int
    term: Value

    def phi(self, code: Code) -> str:
        """Its value at the start of a step."""
        n, t = self.number, code.type_of(self.term.kind)
        return f"  %sum{n} = phi {t} [ zeroinitializer, %entry ], [ %grown{n}, %loop ]"

    def addition(self, code: Code) -> str:
        """Its value at the end of it."""
        opcode = "fadd" if self.term.kind == DOUBLE else "add"
        return f"  %grown{self.number} = {opcode} {code.type_of(self.term.kind)} %sum{self.number}, {self.term.text}"

    def kept(self, code: Code) -> Iterator[str]:
        """Adds it to the vector of doubles in memory, which the host adds up."""
        n, t, doubles = self.number, code.type_of(self.term.kind), code.type_of(DOUBLE)
        convert = "bitcast" if self.term.kind == DOUBLE else "uitofp"
        yield f"  %whole{n} = {convert} {t} %grown{n} to {doubles}"
        yield f"  %place{n} = getelementptr {doubles}, ptr %measures, i64 {n}"
        yield f"  %old{n} = load {doubles}, ptr %place{n}, align 8"
        yield f"  %new{n} = fadd {doubles} %old{n}, %whole{n}"
        yield f"  store {doubles} %new{n}, ptr %place{n}, align 8"


def _rule(node: fx.Node) -> Rule:
    """The rule of a node. A number that was just rounded to the type in which it is stored is that number."""
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
