"""Methods beside `step` on an XLA device (torch_xla's CPU), whose tensors have no address: as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from methods import SAM, SophiaG
from torch.nn import Parameter
from xla_runs import compiled, run, torch_xla

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate


class Methods(torch.optim.SGD):
    """Its `unit` makes it one that runs as written."""

    unit = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            m = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.5).add_(p.grad)
            p.sub_(m / float(m.norm()) if self.unit else m * 2**-6)

    @torch.no_grad()
    def shrink(self) -> None:
        for p in self.param_groups[0]["params"]:
            p.mul_(0.5)
            self.state[p]["m"].mul_(0.5)

    def weight_norm(self) -> float:
        return float(sum(p.detach().square().sum() for p in self.param_groups[0]["params"]))

    def first(self) -> torch.Tensor:
        copied: torch.Tensor = self.param_groups[0]["params"][0].detach().clone()
        return copied

    def memory(self) -> Any:
        return self.param_groups[0]["params"][0].detach()

    def memory_of_a_state(self) -> Any:
        return [self.state[p]["m"][0] for p in self.param_groups[0]["params"]]


class OnCopies(Methods):
    unit = True


def stepped(make: Any, device: torch.device, strategy: str = "full") -> tuple[Any, list[Parameter]]:
    optimizer = compiled(make, ((4, 6), (5,)), device, strategy=strategy)
    run(optimizer, 1)
    return optimizer, optimizer.param_groups[0]["params"]


def exact(optimizer: Any, params: list[Parameter]) -> list[torch.Tensor]:
    torch_xla.sync()
    return [collage_neuron.exact_value(optimizer, p).cpu() for p in params]


@pytest.mark.parametrize("make", [Methods, OnCopies])
def test_a_method_reads_and_writes_exact_values(make: Any, xla: torch.device) -> None:
    optimizer, params = stepped(make, xla)
    before = exact(optimizer, params)
    assert torch.equal(optimizer.first().cpu(), before[0])
    expected = sum(float(x.double().square().sum()) for x in before)
    assert optimizer.weight_norm() == pytest.approx(expected, rel=2**-18)  # sums of 29 numbers in fp32
    assert all(map(torch.equal, before, exact(optimizer, params)))
    optimizer.shrink()
    assert all(torch.equal(x / 2, y) for x, y in zip(before, exact(optimizer, params), strict=True))


@pytest.mark.parametrize("make", [Methods, OnCopies])
@pytest.mark.parametrize("name", ["memory", "memory_of_a_state"])
def test_memory_of_a_copy_is_not_handed_out(make: Any, name: str, xla: torch.device) -> None:
    optimizer, params = stepped(make, xla)
    before = exact(optimizer, params)
    with pytest.raises(UnsupportedUpdate, match="returns memory of a parameter, gradient or state, not a copy"):
        getattr(optimizer, name)()
    assert all(map(torch.equal, before, exact(optimizer, params)))


def _sophia(optimizer: Any) -> None:
    optimizer.update_hessian(bs=3)


def _sam(optimizer: Any) -> None:
    optimizer.first_step(0.5)
    optimizer.second_step()


@pytest.mark.parametrize(("make", "use"), [(SophiaG, _sophia), (SAM, _sam)])
def test_methods_of_papers_are_those_of_the_cpu(make: Any, use: Any, xla: torch.device) -> None:
    """The order of additions in norms is XLA's: 2**-18 of a parameter is 64 times an ulp of fp32."""
    found = []
    for device in (torch.device("cpu"), xla):
        optimizer, params = stepped(lambda ps: make(ps, lr=1e-2), device, "fp32")
        use(optimizer)
        run(optimizer, 1, first=1)
        found.append(exact(optimizer, params))
    for on_cpu, on_xla in zip(*found, strict=True):
        torch.testing.assert_close(on_xla, on_cpu, rtol=2**-18, atol=2**-18)
