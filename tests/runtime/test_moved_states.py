"""A parameter that is exchanged for a new one, with its state, as code does that adds and removes rows (splatting)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from foreign import Lamb
from torch.optim import AdamW

import collage_neuron
from collage_neuron import exact_value


def trained(make: Any, strategy: str = "split433") -> tuple[Any, torch.Tensor]:
    """An optimizer after three steps, and a weight that its high word does not hold."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape) * 0.3) for shape in ((3,), (6, 5))]
    optimizer = collage_neuron.compile(make(params, lr=0.01), strategy=strategy, verbose=False)
    for _ in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    assert not torch.equal(exact_value(optimizer, params[1]), params[1].detach().float())
    return optimizer, params[1]


def grown(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.new_zeros(2, *x.shape[1:])])


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "grown": grown,
    "cut": lambda x: x[1:4].clone(),
    "in fp32": lambda x: x.float() + 2.0**-20,
    "other values": lambda x: torch.full_like(x, 3e-4),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [AdamW, Lamb])
@pytest.mark.parametrize("strategy", ["split433", "plus"])
@pytest.mark.whole
def test_low_words_of_another_parameter_do_not_count(strategy: str, make: Any, change: str) -> None:
    optimizer, old = trained(make, strategy)
    state = optimizer.state.pop(old)
    if change in ("grown", "cut"):
        state.update({k: CHANGES[change](x) for k, x in state.items() if k in ("exp_avg", "exp_avg_sq", "m", "v")})
    new = optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(CHANGES[change](old.detach()))
    optimizer.state[new], written, new.grad = state, new.detach().float().clone(), torch.zeros_like(new)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    with pytest.warns(UserWarning, match=r"has the state of an earlier one, .*param_lo.* were dropped"):
        optimizer.step()
    assert torch.equal(exact_value(optimizer, new), written)


@pytest.mark.parametrize("make", [AdamW, Lamb])
def test_one_that_is_the_same_keeps_them(make: Any) -> None:
    optimizer, old = trained(make)
    value, state = exact_value(optimizer, old), optimizer.state.pop(old)
    new = optimizer.param_groups[0]["params"][1] = torch.nn.Parameter(old.detach().clone())
    optimizer.state[new], new.grad = state, torch.zeros_like(new)
    optimizer.param_groups[0].update(lr=0.0, weight_decay=0.0)
    optimizer.step()
    assert torch.equal(exact_value(optimizer, new), value)


@pytest.mark.parametrize("make", [AdamW, Lamb])
def test_a_parameter_that_gets_another_shape_is_rejected(make: Any) -> None:
    optimizer, p = trained(make)
    p.grad = None
    p.data = grown(p.detach())
    p.grad = torch.zeros_like(p)
    with pytest.raises(
        ValueError, match=r"another shape than its state 'param_lo'.*give the optimizer a new parameter"
    ):
        optimizer.step()
