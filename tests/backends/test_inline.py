"""The reference backend's graph of torch's operations alone gives the same bits as our own operations in turn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from planned import capture
from updates import OPTIMIZERS, random_inputs, rewritten

from collage_neuron.numerics.block_formats import spread
from collage_neuron.numerics.formats import Format
from collage_neuron.numerics.strategies import STRATEGIES, formats_for, possible
from collage_neuron.passes.backends.inline import INLINED, inlined
from collage_neuron.passes.ir.update import Update
from collage_neuron.states.visible_states import ParamShaped

EDGES = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.39e38, -3.39e38, 1e-45, -1e-40])


def update_of(name: str, strategy: str, arithmetic: str) -> tuple[Update, list[float]]:
    make, states = OPTIMIZERS[name]
    p = torch.nn.Parameter(torch.zeros(3))
    optimizer = make([p])
    state = {"step": torch.tensor(1.0)} | {key: ParamShaped(p) for key in states}
    recording = capture(type(optimizer), optimizer, optimizer.param_groups[0], p, state)
    formats: dict[str, Format] = formats_for(strategy, states, {"exp_avg_sq": "slow"}, torch.bfloat16)
    update = rewritten(recording.captured, formats, arithmetic)
    return update, update.scalars.run(recording.slots, (1, 2, 3, 4))


CASES = [(o, s, a) for o in OPTIMIZERS for s in STRATEGIES for a in ("fp32", "bf16") if possible(s, a)]


@pytest.mark.parametrize(("name", "strategy", "arithmetic"), CASES)
def test_the_bits_are_those_of_our_own_operations(name: str, strategy: str, arithmetic: str) -> None:
    update, scalars = update_of(name, strategy, arithmetic)
    stored = zip(update.inputs, random_inputs(update, (1 << 12,)), strict=True)
    inputs = [spread(x, update.blocks[key], 1 << 12) if key in update.blocks else x for key, x in stored]
    for key, x in zip(update.inputs, inputs, strict=True):
        if key not in update.blocks:
            x[: len(EDGES)] = EDGES.to(x.dtype)
    index = [torch.arange(1 << 12, dtype=torch.int32)] if update.draws else []
    vector = torch.tensor(scalars, dtype=torch.float32).unbind()
    torchs_own = inlined(update.graph)
    assert not [node for node in torchs_own.graph.nodes if node.target in INLINED]
    found, expected = (graph(*inputs, *index, *vector) for graph in (torchs_own, update.graph))
    for key, x, y in zip(update.outputs, found, expected, strict=True):
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[x.itemsize]
        assert x.dtype == y.dtype, key
        assert torch.equal(x.view(integers), y.view(integers)), key


def test_golden_text(golden: Callable[[str, str], None]) -> None:
    update, _ = update_of("sgd", "plus", "fp32")
    golden("inlined_sgd_plus_fp32.txt", inlined(update.graph).graph.python_code("self").src)
