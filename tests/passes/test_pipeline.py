"""Passes: each one's text before and after, which its docstring shows; the pipeline verifies what each returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
import torch.fx as fx
from one_operation import ONE_OP, captured
from planned import capture
from torch.optim import SGD

from collage_neuron.errors import VerificationError
from collage_neuron.numerics.eft import round_to
from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.ir.printer import format_graph, format_update
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.pipeline import Pass, passes_of, run_passes
from collage_neuron.passes.rewrite.dead_code import EliminateDeadCode
from collage_neuron.passes.rewrite.expand import Expand
from collage_neuron.passes.rewrite.instrument import Instrument
from collage_neuron.passes.rewrite.round_and_store import Store
from collage_neuron.passes.rewrite.split_stages import Cut

PAIR, WORD, DRAWN = (format_named(name) for name in ("bf16x2", "bf16", "bf16_stochastic"))
MEASURED = frozenset({"param"})


def sgd() -> Captured:
    """`param + s0 * grad`, the shortest update of an optimizer."""
    p = torch.nn.Parameter(torch.zeros(2))
    optimizer = SGD([p], lr=0.1)
    return capture(SGD, optimizer, optimizer.param_groups[0], p, {}).captured


def after(*passes: Pass, given: Captured | None = None) -> Update:
    """What some passes make of an update, SGD's unless another is given."""
    *_, (_, update) = run_passes(given or sgd(), passes)
    return update


def decay() -> Update:
    """An update that loads a gradient and does not read it."""
    expand = Expand({"param": WORD, "state": WORD}, "fp32")
    return after(expand, Store(), given=captured(ONE_OP["mul_scalar"]))


def along_the_gradient() -> Update:
    """A step of a length that is given, along the gradient."""
    graph, aten = fx.Graph(), torch.ops.aten
    p, g, s = (graph.placeholder(name) for name in ("param", "grad", "s0"))
    norm = graph.call_function(aten.linalg_vector_norm.default, (g,))
    scaled = graph.call_function(aten.mul.Tensor, (norm, s))
    step = graph.call_function(aten.div.Tensor, (g, scaled))
    graph.output({"param": graph.call_function(aten.add.Tensor, (p, step))})
    given = Captured(graph, (), {}, graph.python_code("self").src)
    return after(Expand({"param": WORD}, "fp32"), Store(), EliminateDeadCode(), given=given)


EXPAND = Expand({"param": PAIR}, "fp32")

CASES: dict[str, tuple[Pass, Callable[[], Any]]] = {
    "expand": (EXPAND, sgd),
    "expand_bf16": (Expand({"param": PAIR}, "bf16"), sgd),
    "expand_measured": (Expand({"param": PAIR}, "fp32", MEASURED), sgd),
    "store": (Store(), lambda: after(EXPAND)),
    "store_bf16": (Store(), lambda: after(Expand({"param": PAIR}, "bf16"))),
    "store_stochastic": (Store(), lambda: after(Expand({"param": DRAWN}, "fp32"))),
    "instrument": (Instrument(), lambda: after(Expand({"param": PAIR}, "fp32", MEASURED), Store())),
    "dead_code": (EliminateDeadCode(), decay),
    "cut": (Cut(), along_the_gradient),
}
"""A pass, and an update for it."""

SHOWN = ["expand", "store", "instrument", "dead_code", "cut"]
"""The cases that docstrings show."""


def text(update: Captured | Update) -> str:
    return format_graph(update.graph) if isinstance(update, Captured) else format_update(update)


@pytest.mark.parametrize("case", CASES)
def test_golden_text_of_a_pass(case: str, golden: Callable[[str, str], None]) -> None:
    """It leaves what it was given as it was: passes return another update."""
    each, make = CASES[case]
    given = make()
    before = text(given)
    golden(f"pass_{case}.txt", f"Given:\n{before}\n\nResult of {each.name}:\n{text(each(given))}")
    assert text(given) == before


@pytest.mark.parametrize("case", SHOWN)
def test_the_docstring_shows_the_golden_text(case: str) -> None:
    """Its lines are lines of the text, in order; it may leave some out."""
    each, make = CASES[case]
    given = make()
    title, *shown = (type(each).__doc__ or "").split("::\n\n")
    assert title.splitlines()[0].endswith(".")
    for block, of in zip(shown, (given, each(given)), strict=True):
        lines = iter(line.strip() for line in text(of).splitlines())
        examples = [line.strip() for line in block.split("\n\n")[0].splitlines()]
        assert examples
        assert [line for line in examples if line not in lines] == []  # `in` an iterator goes on from where it was


def test_the_pipeline_in_order() -> None:
    formats = {"param": PAIR}
    assert [each.name for each in passes_of(formats, "fp32")] == ["expand", "store", "dead-code", "cut"]
    measured = passes_of(formats, "fp32", MEASURED)
    assert [each.name for each in measured] == ["expand", "store", "instrument", "dead-code", "cut"]
    assert [CASES[case][0].name for case in SHOWN] == [each.name for each in measured]  # each docstring is tested


@dataclass(frozen=True)
class Forget:
    """Drops the first rounding that it finds."""

    name: ClassVar[str] = "forget"

    def __call__(self, update: Update) -> Update:
        body = after(EXPAND, Store()).only_stage.body
        node = next(n for n in body.nodes if n.target is round_to)
        node.replace_all_uses_with(node.args[0])
        body.erase_node(node)
        return update.with_body(body)


def test_what_a_pass_returns_is_verified() -> None:
    """After each pass: the one before this is fine, and the one after it is not run."""
    steps = run_passes(sgd(), (EXPAND, Store(), Forget(), EliminateDeadCode()))
    assert [next(steps)[0].name for _ in range(2)] == ["expand", "store"]
    with pytest.raises(VerificationError, match="without a round_to: a rounding was lost"):
        next(steps)
