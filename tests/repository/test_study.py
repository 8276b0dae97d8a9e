"""The study's machinery: stacked runs are their runs, and what is claimed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpt import GPT, Shape
from study import command, grid, language, page
from study.claims import CLAIMS
from study.ensemble import Ensemble, Group
from study.figures import COLOURS
from study.variants import RELEASED, TRAINED, VARIANTS, adamw
from torch import Tensor, nn
from torch.nn import functional as F

from collage_neuron.numerics.strategies import DEFAULT

TINY = Shape(batch=3, block=8, width=8, heads=2, layers=2)
GROUPS = [Group(1e-3, (0, 1)), Group(1e-2, (1, 2))]


def batch_of(runs: Ensemble) -> Tensor:
    return torch.randint(256, (len(runs.seeds), TINY.batch, TINY.block + 1), generator=torch.Generator().manual_seed(0))


def test_the_runs_of_an_ensemble_are_runs_of_the_model() -> None:
    """Same weights by seed, same losses, same gradients; the batched sums go in another order, a few ulps of fp32."""
    runs = Ensemble(TINY, GROUPS)
    batch = batch_of(runs)
    losses = runs.losses(batch)
    losses.sum().backward()
    for i, seed in enumerate(runs.seeds):
        torch.manual_seed(seed)
        model = GPT(TINY)
        loss = F.cross_entropy(model(batch[i, :, :-1]).flatten(0, 1), batch[i, :, 1:].flatten())
        loss.backward()
        torch.testing.assert_close(losses[i], loss, rtol=2**-20, atol=0)
        for name, p in model.named_parameters():
            stacked = runs.params[i // 2][name].grad
            assert stacked is not None
            assert p.grad is not None
            torch.testing.assert_close(stacked[i % 2], p.grad, rtol=2**-12, atol=2**-20)


def trained(variant: str, steps: int) -> float:
    """The length of a step relative to that with an exact second moment, after noise alone."""
    p = nn.Parameter(torch.zeros(256))
    optimizer = adamw(variant, [{"params": [p]}], lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)
    squares = language.ExactSquares({"p": p}, 0.99)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        p.grad = torch.randn(256, generator=generator).bfloat16()
        optimizer.step()
        squares.update()
    return squares.step_size(optimizer, steps)


def test_the_length_of_a_step_shows_the_released_second_moment() -> None:
    """It is 69 % low at this decay: 1 / sqrt(0.31) = 1.8. fp32 states differ from float64 by its roundings only."""
    assert trained("fp32", 500) == pytest.approx(1, abs=2**-16)
    assert trained(RELEASED, 500) == pytest.approx(1.8, abs=0.1)


OF_THE_DEFAULT = [claim for claim in CLAIMS if DEFAULT in claim.text]


def test_what_is_trained_has_the_default_and_what_it_replaced() -> None:
    assert {DEFAULT, "plus"} < set(TRAINED) & set(VARIANTS) & set(grid.STRATEGIES) & set(language.QUICK_NAMES)
    assert {DEFAULT, "plus"} < set(COLOURS)
    assert len(OF_THE_DEFAULT) == 7


@pytest.mark.parametrize("claim", OF_THE_DEFAULT, ids=lambda claim: claim.text[:40])
def test_what_is_claimed_of_the_default_fails_for_plain_bf16(claim: Any) -> None:
    """With the stored results of `bf16` in its place: the test of a claim can fail."""
    results = page.stored(command.DOCS, command.PARTS)
    for records in results.values():
        for name in [name for name in records if name.split()[0] == "bf16" and "arithmetic" not in name]:
            records[name.replace("bf16", DEFAULT)] = records[name]
    holds, _ = claim.test(results)
    assert not holds
