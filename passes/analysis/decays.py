"""By how much a step shrinks a value: 1 minus the coefficient of the old value in the new one, by the step's numbers.

Given::

    v = exp_avg_sq * s1 + grad * grad * s2;  param * s0 + s3 * m / v.sqrt()

Result: with s0 = 1 - 1e-6 and s1 = .999, `param` decays by 1e-6, `exp_avg_sq` by 1e-3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.fx as fx

from collage_neuron.passes.analysis.value_numbering import Values
from collage_neuron.passes.ir.stage import returned


def decays(graph: fx.Graph, slots: Sequence[float]) -> Mapping[str, float]:
    """The decay of the parameter (`param`) and of each state that has one, above 0 and below 1.

    Of a value that a mask decides about, it is the largest. `slots` are the numbers of the step.
    """
    outputs = returned(graph)
    assert isinstance(outputs, dict)
    values = Values(graph, numbers={f"s{i}": x for i, x in enumerate(slots)})
    named = {name: max(_of(values, node, name), default=0.0) for name, node in outputs.items() if name != "grad"}
    return {name: decay for name, decay in named.items() if decay}


def _of(values: Values, node: fx.Node, name: str) -> Iterator[float]:
    (own,) = values.atom("input", name=name)
    for leaf in values.alternatives(values.of[node], name):
        kept = leaf.get(own)
        if kept is not None and 0 < kept < 1:
            yield 1 - kept
