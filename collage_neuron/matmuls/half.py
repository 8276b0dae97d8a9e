"""A rewritten forward or backward graph that is ready to run, in two forms: as it is, and measuring its operands."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import GraphModule

from collage_neuron.matmuls.pace import Pace
from collage_neuron.matmuls.scales import size_of
from collage_neuron.passes.scaling.rewrite import rewrite

if TYPE_CHECKING:
    from collage_neuron.matmuls.capture import Captured


class Half:
    """Called with a list of inputs, as torch's partitioned graphs are."""

    _boxed_call = True  # torch then gives the list itself, and frees what it holds

    def __init__(self, graph: Captured, module: GraphModule, rescale: int) -> None:
        self.graph = graph
        self.source = module
        self.rescale = rescale
        self.calls = 0
        self.plain = rewrite(module)
        self.measuring: GraphModule | None = None
        before = {name for half in graph.halves for name in half.plain.names}
        self.measured = [name for name in self.plain.names if name not in before] if rescale else []
        """The operands that this half measures: the forward half has measured the others."""
        wanted = [n.name for n in graph.plan.tangents]
        holders = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        self.tangents = [holders.index(name) for name in wanted if name in holders]
        self.assumed = bool(self.tangents)
        """True while the sizes of the gradients that come in are assumed to be 1."""
        self.powers: Tensor | None = None  # made at the first call: while torch traces, tensors are fake
        self.pace = Pace(rescale)

    def load(self) -> None:
        """Takes the scales as they are now."""
        self.powers = self.graph.backend.scales.powers([self.graph.key(name) for name in self.plain.names])

    @property
    def due(self) -> bool:
        """Returns True if this call is to measure."""
        return bool(self.measured) and self.pace.due(self.calls)

    def __call__(self, args: list[Any]) -> Any:
        self.graph.backend.calls += 1
        self.calls += 1
        if self.assumed:
            self._look_at(args)
        if self.powers is None:
            self.load()
        self.pace.look_back()
        if not self.due:
            return self._run(self.plain.module, args)
        if self.measuring is None:
            self.measuring = rewrite(self.source, self.measured).module
        *results, seen = self._run(self.measuring, args)
        self.graph.backend.scales.follow([self.graph.key(name) for name in self.measured], seen)
        self.pace.measured(self.calls, seen)
        self.graph.backend.reload()
        return results

    def _look_at(self, args: list[Any]) -> None:
        """Measures the gradients of the outputs, on which all others depend, unless they are zero or not finite."""
        sizes = [size_of(args[i]) for i in self.tangents]
        if any(s.log == math.inf or math.isnan(s.log) for s in sizes) or all(s.log == -math.inf for s in sizes):
            return
        self.assumed = False
        self.graph.assume(sizes)
        self.graph.backend.reload()

    def _run(self, module: GraphModule, args: list[Any]) -> Any:
        given = [self.powers, *args]
        args.clear()
        return module.forward(*given)
