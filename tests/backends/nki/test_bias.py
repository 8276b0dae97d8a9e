"""What a dropped bias would do: no kernel for trn1 depends on that of a copy, and the probes ask for it elsewhere.

aws-neuron-sdk#1296: on a trn1 `nisa.activation` with `nl.copy` did not add its bias, so Adam's eps was lost. Evidence
level: stand-in (`Device.drops_bias`; every kernel for trn1 that `nki_runs.run` runs is on such a device) and
independent interpreter (`second_reader`, where a copy adds nothing).
"""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from nki_runs import run

from collage_neuron.numerics.eft import narrow, sqrt
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.passes.backends.nki.lower import Kernel, lower_to_nki
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Update

pytestmark = pytest.mark.usefixtures("short_search")


def biased(k: Kernel) -> list[str]:
    """The functions that add a bias in a kernel."""
    return [i["op"] for _, i in k.plan.steps if i["bias"] is not None]


def test_where_the_sign_is_not_known_the_vector_engine_adds() -> None:
    """The number may be negative: it is in no divisor, so that the host does not check it."""
    graph = fx.Graph()
    x, c = (fx.Proxy(graph.placeholder(name), fx.proxy.GraphAppendingTracer(graph)) for name in ("x", "c0"))
    graph.output((narrow(sqrt(x) + c, "fp32").node,))
    program = ScalarProgram([("fp32", Scalar.slot(0))])
    update = Update.elementwise(graph, ("x",), ("y",), program, dict.fromkeys("xy", FORMATS["fp32"]))
    k = lower_to_nki(update)
    assert not biased(k)
    found = run(k, {"x": torch.tensor([1.0, 4.0])}, torch.tensor([-3.0])).results
    assert found["y"].tolist() == [-2.0, -1.0]
