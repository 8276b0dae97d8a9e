"""The schedule of an update with blocks: how many passes over a block there are, and what is computed in which.

The maximum of a block is known after a pass over its elements, so what depends on it needs another one. All passes of a
block follow one another, while its words are in the cache. What is the same for all elements of a block is computed
between passes, once. A value that a later pass needs is kept in a buffer, unless it is as easy to compute there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch.fx as fx

from collage_neuron.numerics.eft import block_max
from collage_neuron.numerics.reductions import REDUCTIONS
from collage_neuron.passes.ir.update import Update


@dataclass
class Schedule:
    """When each node of an update is computed."""

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
