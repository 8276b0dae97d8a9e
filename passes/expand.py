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

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from collage_neuron.formats import Format, format_named
from collage_neuron.passes.arithmetic import ARITHMETICS, Arithmetic, is_param
from collage_neuron.passes.capture import Captured
from collage_neuron.passes.rules import CARRIES, rule_for
from collage_neuron.passes.scalars import Scalar, ScalarProgram
from collage_neuron.passes.spine import spine


@dataclass(frozen=True, eq=False)
class Update:
    """An update in explicit-rounding form: what every backend lowers."""

    graph: fx.GraphModule
    """`forward(*components, *scalars) -> tuple of components`; values between are fp32."""
    inputs: tuple[str, ...]
    """Keys of the components it reads: `param`, `grad`, `exp_avg`, ..., `param_lo`, ... ."""
    outputs: tuple[str, ...]
    """Keys of the components it returns: all but `grad`."""
    scalars: ScalarProgram
    """How the scalar vector is computed from the slots of a step."""
    formats: Mapping[str, Format]
    """Storage format of the parameter and of each state."""


class _Interpreter(fx.Interpreter):
    """Runs the captured graph on values that write the expanded one."""

    def __init__(self, captured: Captured, arithmetic: Arithmetic, inputs: Mapping[str, Any]) -> None:
        super().__init__(torch.nn.Module(), graph=captured.graph)
        self.extra_traceback = False  # a refusal is a sentence; fx would append the node and where it was traced
        self._arithmetic, self._inputs = arithmetic, inputs
        self._spine = spine(captured.graph)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._inputs[str(target)]

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        if n not in self._spine and n.target not in CARRIES:
            args = tuple(self._arithmetic.read(x) if is_param(x) else x for x in args)
        return rule_for(n.target, n.name)(self._arithmetic, *args, **kwargs)


def expand(captured: Captured, formats: Mapping[str, Format], arithmetic: str) -> Update:
    """The update in explicit-rounding form, its states stored in `formats`, in `arithmetic` ("fp32" or "bf16").

    Raises:
        UnsupportedUpdate: an operation has no rule.
    """
    graph, program = fx.Graph(), ScalarProgram()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    formats = {name: fmt for name, fmt in formats.items() if name == "param" or name in captured.states}
    read = [str(n.target) for n in captured.graph.nodes if n.op == "placeholder"]
    stored = {name: formats.get(name, _GRADIENT) for name in read if name == "grad" or name in formats}
    loaded = {key: fx.Proxy(graph.placeholder(key), tracer) for name, fmt in stored.items() for key in fmt.keys(name)}
    entries: list[fx.Proxy] = []
    mark = graph.placeholder("scalars")  # entries are inserted here, before the operations that use them

    def scalar(form: str, value: Scalar) -> fx.Proxy:
        index = program.index(form, value)
        if index == len(entries):
            with graph.inserting_before(mark):
                entries.append(fx.Proxy(graph.placeholder(f"c{index}"), tracer))
        return entries[index]

    a = ARITHMETICS[arithmetic](scalar)
    values = {name: a.load(name, fmt, [loaded[k] for k in fmt.keys(name)]) for name, fmt in stored.items()}
    slots = {name: Scalar.slot(int(name[1:])) for name in read if name not in values}
    result = _Interpreter(captured, a, values | slots).run()
    outputs: dict[str, fx.Proxy] = {}
    for name, fmt in formats.items():
        words = a.store(_shaped(a, result[name], values["param"]), fmt)
        outputs |= dict(zip(fmt.keys(name), words, strict=True))
    graph.output(tuple(v.node for v in outputs.values()))
    graph.erase_node(mark)
    graph.eliminate_dead_code()
    module = fx.GraphModule(torch.nn.Module(), graph)
    return Update(module, tuple(loaded), tuple(outputs), program, formats)


_GRADIENT = format_named("bf16")  # a gradient is read as it comes, bf16 or fp32; never stored


def _shaped(a: Arithmetic, value: Any, param: Any) -> Any:
    """A state that the update sets to one number becomes a value of the parameter's shape."""
    if not isinstance(value, Scalar):
        return value
    number, like = a.read(value), a.read(param)
    return torch.where(like == like, number, number)
