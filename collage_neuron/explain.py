"""`explain`: what the compiler made of an optimizer, as text: formats, bytes, the captured and the rewritten graph."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx
from torch.optim import Optimizer

from collage_neuron import engine
from collage_neuron.optimizer import Compiled, base_of
from collage_neuron.settings import Settings


def _jobs(optimizer: Optimizer) -> Iterator[tuple[int, engine.Job]]:
    """One plan a group, for its first parameter, as if it had a gradient."""
    if not isinstance(optimizer, Compiled):
        raise TypeError(f"{type(optimizer).__name__} is not compiled; pass it to collage_neuron.compile first")
    for i, group in enumerate(optimizer.param_groups):
        if group["params"]:
            yield i, engine.plan_update(base_of(type(optimizer)), optimizer, group, group["params"][:1])


def bytes_per_parameter(optimizer: Optimizer) -> float:
    """Bytes a parameter that training with `optimizer` keeps: parameter, gradient and states, averaged over all."""
    total = count = 0
    for _, job in _jobs(optimizer):
        size = sum(p.numel() for p in job.group["params"])
        total += size * _bytes(job)
        count += size
    return total / count


def _bytes(job: engine.Job) -> int:
    p = job.params[0]
    gradient = p.dtype if p.grad is None else p.grad.dtype
    return gradient.itemsize + sum(fmt.bytes for fmt in job.update.formats.values())


def explain(optimizer: Optimizer) -> str:
    """Readable text: for each group its settings, storage formats, bytes a parameter, and both graphs."""
    return "\n".join(_explain_group(i, job) for i, job in _jobs(optimizer))


def _explain_group(index: int, job: engine.Job) -> str:
    settings = Settings.of(job.group)
    rows = [f"  {name:<18} {fmt.name:<10} {fmt.bytes} bytes" for name, fmt in job.update.formats.items()]
    gradient = _bytes(job) - sum(fmt.bytes for fmt in job.update.formats.values())
    head = (
        f"param_groups[{index}]: strategy {settings.strategy}, arithmetic {settings.arithmetic}, "
        f"backend {job.backend}, {_bytes(job)} bytes a parameter"
    )
    return "\n".join(
        [
            head,
            *rows,
            f"  {'grad':<18} {'as it comes':<10} {gradient} bytes",
            "captured update (every number a slot):",
            format_graph(job.recording.captured.graph),
            "slots of this step: " + ", ".join(f"s{i} = {v:.9g}" for i, v in enumerate(job.recording.slots)),
            "scalar vector (doubles on the host, rounded once):",
            *(f"  {line}" for line in str(job.update.scalars).splitlines()),
            "rewritten update (fp32 values, every rounding a round_to):",
            format_graph(job.update.graph.graph),
        ]
    )


def format_graph(graph: fx.Graph) -> str:
    """A graph, one line a node: `name = operation(operands)`."""
    return "\n".join(f"  {line}" for line in map(_format_node, graph.nodes) if line)


def _format_node(node: fx.Node) -> str:
    if node.op == "placeholder":
        return ""
    if node.op == "output":
        return f"return {_format_value(node.args[0])}"
    operands = [_format_value(x) for x in node.args] + [f"{k}={_format_value(v)}" for k, v in node.kwargs.items()]
    return f"{node.name} = {_name(node.target)}({', '.join(operands)})"


def _name(target: Any) -> str:
    return str(target) if isinstance(target, torch._ops.OpOverload) else target.__name__


def _format_value(x: Any) -> str:
    if isinstance(x, dict):
        return "{" + ", ".join(f"{k}: {_format_value(v)}" for k, v in x.items()) + "}"
    if isinstance(x, (tuple, list)):
        return "(" + ", ".join(map(_format_value, x)) + ")"
    return str(x)
