"""What random bits cost on Trainium, in Markdown: computed by Threefry, or drawn by the vector engine's generator."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch.fx as fx

from collage_neuron.cli.kernel_costs import markdown
from collage_neuron.numerics.threefry import Words, threefry
from collage_neuron.passes.backends.nki.hardware import TARGETS, Access, Generation, Shape, cost_of

CHUNK = 512
TITLES = ("random bits of an element", "target", "vector ns", "gpsimd ns", "together ns")


def table(targets: Iterable[str] = TARGETS) -> str:
    """The table: nanoseconds a column. GpSimd and the vector engine take turns where they share a port to SBUF."""
    rows = [row for t in targets for row in (_row("Threefry, up to four draws", t, _threefry(TARGETS[t])),
                                             _row("the generator, one draw", t, _drawn(TARGETS[t])))]  # fmt: skip
    return markdown(TITLES, rows)


def _row(name: str, target: str, times: Mapping[str, float]) -> list[str]:
    vector, gpsimd = times.get("vector", 0.0), times.get("gpsimd", 0.0)
    together = vector + gpsimd if TARGETS[target].shared_ports else max(vector, gpsimd)
    return [name, target, *(f"{x:.1f}" for x in (vector, gpsimd, together))]


def _drawn(g: Generation) -> dict[str, float]:
    shape = Shape("", (), Access("uint16", "sbuf"))
    return {"vector": cost_of("rng", "vector", shape, g).time(g, CHUNK)}


def _threefry(g: Generation) -> dict[str, float]:
    """Sums that wrap are GpSimd's, operations on bits the vector engine's."""
    times: dict[str, float] = defaultdict(float)
    word = Access("int32", "sbuf")
    for op, tiles in _operations():
        kind, engine = ("tensor_tensor", "gpsimd") if op == "add" else ("tensor_scalar", "vector")
        kind = "tensor_tensor" if tiles == 2 else kind
        times[engine] += cost_of(kind, engine, Shape(f"bitwise_{op}", (word,) * tiles, word), g).time(g, CHUNK)
    return times


def _operations() -> Iterator[tuple[str, int]]:
    """The operations of one call on the number of an element, and how many of their operands are tiles."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    index, *others = (fx.Proxy(graph.placeholder(n), tracer) for n in ("index", "k0", "k1", "stream"))
    threefry(Words(others[0], others[1]), Words(index, others[2]))
    tiles = {index.node}
    for node in graph.nodes:
        used = sum(x in tiles for x in node.all_input_nodes)
        if used:
            tiles.add(node)
            yield "add" if node.target is operator.add else str(node.name), used
