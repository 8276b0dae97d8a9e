"""Expand: rewrites a captured update into explicit-rounding form, with each state in its storage format.

Given: `addcdiv = aten.addcdiv(mul, lerp, add, value=s6)`, `param` stored as bf16x2
Result::

    widen = widen(param);  widen_1 = widen(param_lo)
    param_value = widen + widen_1
    ...
    round_to = round_to(x, "bf16");  narrow = narrow(round_to, "bf16")          -> param
    sub = x - round_to;  round_to_1 = round_to(sub, "bf16");  narrow_1 = ...    -> param_lo
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from collage_neuron.errors import pointing_at
from collage_neuron.numerics.eft import Value
from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.passes.analysis.parameter_path import spine
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.rewrite.arithmetic import ARITHMETICS, Arithmetic, is_param, total_increment
from collage_neuron.passes.rewrite.random_bits import Randomness
from collage_neuron.passes.rewrite.rules import CARRIES, rule_for


class _Interpreter(fx.Interpreter):
    """Runs the captured graph on values that write the expanded one."""

    def __init__(self, graph: fx.Graph, arithmetic: Arithmetic, inputs: Mapping[str, Any]) -> None:
        super().__init__(torch.nn.Module(), graph=graph)
        self.extra_traceback = False  # a refusal is a sentence; fx would append the node and where it was traced
        self._arithmetic, self._inputs = arithmetic, inputs
        self._spine = spine(graph)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._inputs[str(target)]

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n not in self._spine and n.target not in CARRIES:
            args = tuple(self._arithmetic.read(x) if is_param(x) else x for x in args)
        with pointing_at(n.meta.get("place")):
            return rule_for(n.target, n.name)(self._arithmetic, *args, **kwargs)


class _Run(NamedTuple):
    """What a captured graph starts with and ends with, by name, in an arithmetic."""

    arithmetic: Arithmetic
    before: Mapping[str, Any]
    after: Mapping[str, Any]


class _Writer:
    """The expanded graph under construction: its inputs, and what captured operations become in it."""

    def __init__(self, graph: fx.Graph, formats: Mapping[str, Format]) -> None:
        self.graph, self.program = fx.Graph(), ScalarProgram()
        self._tracer = fx.proxy.GraphAppendingTracer(self.graph)
        read = [str(n.target) for n in graph.nodes if n.op == "placeholder"]
        self._stored = {n: formats.get(n, _GRADIENT) for n in read if n == "grad" or n in formats}
        keys = [key for name, fmt in self._stored.items() for key in fmt.keys(name)]
        self.components = {key: self._placeholder(key) for key in keys}
        self._index = self._placeholder("index")
        self._random = Randomness(self._scalar, lambda: self._index)
        self._slots = {name: Scalar.slot(int(name[1:])) for name in read if name not in self._stored}
        self._entries: list[fx.Proxy] = []
        self._mark = self.graph.placeholder("scalars")  # entries go here, before the operations that use them

    def _placeholder(self, name: str) -> fx.Proxy:
        return fx.Proxy(self.graph.placeholder(name), self._tracer)

    def _scalar(self, form: str, value: Scalar) -> fx.Proxy:
        index = self.program.index(form, value)
        if index == len(self._entries):
            with self.graph.inserting_before(self._mark):
                self._entries.append(self._placeholder(f"c{index}"))
        return self._entries[index]

    def run(self, graph: fx.Graph, arithmetic: str) -> _Run:
        """Writes what a captured graph does, in an arithmetic."""
        a = ARITHMETICS[arithmetic](self._scalar, self._random)
        before = {
            name: a.load(name, fmt, [self.components[key] for key in fmt.keys(name)])
            for name, fmt in self._stored.items()
        }
        after = _Interpreter(graph, a, before | self._slots).run()
        return _Run(a, before, {name: _shaped(a, value, before["param"]) for name, value in after.items()})

    def finish(self, results: Iterable[fx.Proxy]) -> fx.Graph:
        """The graph that returns `results`."""
        self.graph.output(tuple(v.node for v in results))
        self.graph.erase_node(self._mark)
        self.graph.eliminate_dead_code()
        self.draws = bool(self._index.node.users)
        if not self.draws:
            self.graph.erase_node(self._index.node)
        return self.graph


_GRADIENT = format_named("bf16")  # a gradient is read as it comes, bf16 or fp32; never stored


def expand(captured: Captured, formats: Mapping[str, Format], arithmetic: str, wanted: Collection[str] = ()) -> Update:
    """The update in explicit-rounding form, its states stored in `formats`, in `arithmetic` ("fp32" or "bf16").

    For each of the names `wanted` it also returns what the update wants of it (`_wanted`).

    Raises:
        UnsupportedUpdate: an operation has no rule.
    """
    formats = {name: fmt for name, fmt in formats.items() if name == "param" or name in captured.states}
    writer = _Writer(captured.graph, formats)
    run = writer.run(captured.graph, arithmetic)
    outputs: dict[str, fx.Proxy] = {}
    for name, fmt in formats.items():
        outputs |= dict(zip(fmt.keys(name), run.arithmetic.store(name, run.after[name], fmt), strict=True))
    if "grad" in run.after:  # the step writes to it: stored as the parameter's first word is, which has its dtype
        stored = format_named(formats["param"].components[0].storage)
        outputs["grad"] = stored.encode(run.arithmetic.read(run.after["grad"]))[0]
    names = tuple(name for name in formats if name in wanted)
    body = writer.finish([*outputs.values(), *_wanted(writer, captured.graph, run, names)])
    return Update.elementwise(
        body, tuple(writer.components), tuple(outputs), writer.program, formats, wanted=names, draws=writer.draws
    )


def _wanted(writer: _Writer, graph: fx.Graph, run: _Run, names: Collection[str]) -> list[fx.Proxy]:
    """Of the parameter what the update adds to it, before it is added; of a state the value it should have next.

    The latter is what fp32 arithmetic makes of the same stored values: in bf16 arithmetic nothing unrounded is left.
    """
    found: dict[str, Value] = {name: total_increment(run.after[name]) for name in names}
    rest = [name for name, value in found.items() if value is None]
    if rest and run.arithmetic.name != "fp32":
        run = writer.run(part_of(graph, rest), "fp32")
    read = run.arithmetic.read
    for name in rest:
        value = read(run.after[name])
        found[name] = value - read(run.before[name]) if name == "param" else value
    return list(found.values())


def part_of(graph: fx.Graph, names: Collection[str]) -> fx.Graph:
    """A copy of a captured graph that returns the values called `names` alone."""
    part = fx.Graph()
    outputs: Any = part.graph_copy(graph, {})
    part.output({name: outputs[name] for name in names})
    part.eliminate_dead_code()
    return part


def _shaped(a: Arithmetic, value: Any, param: Any) -> Any:
    """A state that the update sets to one number becomes a value of the parameter's shape."""
    if not isinstance(value, Scalar):
        return value
    number, like = a.read(value), a.read(param)
    return torch.where(like == like, number, number)
