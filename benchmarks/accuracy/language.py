"""A byte-level GPT on real text: its validation loss under each strategy and under torch's AdamW in fp32.

The model, the text and the batches are those of the study (`examples/study/language.py`). Seeds train side by side;
every contender starts from the same fp32 weights, and sees the same batches. A contender's gradients have the dtype of
its parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from gpt import Shape
from study.ensemble import Ensemble, Group, schedule
from study.language import LR, SHAPE
from text_data import load

from accuracy.contenders import Contender

NAME = "text"
"""The name of this condition in records."""

SEEDS = (0, 1, 2)
STEPS = 600
OPTIONS = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
BATCHES = 8
"""Batches of held-out text."""


def losses(contender: Contender, seeds: Sequence[int], steps: int, shape: Shape = SHAPE) -> list[float]:
    """The validation loss of each seed after training, in nats per byte, of the weights that the model reads."""
    text = load(None, shape)
    runs = Ensemble(shape, [Group(LR, tuple(seeds))])
    optimizer = contender.build(list(runs.params[0].values()), {"lr": LR, **OPTIONS})
    factor = schedule(steps)
    for step, batch in enumerate(islice(runs.feed(text.train), steps)):
        for group in optimizer.param_groups:
            group["lr"] = LR * factor(step)
        optimizer.zero_grad()
        runs.losses(batch).sum().backward()
        optimizer.step()
    found: list[float] = runs.validate(runs.held_out(text.valid, BATCHES)).tolist()
    return found
