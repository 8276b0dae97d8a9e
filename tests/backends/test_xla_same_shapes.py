"""Parameters of equal shapes, whose tensors come to a lazy graph in another order, keep their own results.

torch_xla knows a graph again by a hash that does not say which of equal nodes a result belongs to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import xla_runs
from torch import Tensor
from torch.nn import Parameter
from traced_updates import Stepping

import collage_neuron


def momentum(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    """Runs as written."""
    m = s.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(g)
    p.sub_(m / m.view(-1).topk(1)[0], alpha=lr)


MAKES: dict[str, Callable[[Any], Any]] = {
    "recorded": lambda params: torch.optim.AdamW(params, lr=0.02),
    "as written": lambda params: Stepping(params, momentum, lr=0.02),
}


def _new_state(o: Any, p: Any) -> None:
    name = next(k for k in ("exp_avg", "m") if k in o.state[p])
    o.state[p][name] = torch.zeros_like(o.state[p][name])


def _new_data(o: Any, p: Any) -> None:
    p.data = p.data.clone()


def _set(o: Any, p: Any) -> None:
    collage_neuron.set_exact_value(o, p, 0.9 * collage_neuron.exact_value(o, p))


def _nothing(o: Any, p: Any) -> None:
    pass


class Clipped(torch.optim.Optimizer):
    """Momentum, clipped by the norm of all gradients, which it reads."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.02})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # without a loss
        params = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        scale = min(1.0, 3.0 / float(sum(p.grad.norm() ** 2 for p in params) ** 0.5))
        for p in params:
            m = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad, alpha=scale)
            p.sub_(m, alpha=0.02)


def in_turn(make: Any, device: torch.device | str, is_anew: bool) -> list[Tensor]:
    """Those of two layers in one optimizer, or in one of its own for each step, which step in one graph."""
    draws = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(4, 4, generator=draws).bfloat16().float().to(device)) for _ in range(2)]
    optimizer = compiled(make(params))
    for order in ((0, 1), (0, 1), (1, 0), (0, 1)):
        for i in order:
            optimizer = compiled(make([params[i]])) if is_anew else optimizer
            _set(optimizer, params[i])
            params[i].grad = torch.randn(4, 4, generator=draws).bfloat16().to(device, params[i].dtype)
            optimizer.step()
            params[i].grad = None
        xla_runs.torch_xla.sync()
    return [collage_neuron.exact_value(compiled(make([p])), p).cpu() for p in params]


def compiled(optimizer: Any) -> Any:
    return collage_neuron.compile(optimizer, verbose=False, strategy="split433", validate="off")


def values(make: Any, between: Any, device: torch.device | str, count: int) -> list[Tensor]:
    """Those of two layers, one of which is changed before each second step; or of three, of which two step in turn."""
    draws = torch.Generator().manual_seed(0)
    params = [Parameter(torch.randn(4, 4, generator=draws).bfloat16().float().to(device)) for _ in range(count)]
    optimizer = collage_neuron.compile(make(params), verbose=False, strategy=STRATEGIES[count], validate="off")
    for t, active in enumerate(((2,), (0, 1), (1, 2), (0, 2), (1, 2), (0, 1), (1, 2), (0, 1), (0, 2), (0, 1))):
        if t and not t % 2:
            between(optimizer, params[t // 2 % 2])
        for i, p in enumerate(params):
            g = torch.randn(4, 4, generator=draws).bfloat16()
            p.grad = None if count == 3 and i not in active else g.to(device, p.dtype)
        optimizer.step()
        xla_runs.torch_xla.sync()
    return [collage_neuron.exact_value(optimizer, p).cpu() for p in params]


STRATEGIES = {2: "fp32", 3: "split433"}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("between", [_new_state, _new_data, _set])
def test_each_has_its_own_results(make: Any, between: Any, xla: torch.device) -> None:
    on_cpu, on_xla = (values(make, between, device, 2) for device in ("cpu", xla))
    torch.testing.assert_close(on_xla, on_cpu, rtol=2**-14, atol=2**-14)


def test_layers_that_step_in_turn_have_their_own_results(xla: torch.device) -> None:
    on_cpu, on_xla = (values(Clipped, _nothing, device, 3) for device in ("cpu", xla))
    torch.testing.assert_close(on_xla, on_cpu, rtol=2**-14, atol=2**-14)


@pytest.mark.parametrize("is_anew", [False, True])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_steps_in_one_graph_have_their_own_results(make: Any, is_anew: bool, xla: torch.device) -> None:
    torch.testing.assert_close(in_turn(make, xla, is_anew), in_turn(make, "cpu", is_anew), rtol=2**-14, atol=2**-14)


def test_optimizers_in_graphs_of_their_own_share_programs(xla: torch.device) -> None:
    """The nodes of a graph are numbered in its order, whatever ran before."""
    counts = []
    for _ in range(4):
        optimizer = compiled(torch.optim.SGD([p := Parameter(torch.ones(5, 3).to(xla))], lr=0.1))
        p.grad = torch.ones_like(p)
        xla_runs.torch_xla.sync()
        optimizer.step()
        xla_runs.torch_xla.sync()
        counts.append(xla_runs.counted()[0])
    assert counts[1] == counts[-1]
