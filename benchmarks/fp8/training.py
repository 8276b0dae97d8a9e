"""One run: a byte-level GPT trained with its matmuls computed in one way, and what was measured of it.

Weights are bf16 under the strategy `plus` in every way, so only the matmuls of the layers differ: the head,
attention's products, norms and the loss (in fp32) are the same.
"""

from __future__ import annotations

import contextlib
import io
import math
from dataclasses import dataclass
from typing import Any

import torch
from gpt import GPT, Shape
from text_data import batches, load
from torch import Tensor, nn
from torch.nn import functional as F

import collage_neuron
from collage_neuron.matmuls.graph_half import Half
from collage_neuron.matmuls.install import forward_of
from collage_neuron.matmuls.scales import worst
from fp8.just_in_time import convert

HEAD = frozenset({"head"})
WARM_UP = 20
BETAS = 0.9, 0.95
HELD_OUT = 64
"""Batches of validation, the same for every run."""
OUTLIERS = (3, 17)
"""Channels of each layer's normalized input that are made large."""

PACKAGE = {"propagated": 0, "offsets": 50, "unscaled": 0}
"""The ways that the package computes, with `rescale`."""


@dataclass(frozen=True)
class Run:
    """What is trained; `factor` multiplies the loss, `outliers` some channels of the inputs of layers."""

    way: str
    lr: float = 2e-3
    seed: int = 0
    factor: float = 1.0
    depth: int = 2
    outliers: int = 1
    steps: int = 600
    batch: int = 8
    block: int = 32
    width: int = 64

    @property
    def shape(self) -> Shape:
        return Shape(batch=self.batch, block=self.block, width=self.width, heads=4, layers=self.depth)


def train(run: Run) -> dict[str, Any]:
    """The validation loss in nats a byte, and of fp8 what the operands were like."""
    corpus = load(None, run.shape)
    torch.manual_seed(run.seed)
    model: Any = GPT(run.shape)
    _enlarge(model, run.outliers)
    if run.way == "frozen":
        for layer in _layers(model):
            layer.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=run.lr, betas=BETAS, eps=1e-8 * run.factor)
    given: dict[str, Any] = {"matmul": "fp8", "rescale": PACKAGE[run.way]} if run.way in PACKAGE else {}
    with contextlib.redirect_stderr(io.StringIO()):
        model, optimizer = collage_neuron.compile(model, optimizer, strategy="plus", **given)
        reductions = convert(model, HEAD) if run.way == "amax" else 0
        data = batches(corpus.train, run.shape, run.seed)
        if run.way == "unscaled":
            _unscale(model, next(batches(corpus.train, run.shape, run.seed)))
        drifts = _log(model, next(batches(corpus.train, run.shape, run.seed)), run)
        losses = [_step(model, optimizer, next(data), run, step) for step in range(run.steps)]
    found: dict[str, Any] = {
        "loss": validation(model, corpus.valid, run.shape),
        "training": math.fsum(losses[-20:]) / len(losses[-20:]),
    }
    if run.way in PACKAGE:
        found |= {"drifts": drifts, "operands": operands(model, next(data), run)}
        reductions = len(_forward(model).backend.graphs[0].plan.reductions)
    return found | {"reductions": reductions}


def _layers(model: Any) -> list[nn.Linear]:
    return [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name not in HEAD]


def _enlarge(model: Any, factor: int) -> None:
    """Makes some channels after each norm `factor` times larger, and the weights that read them smaller.

    The function of the model stays. `_step` keeps these weights as they are, since a step of the others' size would be
    `factor` times too large for them.
    """
    for layer in model.layers:
        for norm, linear in _pairs(layer):
            with torch.no_grad():
                norm.weight[list(OUTLIERS)] *= factor
                linear.weight[:, list(OUTLIERS)] /= factor


def _pairs(layer: Any) -> list[tuple[Any, Any]]:
    return [(layer.attend[0], layer.attend[1].qkv), (layer.think[0], layer.think[1])]


def _step(model: Any, optimizer: Any, windows: Tensor, run: Run, step: int) -> float:
    for group in optimizer.param_groups:
        group["lr"] = run.lr * min(1, (step + 1) / WARM_UP) * (1 - step / run.steps)
    loss = loss_of(model, windows)
    (loss * run.factor).backward()
    if run.outliers > 1:
        for layer in model.layers:
            for _, linear in _pairs(layer):
                linear.weight.grad[:, list(OUTLIERS)] = 0
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def loss_of(model: Any, windows: Tensor) -> Tensor:
    """Of each byte from those before it, in fp32."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def validation(model: Any, text: Tensor, shape: Shape) -> float:
    """The mean loss over `HELD_OUT` batches of other text, the same in every run."""
    held = batches(text, shape, 0)
    return math.fsum(float(loss_of(model, next(held))) for _ in range(HELD_OUT)) / HELD_OUT


def _forward(model: Any) -> Any:
    forward = forward_of(model)
    assert forward is not None
    return forward


def _unscale(model: Any, windows: Tensor) -> None:
    """Captures the model, and sets every scale to 1, where it stays."""
    loss_of(model, windows).backward()
    with torch.no_grad():  # the graph of validation has scales of its own
        loss_of(model, windows)
    for p in model.parameters():
        p.grad = None
    scales = _forward(model).backend.scales
    scales.inverse.fill_(1)
    scales.settled.fill_(True)
    _forward(model).backend.reload()


def _log(model: Any, windows: Tensor, run: Run) -> list[tuple[int, int, float]]:
    """A list that gets (call, calls since the last one, worst drift in binades) of each measurement."""
    found: list[tuple[int, int, float]] = []
    if run.way != "offsets":
        return found
    (loss_of(model, windows) * run.factor).backward()
    for p in model.parameters():
        p.grad = None
    for half in _forward(model).backend.graphs[0].halves:
        _listen(half, found)
    return found


def _listen(half: Half, found: list[tuple[int, int, float]]) -> None:
    measured = half.recalibration.measured

    def listening(call: int, seen: Tensor, again: Tensor) -> None:
        found.append((call, call - half.recalibration.history[-1], worst(seen)))
        measured(call, seen, again)

    half.recalibration.measured = listening  # type: ignore[method-assign]  # of this run


def operands(model: Any, windows: Tensor, run: Run) -> dict[str, Any]:
    """Of each operand at the end: binades between rms and scale, and what part saturated and vanished; the worst."""
    backend = _forward(model).backend
    seen_before: set[str] = set()
    for half in backend.graphs[0].halves:
        half.rescale, half.recalibration.rescale = 1, 1
        half.candidates = [n for n in half.plain.names if n not in seen_before]
        half.measuring = None
        seen_before.update(half.measured)
    (loss_of(model, windows) * run.factor).backward()
    seen = {n: s for n, s in backend.scales.seen().items() if n in seen_before}
    drift = {n: math.log2(s.drift) for n, s in seen.items() if 0 < s.drift < math.inf}
    vanished = max(seen, key=lambda n: seen[n].vanished)
    saturated = max(seen, key=lambda n: seen[n].saturated)
    return {
        "drift": [min(drift.values()), max(drift.values())],
        "vanished": [vanished, seen[vanished].vanished],
        "saturated": [saturated, seen[saturated].saturated],
    }
