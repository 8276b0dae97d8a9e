"""Legalization: turns explicit-rounding form into values that engines can compute; a rounding becomes a tile's dtype.

Given: `sub = theta - r;  r1 = round_to(sub, "bf16")`, with no other use of `sub`
Result: one value `sub = subtract(theta, r)` of dtype bfloat16

Conversions cost nothing beyond the DMA, since every engine converts its operands and its result. A division becomes a
product with a reciprocal; the operands of square roots and reciprocals are kept in their documented ranges; operations
on two numbers of the step are computed by the host.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics import eft
from collage_neuron.numerics.eft import storage_named
from collage_neuron.numerics.reductions import REDUCTIONS
from collage_neuron.passes.backends.nki import ir, words
from collage_neuron.passes.backends.nki.domains import DOMAINS, is_root, least, root_of, unguarded
from collage_neuron.passes.backends.nki.ir import Column, Operand, Program, Tile, Value, View, nonnegative
from collage_neuron.passes.backends.nki.schedule import in_phases
from collage_neuron.passes.ir.update import Update


def programs_of(update: Update, storage: Mapping[str, str]) -> tuple[Program, Program]:
    """The values of `update`, and the part of them that does not measure: those of the update without a monitor.

    Its components are stored as `storage` says (storage types, by key). The second program has values of the first one,
    and is made first, so that measuring changes nothing in it.

    Raises:
        UnsupportedUpdate: an operation has no instruction.
    """
    builder = Builder(update, storage)
    plain = builder.program()
    return (builder.measured(plain) if update.sums else plain), plain


def storage_of(update: Update, grad: str) -> dict[str, str]:
    """The storage type of each component, by key, with a gradient stored as `grad`."""
    named = {k: c.storage for n, f in update.formats.items() for k, c in zip(f.keys(n), f.components, strict=True)}
    return {"grad": grad, **named}


class Builder:
    """Translates a graph node by node; `env` maps a node to a value, a column or a number."""

    def __init__(self, update: Update, storage: Mapping[str, str]) -> None:
        self.update, self.storage = update, storage
        self.env: dict[fx.Node, Any] = {}
        self.values: list[Value] = []
        self.made: dict[tuple[str, tuple[Any, ...], str, bool], Value] = {}
        self.nonnegative: set[int] = set()
        self.divisors: list[Operand] = []
        self.least: dict[Value, Operand] = {}
        self.nodes = list(update.graph.graph.nodes)
        (self.results,) = self.nodes[-1].args
        self.users = {n for n in self.results[: len(update.outputs)] if isinstance(n, fx.Node)}
        """The nodes on whose roundings the type of a value depends: at first without those that only measure."""
        # Operands come before their users in a graph: one pass from its end finds all that the outputs need.
        for node in reversed(self.nodes):
            self.users.update(node.all_input_nodes if node in self.users else ())
        self.users.add(self.nodes[-1])
        self.rounded: set[fx.Node] = set()
        """Values that are rounded where they are computed, since all users round them."""
        self.draws: dict[fx.Node, Value] = {}

    def program(self) -> Program:
        """What is stored."""
        for node in self.nodes:
            if node in self.users or node.op == "placeholder":
                self.translate(node)
        stores = dict(zip(self.update.outputs, map(self.env.__getitem__, self.results), strict=False))
        # A component that comes back as it was loaded needs no store: its tensor has it already.
        loaded = {k for k, v in stores.items() if isinstance(v, Value) and (v.op, v.name) == ("load", k)}
        return self.reachable({k: v for k, v in stores.items() if k not in loaded})

    def translate(self, node: fx.Node) -> None:
        """Notes what a node stands for."""
        if node.op == "placeholder":
            self.env[node] = self.placeholder(str(node.target))
        elif node.op == "call_function":
            self.env[node] = self.call(node)

    def measured(self, plain: Program) -> Program:
        """What is stored, and what is measured."""
        # What is stored has its values by now, so a measure as one more reader cannot change their types.
        stored, self.users = self.users, set(self.nodes)
        measures = []
        for node in self.nodes:
            if node.target in REDUCTIONS:
                measures.append(self.new("total", (self.each(node),), "float32", node.name, chunk=True))
            elif node.op == "call_function" and node not in stored:
                self.translate(node)
        return self.reachable(plain.stores, measures)

    def each(self, node: fx.Node) -> Value:
        """The elements that a node adds up."""
        x = self._operand(node.args[0], node)
        x = self.new("copy", (x,), "float32", f"{node.name}_wide") if isinstance(x, View) else x
        tile = self._tile(x, f"{node.name}_each")
        if tile.block:
            raise UnsupportedUpdate(
                f"the update measures words that blocks share (node {node.name}); use backend='xla'"
            )
        return tile

    def _operand(self, a: Any, user: fx.Node) -> Any:
        """What an argument of a node stands for: not rounded yet, if the node does not round it."""
        if not isinstance(a, fx.Node):
            return a
        x: Any = self.env[a]
        rounded = user.target in (eft.round_to, eft.narrow) and storage_named(user.args[1]).nki
        if a not in self.rounded or rounded == x.dtype:
            return x
        # Only a measure reads a value that all stores round. Without users `_dtype` says float32, so the operation is
        # written a second time, unrounded, for this reader alone.
        users, self.users = self.users, set()
        x = self.call(a)
        self.users = users
        return x

    def _drawn(self, node: fx.Node, args: list[Any]) -> Any:
        """What an operation on integers that are computed from the index becomes: a draw, where one is read."""
        if node.target not in words.READERS:
            return words.INDEX
        *others, random = (self._draw(n) if a == words.INDEX else a for a, n in zip(args, node.args, strict=True))
        if not others:
            return random
        return words.stochastic(self.new, self._tile(others[0], f"{node.name}_each"), random, node.name)

    def _draw(self, node: Any) -> Value:
        """The random number that a node is."""
        words.check_is_draw(node)
        return self.draws.setdefault(node, self.new("draw", (), "uint16", node.name))

    def placeholder(self, name: str) -> Any:
        """What an input stands for: a component that is loaded, or a number."""
        if self.update.draws and name == words.INDEX:
            return words.INDEX
        if name in (found := self.update.only_stage.numbers):
            return Column(entry=len(self.update.scalars.entries) + found.index(name), found=True)
        if name not in self.storage:
            return Column(entry=int(name[1:]))
        return self.new("load", (), storage_named(self.storage[name]).nki, name, name in self.update.blocks)

    def new(
        self, op: str, args: tuple[Operand, ...], dtype: str, name: str, block: bool = False, chunk: bool = False
    ) -> Value:
        """The value of `op`; an equal one is reused, unless it is a load, a draw, or a tile that is changed in place.

        It is one of blocks if `block` says so, or if all of its operands are; and one of chunks if `chunk` says so.
        """
        args, small = words.spread(op, args, name)
        dtype = ir.MASK if op in ir.MASKS and dtype != "bfloat16" else dtype
        value = Value(op, args, dtype, name, block or small, chunk)
        # Two draws are different bits, and an `own_copy` or a `lower` is overwritten by the value that asked for it.
        if op not in ("load", "own_copy", "lower", "total", "draw"):
            same = tuple(a if isinstance(a, (*Tile, Column)) else repr(a) for a in args)  # 0.0 is not -0.0
            value = self.made.setdefault((op, same, value.dtype, value.block), value)
        if value not in self.values:
            self.values.append(value)
        return value

    def call(self, node: fx.Node) -> Operand:
        """What an operation stands for."""
        args: list[Any] = [self._operand(a, node) for a in node.args]
        if words.INDEX in args:
            return self._drawn(node, args)  # type: ignore[no-any-return]  # or INDEX
        if node.target in (eft.round_to, eft.narrow):
            return self._rounded(args[0], storage_named(args[1]).nki, node.name)
        if not any(isinstance(a, (Value, View)) for a in args):
            return Column(target=node.target, args=tuple(args))  # type: ignore[arg-type]  # call_function has a callable
        # Engines convert their operands to fp32 as they read them, so widening is no instruction.
        if node.target is eft.widen:
            return args[0]  # type: ignore[no-any-return]  # an operand
        if node.target is eft.block_max:
            return words.largest_power(self.new, args, node)
        if node.target is eft.power_of_two and getattr(node.args[0], "target", None) is eft.block_max:
            return args[0]  # type: ignore[no-any-return]  # it is a power of two already
        if node.target is eft.capped:
            # The cap is a bf16 number itself, so the smaller of it and a bf16 number fits in a bf16 tile.
            dtype = "bfloat16" if args[0].dtype == "bfloat16" else self._dtype(node)
            return self._binary("minimum", args[0], eft.LARGEST, dtype, node.name)
        if node.target is not operator.mul:  # a product reads halves of a tile where they lie
            args = [self.new("copy", (a,), "float32", node.name) if isinstance(a, View) else a for a in args]
        if node.target in words.ON_HALVES:
            return words.ON_HALVES[node.target](self.new, args, node.name)
        return self._compute(node.target, args, self._dtype(node), node.name)

    def _dtype(self, node: fx.Node) -> str:
        """The type of a value: the one to which all that reads it rounds it, or as which it is stored; else float32."""
        users = [u for u in node.users if u in self.users]
        types = {u.args[1] if u.target in (eft.round_to, eft.narrow) else "fp32" for u in users}
        dtype = storage_named(*types).nki if len(types) == 1 else "float32"
        if dtype != "float32":
            self.rounded.add(node)
        return dtype

    def _compute(self, target: Any, args: list[Any], dtype: str, name: str) -> Operand:
        """The value of an operation with at least one tile among its operands."""
        if target is operator.neg:
            return self._negated(args[0], dtype, name)
        if target is operator.truediv:
            return self._divided(args[0], args[1], dtype, name)
        if target is torch.where:
            return self._selected(args, dtype, name)
        if target is torch.logical_not:
            return self.new("equal", (args[0], 0.0), dtype, name)
        if (op := {eft.sqrt: "sqrt", torch.log: "log"}.get(target)) is not None:
            inside = op == "sqrt" and is_root(args[0])  # the root of a clamped number is in the domain itself
            return self.new(op, (args[0] if inside else self._clamped(args[0], DOMAINS[op], name),), dtype, name)
        # GpSimd's `tensor_tensor` alone has this operator, so an exponent that is a number becomes a tile.
        if target is torch.pow:
            args = [self._tile(a, f"{name}_{i}") for i, a in enumerate(args)]
        if target in ir.POWERS:
            # An exponent is masked in the bits as they lie in the tile: those of a bf16 number, or of an fp32 one.
            x = args[0] if args[0].dtype == "bfloat16" else self._as(args[0], "float32", f"{name}_wide")
            return self.new(ir.POWERS[target], (x,), x.dtype, name)
        if target in ir.BINARY:
            return self._binary(ir.BINARY[target], args[0], args[1], dtype, name)
        if target in ir.UNARY:
            return self.new(ir.UNARY[target], tuple(args), dtype, name)
        raise UnsupportedUpdate(
            f"the update uses {getattr(target, '__name__', target)} (node {name}), for which no NKI instruction is "
            "known; use backend='xla', or add it to passes/backends/nki/legalize.py"
        )

    def _rounded(self, x: Operand, dtype: str, name: str) -> Operand:
        if isinstance(x, Column):
            return _rounded_number(x, dtype, name)
        same = dtype in ("float32", x.dtype if isinstance(x, Value) else None)
        return x if same or not isinstance(x, (Value, View)) else self.new("copy", (x,), dtype, name)

    def _binary(self, op: str, x: Operand, y: Operand, dtype: str, name: str) -> Value:
        """op(x, y), with the tile first where order does not matter, and with negations absorbed: x + -y is x - y."""
        if op in ir.MIRRORED and not isinstance(x, (Value, View)):
            op, x, y = ir.MIRRORED[op], y, x
        if op in ("add", "subtract") and (inner := _negation(y)) is not None:
            return self.new("subtract" if op == "add" else "add", (x, inner), dtype, name)
        if op == "add" and (inner := _negation(x)) is not None:
            return self.new("subtract", (y, inner), dtype, name)
        return self.new(op, (x, y), dtype, name)

    def _negated(self, x: Value, dtype: str, name: str) -> Value:
        """-x."""
        # Of a product with a number, the product with the negated number has the same bits: it is one instruction.
        if x.op == "multiply" and x.dtype == "float32" and not isinstance(x.args[1], Tile):
            return self.new("multiply", (x.args[0], _minus(x.args[1])), dtype, name)
        return self.new("multiply", (x, -1.0), dtype, name)

    def _divided(self, x: Operand, y: Operand, dtype: str, name: str) -> Value:
        if not isinstance(y, Value):
            # No engine divides ([ISA] has no such operator), so the host, or an engine, makes a reciprocal.
            by = Column(target=operator.truediv, args=(1.0, y)) if isinstance(y, Column) else 1.0 / y  # type: ignore[operator]
            return self.new("multiply", (x, by), dtype, name)
        if not isinstance(x, (Value, Column)) and x == 1.0:
            return self._reciprocal(y, dtype, name)
        return self.new("multiply", (x, self._reciprocal(y, "float32", f"{name}_reciprocal")), dtype, name)

    def _reciprocal(self, y: Value, dtype: str, name: str) -> Value:
        """1 / y, on the engine that can compute it."""
        entries = nonnegative(y)
        # A divisor is clamped to the domain of ScalarE's function, which would make 2**-42 of a negative one: that is
        # left to VectorE's reciprocal, which takes any number but is eight times slower.
        if entries is None:
            return self.new("exact_reciprocal", (y,), dtype, name)
        # The host checks these numbers before each step (`Kernel.scalar_input`), and warns of small divisors.
        self.nonnegative |= entries
        self.divisors.append(least(y, self.least))
        guarded = self._guarded_root(y) or self._clamped(y, DOMAINS["reciprocal"], name)
        return self.new("reciprocal", (guarded,), dtype, name)

    def _guarded_root(self, y: Value) -> Value | None:
        """y, recomputed from a clamped square root so that it is in the reciprocal's domain, if y is such a chain."""
        if (found := root_of(y)) is None:
            return None
        (root, *steps), bounds = found
        again = self.new("sqrt", (self._clamped(unguarded(root), bounds, root.name),), root.dtype, root.name)
        for step in steps:
            again = self.new(step.op, (again, step.args[1]), step.dtype, step.name)
        return again

    def _clamped(self, x: Value, domain: tuple[Operand, Operand], name: str) -> Value:
        """x clamped to a domain; values inside it keep their bits."""
        return self.new("clamp", (x, *domain), "float32", f"{name}_domain")

    def _selected(self, args: list[Operand], dtype: str, name: str) -> Operand:
        mask, x, y = args
        if not isinstance(x, Value) and x == y:
            return self._tile(x, name, dtype)
        if words.is_floor(mask, x, y):
            return self._binary("maximum", x, y, dtype, name)
        if not isinstance(mask, Value):  # a comparison of numbers, which is 0 or 1
            # A memset takes constants only, and a number of the step is an input: it is compared with a tile of zeros.
            zero = self.new("fill", (0.0,), "float32", f"{name}_zero")
            mask = self.new("not_equal", (zero, mask), "float32", f"{name}_mask")
        wide = any(isinstance(t, Value) and t.dtype != "bfloat16" for t in (x, y))
        dtype = "float32" if wide else dtype  # a choice of what is not rounded yet; what reads it rounds
        # `tensor_copy_predicated` wants one dtype for source and destination ([ISA]), and overwrites the destination,
        # which others may read: so that is a copy.
        chosen = self._as(self._tile(x, f"{name}_chosen", dtype), dtype, f"{name}_chosen")
        other = self.new("own_copy", (self._tile(y, f"{name}_other", dtype),), dtype, f"{name}_other")
        return self.new("select", (mask, chosen, other), dtype, name)

    def _as(self, x: Value, dtype: str, name: str) -> Value:
        return x if x.dtype == dtype else self.new("copy", (x,), dtype, name)

    def _tile(self, x: Operand, name: str, dtype: str = "float32") -> Value:
        """Makes a number a tile; returns a tile unchanged."""
        if isinstance(x, Value):
            return x
        # No literal of a kernel is infinite: `select` fills in the bits.
        if x == math.inf:
            return self.new("fill", (x,), "float32", name)
        zero = self.new("fill", (0.0,), "float32", f"{name}_zero")
        # A memset takes constants only; a number of the step is an input, which an instruction can add.
        return self.new("add", (zero, x), dtype, name)

    def reachable(self, stores: Mapping[str, Operand], measures: Sequence[Value] = ()) -> Program:
        """The program without dead values, on which no store depends, and no measure."""
        kept = {k: v for k, v in stores.items() if isinstance(v, Value)}
        assert kept.keys() == stores.keys(), f"a number is stored without a tile: {stores}"
        needed = {*kept.values(), *measures}
        for value in reversed(self.values):
            if value in needed:
                needed.update(value.tiles())
        live = [v for v in self.values if v in needed]
        return Program(
            loads=tuple(v for v in live if v.op == "load"),
            phases=in_phases([v for v in live if v.op != "load"], [*kept.values(), *measures]),
            stores=kept,
            nonnegative=frozenset(self.nonnegative),
            measures=tuple(measures),
            divisors=tuple(dict.fromkeys(self.divisors)),
        )


def _rounded_number(x: Column, dtype: str, name: str) -> Column:
    """A number of the step, rounded on the host."""
    if dtype not in ("float32", "bfloat16"):
        raise UnsupportedUpdate(
            f"the update rounds a number of the step to {dtype} (node {name}), which no kernel does yet; use "
            "backend='xla'"
        )
    return Column(target=eft.bf16, args=(x,)) if dtype == "bfloat16" else x


def _negation(x: Operand) -> Value | None:
    """The value of which x is the unrounded negative, or None."""
    if isinstance(x, Value) and x.op == "multiply" and x.dtype == "float32" and x.args[1] == -1.0:
        return x.args[0] if isinstance(x.args[0], Value) else None
    return None


def _minus(x: Operand) -> Operand:
    return Column(target=operator.neg, args=(x,)) if isinstance(x, Column) else -x  # type: ignore[operator]  # a float
