"""The pass `expand`: rewrites captured operations in an arithmetic, on values decoded from the storage formats."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.errors import UnsupportedUpdate, pointing_at
from collage_neuron.numerics.eft import Value
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.reductions import ELEMENT, NUMBER
from collage_neuron.passes.analysis.parameter_path import spine
from collage_neuron.passes.ir.scalars import Scalar
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.ir.values import lift
from collage_neuron.passes.rewrite.arithmetic import Arithmetic, Fp32Arithmetic, total_increment
from collage_neuron.passes.rewrite.bf16_arithmetic import Bf16Arithmetic
from collage_neuron.passes.rewrite.graph_writer import Writer
from collage_neuron.passes.rewrite.round_and_store import word_keys
from collage_neuron.passes.rewrite.rules import CARRIES, rule_for
from collage_neuron.passes.rewrite.split_stages import places

ARITHMETICS: dict[str, type[Arithmetic]] = {a.name: a for a in (Fp32Arithmetic, Bf16Arithmetic)}
"""By name."""

_GRADIENT = format_named("bf16")  # a gradient is read as it comes, bf16 or fp32; never stored


@dataclass(frozen=True)
class Expand:
    """Writes every captured operation in an arithmetic, on the values that the stored components stand for.

    Given: SGD, with `param` stored as bf16x2::

        add_tensor = aten.add.Tensor(param, grad, alpha=s0)
        return {param: add_tensor}

    Result, in the arithmetic "fp32": what is added to a parameter is added once, to the value of both its words, of
    which the second one is at most half a place of the first (`half_a_place`), whoever wrote that::

        c0 = fp32(s0)
        widen = widen(param)
        widen_1 = widen(param_lo)
        power_of_two = power_of_two(widen)
        mul = mul(power_of_two, 0.00390625)
        neg = neg(mul)
        maximum = maximum(widen_1, neg)
        minimum = minimum(maximum, mul)
        add = add(widen, minimum)
        widen_2 = widen(grad)
        mul_1 = mul(widen_2, c0)
        add_1 = add(add, mul_1)
        return (add_1) as (param)

    In the arithmetic "bf16" every operation rounds, and a value of two words stays two: `param[0]`, `param[1]`.
    """

    name: ClassVar[str] = "expand"
    formats: Mapping[str, Format] = field(hash=False)  # a mapping has no hash
    """The formats of the parameter and of each state of the update; others are ignored."""
    arithmetic: str
    """A key of ARITHMETICS."""
    measured: frozenset[str] = frozenset()
    """Names whose wanted values are returned too, after the outputs (`_wanted`)."""
    far: frozenset[Scalar] = frozenset()
    """The factors among `Update.decisive` that are nearer to 0 than to 1."""

    def __call__(self, captured: Captured) -> Update:
        """The expanded update; its outputs are values that are not yet rounded for storage.

        Raises:
            UnsupportedUpdate: an operation has no rule, or the arithmetic has no states of one number.
        """
        if captured.small and self.arithmetic != "fp32":
            raise UnsupportedUpdate(
                f"the update keeps optimizer.state[p][{captured.small[0]!r}], one number computed from tensors, which "
                f"arithmetic={self.arithmetic!r} does not define; use arithmetic='fp32'"
            )
        formats = {n: fmt for n, fmt in self.formats.items() if n == "param" or n in captured.states}
        extents = {name: captured.extent_of(name) for name in captured.small}
        writing = _Writing(captured.graph, formats, extents, self.far)
        run = writing.run(captured.graph, self.arithmetic)
        outputs: dict[str, Value] = {}
        for name, fmt in formats.items():
            writing.writer.begin(f"new {name}")
            outputs |= _outputs(run, name, fmt)
        if "grad" in run.after:
            outputs["grad"] = run.arithmetic.read(run.after["grad"])
        small = [_number(run.arithmetic, run.after[name]) for name in captured.small]
        wanted = {name: None for name in formats if name in self.measured}
        writing.writer.begin("wanted values")
        body = writing.writer.finish([*outputs.values(), *small, *_wanted(writing, captured.graph, run, wanted)])
        return Update.elementwise(
            body, tuple(writing.writer.inputs), tuple(outputs), writing.writer.scalars, formats, captured.small,
            wanted=tuple(wanted), stored=False, reads_small=tuple(writing.writer.small),
            extents={name: extent for name, extent in extents.items() if extent != NUMBER},
            seen_as=captured.seen_as, decisive=tuple(run.arithmetic.decisive), far=self.far,
        )  # fmt: skip


class _Interpreter(fx.Interpreter):
    """Runs the captured graph on values that write the expanded one."""

    def __init__(
        self, graph: fx.Graph, arithmetic: Arithmetic, inputs: Mapping[str, Any], begin: Callable[[str], None]
    ) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.extra_traceback = False  # a refusal is a sentence; fx would append the node and where it was traced
        self._arithmetic, self._inputs, self._begin = arithmetic, inputs, begin
        self._spine = spine(graph)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._inputs[str(target)]

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        self._begin(n.name)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        # `g + p * wd` must not add to p: only on the way from the old parameter to the new one is p an accumulator.
        if n not in self._spine and n.target not in CARRIES:
            args = tuple(lift(x).off_path(self._arithmetic) for x in args)
        with pointing_at(n.meta.get("place")):
            return rule_for(n.target, n.name)(self._arithmetic, *args, **kwargs)


class _Run(NamedTuple):
    """The values of a captured graph before and after the update, by name, in an arithmetic."""

    arithmetic: Arithmetic
    before: Mapping[str, Any]
    after: Mapping[str, Any]


class _Writing:
    """The expanded graph under construction, and the values that it reads."""

    def __init__(
        self, graph: fx.Graph, formats: Mapping[str, Format], small: Mapping[str, str], far: frozenset[Scalar]
    ) -> None:
        self._far = far
        read = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
        self._stored = {n: formats.get(n, _GRADIENT) for n in read if n == "grad" or n in formats}
        self._small = small
        numbers = [name for name in read if name in small]
        self._slots = {name: Scalar.slot(int(name[1:])) for name in read if name not in {*self._stored, *numbers}}
        self.writer = Writer([key for name, fmt in self._stored.items() for key in fmt.keys(name)], numbers)

    def run(self, graph: fx.Graph, arithmetic: str) -> _Run:
        """Writes the operations of a captured graph in an arithmetic."""
        a = ARITHMETICS[arithmetic](self.writer.scalar, self._far)
        before = {}
        for name, fmt in self._stored.items():
            self.writer.begin(f"read {name}")
            before[name] = a.load(name, fmt, [self.writer.inputs[key] for key in fmt.keys(name)])
        after = _Interpreter(graph, a, before | self._slots | self.writer.small, self.writer.begin).run()
        alike = self.numbers()
        shaped = {k: v if k in self._small else _shaped(a, v, before["param"], alike) for k, v in after.items()}
        return _Run(a, before, shaped)

    def numbers(self) -> Collection[fx.Node]:
        """The nodes that reductions, or states without a value for each element, made the same for several."""
        place_of = places(self.writer.graph, self.writer.inputs, self._small)
        of_small = {x.node for x in self.writer.small.values()}
        for node in self.writer.graph.nodes:
            of_small |= {node} if not of_small.isdisjoint(node.all_input_nodes) else set()
        is_shared = {node for node, place in place_of.items() if place.extent != ELEMENT}
        return {node for node in is_shared if place_of[node].level or node in of_small}


def _outputs(run: _Run, name: str, fmt: Format) -> dict[str, Value]:
    """The new value of `name`, or its words if it has as many as its format has components."""
    value = run.after[name]
    words = lift(value).kept(len(fmt.components))
    if words:
        return dict(zip(word_keys(name, fmt), words, strict=True))
    return {name: run.arithmetic.read(value)}


def _wanted(writing: _Writing, graph: fx.Graph, run: _Run, names: Collection[str]) -> list[Value]:
    """The wanted values: for the parameter, the raw update; for a state, the value that it should have next."""
    wanted: dict[str, Value] = {name: total_increment(run.after[name]) for name in names}
    rest = [name for name, value in wanted.items() if value is None]
    # What a state should be is computed in fp32 from the same stored values, since bf16 arithmetic rounds every
    # operation.
    if rest and run.arithmetic.name != "fp32":
        run = writing.run(part_of(graph, rest), "fp32")
    read = run.arithmetic.read
    for name in rest:
        value = read(run.after[name])
        wanted[name] = value - read(run.before[name]) if name == "param" else value
    alike = writing.numbers()
    return [_shaped(run.arithmetic, value, run.before["param"], alike) for value in wanted.values()]


def part_of(graph: fx.Graph, names: Collection[str]) -> fx.Graph:
    """A copy of a captured graph that returns only the values called `names`."""
    part = fx.Graph()
    outputs: Any = part.graph_copy(graph, {})
    part.output({name: outputs[name] for name in names})
    part.eliminate_dead_code()
    return part


def _number(a: Arithmetic, value: Any) -> Value:
    """The new value of a state of one number."""
    number = a.read(value)
    # Stages give results of operations, and a number of the host is an input: the larger of it and itself is exact.
    return number if lift(value).host is None else torch.maximum(number, number)


def _shaped(a: Arithmetic, value: Any, param: Any, alike: Collection[fx.Node]) -> Any:
    """A state that the update sets to one number becomes a value of the parameter's shape."""
    if lift(value).host is None and getattr(value, "node", None) not in alike:
        return value
    number, like = a.read(value), a.read(param)
    return torch.where(like == like, number, number)  # an operation that no pass folds, of the parameter's shape
