"""Low words of written weights: what native code does for all parameters at once is what torch does for one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import collage_neuron
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE
from collage_neuron.states import external_writes, state_writes
from collage_neuron.states.state_keys import words_of

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}")


def stepped(strategy: str, backend: str) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """Parameters of several sizes after two steps."""
    torch.manual_seed(3)
    params = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in ((1 << 16,), (33, 7), (1,), (0,))]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    collage_neuron.compile(optimizer, strategy=strategy, backend=backend)
    for p in params:
        p.grad = torch.randn_like(p)
    optimizer.step()
    optimizer.step()
    return params, optimizer


def as_bits(t: Tensor) -> Tensor:
    """The bits of numbers; NaN are all alike (docs/development/formats.md)."""
    t = torch.where(t.isnan(), torch.nan, t.detach()) if t.is_floating_point() else t
    return t.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[t.element_size()])


@pytest.mark.parametrize("strategy", ["plus", "split433", "fp32"])
def test_a_loop_that_clamps_has_the_bits_of_the_reference(strategy: str) -> None:
    runs = [stepped(strategy, backend) for backend in ("native", "reference")]
    for _ in range(4):
        for params, optimizer in runs:
            with torch.no_grad():
                params[0].clamp_(-0.9, 0.9)
                params[1].mul_(params[1] > 0)
            optimizer.step()
    for p, q in zip(runs[0][0], runs[1][0], strict=True):
        ours, theirs = (words_of(o.state[x]) for (_, o), x in zip(runs, (p, q), strict=True))
        assert torch.equal(as_bits(p), as_bits(q))
        assert all(torch.equal(as_bits(ours[key]), as_bits(theirs[key])) for key in ours)


def test_a_backend_that_cannot_run_here_is_not_asked() -> None:
    """A model that was moved to the CPU, to be saved: only a step raises."""
    params, optimizer = stepped("plus", "native")
    optimizer.param_groups[0]["collage_backend"] = "xla"
    with torch.no_grad():
        params[0].mul_(0.5)
    external_writes.drop_stale(optimizer)
    assert bool(state_writes.belongs(optimizer, params[0]).all())


@pytest.mark.parametrize("strategy", ["plus", "fp32", "split433"])
def test_an_exact_value_has_no_low_word_of_another_weight(strategy: str) -> None:
    """A mask, and weights that are there for a moment: nothing is dropped before the next step."""
    p = torch.nn.Parameter(0.3 + torch.rand(64, generator=torch.Generator().manual_seed(0)))
    optimizer = collage_neuron.compile(torch.optim.AdamW([p], lr=1e-3), strategy=strategy, verbose=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before, high = collage_neuron.exact_value(optimizer, p), p.detach().clone()
    with torch.no_grad():
        p[:32] = 0
    expected = torch.cat([torch.zeros(32), before[32:]])
    error = 2.0**-126 if strategy == "split433" else 0.0  # of an integer, half a last place of the smallest number
    assert (collage_neuron.exact_value(optimizer, p) - expected).abs().max() <= error
    with torch.no_grad():
        p.copy_(high)
    assert torch.equal(collage_neuron.exact_value(optimizer, p), before)
