"""Optimizers as updates, and random components for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from planned import capture

from collage_neuron.numerics.formats import Format, format_named
from collage_neuron.numerics.strategies import STRATEGIES, StrategyLike, formats_for
from collage_neuron.passes.analysis.state_roles import roles_of
from collage_neuron.passes.ir.update import Captured, Update
from collage_neuron.passes.ir.verify import verify
from collage_neuron.passes.pipeline import run_passes
from collage_neuron.passes.rewrite.dead_code import EliminateDeadCode
from collage_neuron.passes.rewrite.expand import Expand
from collage_neuron.passes.rewrite.round_and_store import Store
from collage_neuron.states import word_encoding
from collage_neuron.states.visible_states import ParamShaped

N = 1 << 14


Tensors = list[torch.Tensor]


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], tuple[str, ...]]] = {
    "adamw": (lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1), ("exp_avg", "exp_avg_sq")),
    "amsgrad": (
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, amsgrad=True),
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    ),
    "sgd": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1), ("momentum_buffer",)),
    "nesterov": (lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True), ("momentum_buffer",)),
}
"""How each is made, and its states."""


MAGNITUDES = {"param": 0.02, "grad": 1e-3, "exp_avg": 1e-3, "momentum_buffer": 1e-3}
"""Of the random data; 1e-6 for squares."""


def random_inputs(update: Update, shape: tuple[int, ...] = (N,), grad: str = "bf16") -> Tensors:
    g = torch.Generator().manual_seed(0)
    components: dict[str, torch.Tensor] = {}
    for name, fmt in {**update.formats, "grad": format_named(grad)}.items():
        x = torch.randn(shape, generator=g) * MAGNITUDES.get(name, 1e-3)
        x = x if name in MAGNITUDES else x * x
        components |= dict(zip(fmt.keys(name), word_encoding.encode(fmt, "param", x), strict=True))
    return [components[key] for key in update.inputs]


def rewritten(
    captured: Captured, formats: Mapping[str, Format], arithmetic: str, wanted: Collection[str] = ()
) -> Update:
    """An update of its own: `rewrite` gives one for all equals. What is wanted it returns, and does not measure."""
    passes = (Expand(formats, arithmetic, frozenset(wanted)), Store(), EliminateDeadCode())
    *_, (_, update) = run_passes(captured, passes)
    return update


SPLIT: list[StrategyLike] = [s for s in STRATEGIES if s.startswith("split")]
SPLIT += [{"param": "bf16+int16", "*": coded} for coded in ("i16q4", "u16q8", "i16q8", "u16q16", "u8q16")]
"""Compared where nothing is contracted: their last words count single places of fp32."""


def whole_update(name: str, strategy: StrategyLike, arithmetic: str) -> tuple[Update, torch.Tensor]:
    """The hundredth step of an optimizer, and its scalars."""
    make, states = OPTIMIZERS[name]
    p = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    optimizer = make([p])
    step = {"step": torch.tensor(99.0)} if "exp_avg" in states else {}
    before = {state: ParamShaped(p) for state in states} | step
    recording = capture(type(optimizer), optimizer, optimizer.param_groups[0], p, before)
    formats = formats_for(strategy, recording.captured.states, roles_of(recording.captured, recording.slots), p.dtype)
    update = rewritten(recording.captured, formats, arithmetic)
    verify(update)
    drawing = (7, 3, 1, 0) if update.draws else ()  # seed, step, parameter, first element
    return update, torch.tensor(update.scalars.run(recording.slots, drawing), dtype=torch.float32)
