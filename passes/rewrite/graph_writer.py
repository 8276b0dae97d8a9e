"""The writer of a graph: keeps its inputs in order while passes add operations.

A body reads the components first, then `index` (the indices of the elements), then the entries of the scalar vector,
then the states of one number. A pass requests an entry, or the indices, when it needs them; the writer inserts them in
their place among the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch.fx as fx

from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Update


class _Tracer(fx.proxy.GraphAppendingTracer):
    """Writes into each operation what it is part of: `meta["part"]`, for those who read the graph."""

    part = ""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["part"] = self.part
        return node


class Writer:
    """Writes a graph; `graph`, `scalars` and `draws` then become those of an `Update`."""

    def __init__(self, inputs: Sequence[str], small: Sequence[str] = ()) -> None:
        self.graph, self.scalars = fx.Graph(), ScalarProgram()
        self._tracer = _Tracer(self.graph)
        self.inputs = {name: self.proxy(self.graph.placeholder(name)) for name in inputs}
        # Indices and entries that a pass asks for later go behind this input: backends pass them in that order.
        self._component = self.inputs[inputs[-1]].node
        self.small = {name: self.proxy(self.graph.placeholder(name)) for name in small}
        self._index: fx.Proxy | None = None
        self._entries: list[fx.Proxy] = []

    @classmethod
    def after(cls, update: Update) -> tuple[Writer, list[fx.Proxy]]:
        """A writer that continues the only stage of `update`, and the results of that stage."""
        writer = cls(update.inputs, update.reads_small)
        # Both lists are in the order of the placeholders: components, indices, entries, states of one number.
        old = [n for n in update.only_stage.body.nodes if n.op == "placeholder"]
        new = [x.node for x in writer.inputs.values()]
        if update.draws:
            new.append(writer.index.node)
        new += [writer.scalar(form, value).node for form, value in update.scalars.entries]
        new += [x.node for x in writer.small.values()]
        results: Any = writer.graph.graph_copy(update.only_stage.body, dict(zip(old, new, strict=True)))
        return writer, [writer.proxy(n) for n in results]

    def begin(self, part: str) -> None:
        """Names what the operations after this are part of."""
        self._tracer.part = part

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """A value of the graph; operations on it are written."""
        return fx.Proxy(node, self._tracer)

    def scalar(self, form: str, value: Scalar) -> fx.Proxy:
        """The entry of the scalar vector that holds `value` in `form`."""
        number = self.scalars.index(form, value)
        if number == len(self._entries):
            before = self._entries[-1] if self._entries else self._index  # in the order of the vector
            self._entries.append(self._input(f"c{number}", self._component if before is None else before.node))
        return self._entries[number]

    @property
    def index(self) -> fx.Proxy:
        """The indices of the elements."""
        if self._index is None:
            self._index = self._input("index", self._component)
        return self._index

    @property
    def draws(self) -> bool:
        """Returns True if the graph reads them."""
        return self._index is not None

    def _input(self, name: str, before: fx.Node) -> fx.Proxy:
        with self.graph.inserting_after(before):
            return self.proxy(self.graph.placeholder(name))

    def finish(self, results: Iterable[fx.Proxy]) -> fx.Graph:
        """The graph, which returns `results`."""
        self.graph.output(tuple(x.node for x in results))
        return self.graph
