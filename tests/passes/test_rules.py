"""Each rule: its golden text in both arithmetics, and its value against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
from one_operation import ONE_OP, SLOT, captured, expanded, op

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.passes.ir.printer import format_graph
from collage_neuron.passes.rewrite.expand import Expand
from collage_neuron.passes.rewrite.rules import RULES, rule

pytestmark = pytest.mark.usefixtures("rejecting")

aten = torch.ops.aten


@pytest.mark.parametrize("name", ONE_OP)
def test_golden_text(name: str, golden: Callable[[str, str], None]) -> None:
    parts = []
    for arithmetic in ("fp32", "bf16"):
        one, two = (written(expanded(name, arithmetic, state).graph.graph) for state in ("bf16", "bf16x2"))
        if one == two:
            parts += [f"{arithmetic} arithmetic", one]
        else:
            parts += [f"{arithmetic} arithmetic, state in bf16", one, f"{arithmetic} arithmetic, state in bf16x2", two]
    golden(f"rule_{name}.txt", "\n".join(parts))


def written(graph: fx.Graph) -> str:
    """What the rule writes, and what is stored of it: the lines of the operation, without those that load and store."""
    parts = {n: n.meta["part"].partition(" ")[0] for n in graph.nodes if n.op == "call_function"}
    own = {n.name for n, part in parts.items() if part not in ("read", "new", "store")}
    stored = [n for n in graph.nodes if n.meta.get("part") == "store state"]
    given = dict.fromkeys(x.name for n in stored for x in n.all_input_nodes if x not in stored)
    lines = [line for line in format_graph(graph).splitlines() if line.split()[0] in own]
    return "\n".join([*lines, f"  store {', '.join(given)}"])


def test_every_rule_has_a_case() -> None:
    """Aliases (Scalar overloads, detach and the like) share the rule of an operation that has one."""
    tested = {RULES[node.target] for body in ONE_OP.values() for node in captured(body).graph.nodes
              if node.op == "call_function"}  # fmt: skip
    untested = {f.__name__ for f in RULES.values() if f not in tested}
    # Reductions are tested in test_reductions.py, those over rows and columns in tests/optimizers/test_rows.py.
    of_rows = {"sum_of_rows", "mean_of_rows", "norm_of_rows"}
    # What processes do together is tested in tests/distributed/test_traced.py.
    assert untested == {"sum_all", "mean_all", "norm_all", "of_processes", *of_rows}


@pytest.mark.parametrize("state", ["bf16", "bf16x2"])
@pytest.mark.parametrize("arithmetic", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ONE_OP)
def test_value_against_float64(name: str, arithmetic: str, state: str) -> None:
    update = expanded(name, arithmetic, state)
    torch.manual_seed(0)
    exact = {key: torch.rand(4096, dtype=torch.float64) + 0.5 for key in ("param", "grad", "state")}
    exact["grad"] /= 4  # grow is for increments below the state
    components = {"param": exact["param"].bfloat16(), "grad": exact["grad"].bfloat16()}
    words = format_named(state).encode(exact["state"].float())
    components |= dict(zip(format_named(state).keys("state"), words, strict=True))
    inputs = {key: components[key].double() for key in ("param", "grad")} | {
        "s0": torch.tensor(SLOT, dtype=torch.float64) if name == "index_put" else SLOT
    }
    reads_low = state == "bf16x2" and (arithmetic == "fp32" or keeps_pair(name))
    inputs["state"] = sum(w.double() for w in words) if reads_low else words[0].double()
    truth = torch.as_tensor(run_captured(name, inputs)["state"])
    scalars = torch.tensor(update.scalars.run([SLOT]), dtype=torch.float32)
    result = dict(zip(update.outputs, ReferenceUpdate(update)([components[k] for k in update.inputs], scalars),
                      strict=True))  # fmt: skip
    value = sum(result[key].double() for key in format_named(state).keys("state"))
    # A store rounds once: half an ulp of bf16 (2**-9 of the value), or of the low word (2**-18); bf16 arithmetic rounds
    # at most three times on the way, and grow and scale err by at most a few units of 2**-16. Operands are at most 1.5.
    pair = state == "bf16x2" and (arithmetic == "fp32" or keeps_pair(name))
    bound = (2**-17 if arithmetic == "fp32" else 2**-13) if pair else 2**-8 * (1 if arithmetic == "fp32" else 4)
    assert float((value - truth).abs().max()) <= bound * max(1.0, float(truth.abs().max()))


PAIRS = {
    "add", "add_state_second", "add_scalar", "sub", "mul_scalar", "mul", "lerp", "lerp_of_states", "maximum", "minimum",
    "clamp", "clamp_min", "clamp_max", "where", "masked_fill", "index_put", "mask_as_number", "mask_and", "mask_or",
    "mask_ge", "mask_le", "mask_ne", "mask_not", "zeros", "ones", "full", "clone",
}  # fmt: skip


def keeps_pair(name: str) -> bool:
    """Whether in bf16 arithmetic the result of the operation on a pair is a pair, not a plain value read from hi."""
    return name in PAIRS


def run_captured(name: str, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    graph = captured(ONE_OP[name]).graph
    result: dict[str, torch.Tensor] = fx.GraphModule(torch.nn.Module(), graph)(
        *(inputs[str(n.target)] for n in graph.nodes if n.op == "placeholder")
    )
    return result


def test_an_operation_without_a_rule_is_an_error_that_names_it() -> None:
    update = captured(op(aten.lgamma.default, "x"))
    formats = {"param": format_named("bf16"), "state": format_named("bf16")}
    message = r"aten\.lgamma\.default \(node lgamma_default\).*register one with `rule`"
    with pytest.raises(UnsupportedUpdate, match=message):
        Expand(formats, "fp32")(update)


def test_a_second_rule_for_an_operation_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"aten.add.Tensor already has the rule add"):
        rule(aten.add.Tensor)(lambda a, x, y: x)
