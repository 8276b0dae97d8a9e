"""Legalizes a reduction stage: what it adds up is computed as in an elementwise stage, and nothing is stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch.fx as fx

from collage_neuron.numerics.tensor_sums import OF_TENSOR
from collage_neuron.passes.backends.nki.chunk_sums import Sum, sum_of_chunk
from collage_neuron.passes.backends.nki.ir import Pieces, Program
from collage_neuron.passes.backends.nki.legalize import Builder
from collage_neuron.passes.ir.update import Update


def reduction_of(update: Update, storage: Mapping[str, str]) -> Program:
    """The values of a reduction stage, which is all of `update` (one of `Update.parts`).

    Raises:
        UnsupportedUpdate: an operation has no instruction.
    """
    return _Reduction(update, storage).reduced()


class _Reduction(Builder):
    """Translates the graph of a reduction."""

    def reduced(self) -> Program:
        """What is found of each chunk."""
        self.users = set(self.nodes)
        sums = []
        for node in self.nodes:
            if node.op == "placeholder":
                self.env[node] = self.placeholder(str(node.target))
            elif node.target in OF_TENSOR:
                sums.append(self._sum(node))
            elif node.op == "call_function":
                self.env[node] = self.call(node)
        measures = list(dict.fromkeys(v for s in sums for v in (s.unit, s.inverse, *(total for total, _ in s.totals))))
        at = measures.index
        found = [Pieces(at(s.unit), at(s.inverse), tuple((at(v), factor) for v, factor in s.totals)) for s in sums]
        return replace(self.reachable({}, measures), sums=tuple(found))

    def _sum(self, node: fx.Node) -> Sum:
        x = self.each(node)
        if x.dtype not in ("float32", "bfloat16"):
            x = self.new("copy", (x,), "float32", f"{node.name}_wide")
        return sum_of_chunk(self.new, x, OF_TENSOR[node.target].is_square, node.name)
