"""A weight that several ranks hold, tied across pipeline stages or duplicated by tensor parallelism, stays one.

What a rank does depends on what it holds and on the summed gradient alone: here each rank is a loop of one process.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import collage_neuron

RANKS, STEPS, SHAPE = 2, 8, (24, 16)
ROUNDED_TO_NEAREST = ("bf16", "plus", "full", "fp32_states", "split433", "split423")
DRAWN = ("stochastic", "split422")


def trained(rank: int, strategy: str, first: bool) -> dict[str, Tensor]:
    """The words of the weight after steps in which all ranks take the sum of their gradients of it.

    A rank has others beside it, of other sizes on each. The weight comes first on every rank, as norms that tensor
    parallelism duplicates, or last on the second one, as an embedding that is the output layer of the last stage too.
    """
    g = torch.Generator().manual_seed(0)
    tied = Parameter((torch.randn(SHAPE, generator=g) * 0.02).bfloat16())
    others = [Parameter(torch.randn(3 + rank, 5 + k, generator=g).bfloat16()) for k in range(2 + rank)]
    params = [tied, *others] if first or rank == 0 else [*others, tied]
    optimizer = collage_neuron.compile(torch.optim.AdamW(params, weight_decay=0.1), strategy=strategy, verbose=False)
    own, of_all = torch.Generator().manual_seed(1 + rank), torch.Generator().manual_seed(10)
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn(p.shape, generator=own).bfloat16()
        tied.grad = torch.randn(SHAPE, generator=of_all).bfloat16()
        optimizer.step()
    return {"param": tied.detach(), **{k: x for k, x in optimizer.state[tied].items() if x.shape == tied.shape}}


@pytest.mark.parametrize(
    ("strategy", "same_place"), [*((s, False) for s in (*ROUNDED_TO_NEAREST, *DRAWN)), *((s, True) for s in DRAWN)]
)
def test_ranks_that_take_the_same_gradient_hold_the_same_bits(strategy: str, same_place: bool) -> None:
    """Whatever else a rank holds, and in which order; where words are drawn, if the weight's place is the same.

    Draws depend on the place of a parameter in its optimizer, so that a weight that is first on one rank and last on
    another is drawn differently: docs/neuron_libraries.md says so.
    """
    a, b = (trained(rank, strategy, same_place) for rank in range(RANKS))
    assert a.keys() == b.keys()
    alike = all(torch.equal(a[k], b[k]) for k in a)
    assert alike is (same_place or strategy in ROUNDED_TO_NEAREST)
