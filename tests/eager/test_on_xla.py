"""Steps as written of parameters on an XLA device (torch_xla's CPU): as on the CPU, up to XLA's own arithmetic."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from as_written import ByIdentity, Lamb, Make, Muon, Prodigy, Written, parameters, values
from torch import Tensor
from torch.nn import Parameter

import collage_neuron
from collage_neuron.errors import UnsupportedUpdate

pytest.importorskip("torch_xla")
import torch_xla
import torch_xla.debug.metrics as met

SHAPES = (6, 10), ()
"""Few and small: XLA compiles programs of their own for each."""


def compiled(make: Any, device: torch.device, strategy: str = "plus", **settings: Any) -> tuple[Any, list[Parameter]]:
    params = [Parameter(p.detach().to(device)) for p in parameters(torch.bfloat16, SHAPES)]
    return collage_neuron.compile(make(params), strategy=strategy, verbose=False, **settings), params


def run(optimizer: Any, params: list[Parameter], steps: int, first: int = 0) -> None:
    """Steps with gradients that depend on the number of the step alone."""
    for number in range(first, first + steps):
        g = torch.Generator().manual_seed(1000 + number)
        for p in params:
            p.grad = (0.1 * torch.randn(p.shape, generator=g)).bfloat16().to(p.device)
        optimizer.step()
        torch_xla.sync()


def exact(optimizer: Any, params: list[Parameter]) -> list[Tensor]:
    return [x.cpu() for x in values(optimizer, params)]


def check_alike(make: Make, xla: torch.device, steps: int) -> None:
    """The order of additions in norms and products is XLA's: 2**-18 of a parameter is 64 times an ulp of fp32."""
    found = []
    for device in (torch.device("cpu"), xla):
        optimizer, params = compiled(make, device, "fp32")
        run(optimizer, params, steps)
        found.append(exact(optimizer, params))
    for on_cpu, on_xla in zip(*found, strict=True):
        torch.testing.assert_close(on_xla, on_cpu, rtol=2**-18, atol=2**-18)


@pytest.mark.parametrize("make", [Muon, Prodigy, ByIdentity])
def test_steps_are_those_of_the_cpu(make: Make, xla: torch.device) -> None:
    check_alike(make, xla, 3)


class OnTheHost(Written):
    """Makes tensors of the CPU from those of the device: torch_xla wraps them, and they have no address."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        norm = torch.zeros_like(p, device="cpu").add_(float(g.norm()))
        p.sub_(g + torch.rand_like(p, device="cpu").clamp(0.5, 0.5).to(p.device) + norm.to(p.device), alpha=group["lr"])


def test_a_step_may_make_tensors_on_the_host(xla: torch.device) -> None:
    check_alike(OnTheHost, xla, 2)


class KeptOnTheHost(Written):
    """Its momentum lies on the CPU, beside parameters of the device."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["m"] = torch.zeros(p.shape)
        state["m"].mul_(0.5).add_(g.cpu())
        p.sub_(state["m"].to(p.device) / g.norm())


def test_a_state_on_the_host_stays_there_as_it_is(xla: torch.device) -> None:
    found = []
    for device in (torch.device("cpu"), xla):
        optimizer, params = compiled(KeptOnTheHost, device, "fp32")
        run(optimizer, params, 3)
        states = [optimizer.state[p]["m"] for p in params]
        assert {(m.device.type, m.dtype) for m in states} == {("cpu", torch.float32)}
        found.append([*states, *exact(optimizer, params)])
    for on_cpu, on_xla in zip(*found, strict=True):
        torch.testing.assert_close(on_xla, on_cpu, rtol=2**-18, atol=2**-18)


@pytest.mark.validated
def test_nothing_is_compiled_after_the_fourth_step(xla: torch.device) -> None:
    """Steps 1, 2 and 4 are validated, each with samples of other parameters."""
    optimizer, params = compiled(Lamb, xla)
    run(optimizer, params, 4)
    before = met.metric_data("CompileTime")[0]
    run(optimizer, params, 4, first=4)
    assert met.metric_data("CompileTime")[0] == before


class Aliases(Written):
    """Keeps the parameter's data, and one state under two names, and writes to both."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        if not state:
            state["z"] = p.data
            state["a"] = state["b"] = torch.zeros_like(p)
        state["a"].add_(g / float(g.norm() + 1))
        state["z"].sub_(state["b"])
        p.mul_(0.99)


def test_memory_that_is_shared_is_shared(xla: torch.device) -> None:
    check_alike(Aliases, xla, 3)


def test_a_gradient_in_the_memory_of_its_parameter_is_rejected(xla: torch.device) -> None:
    optimizer, params = compiled(Lamb, xla)
    run(optimizer, params, 1)
    for p in params:
        p.grad = p.data
    with pytest.raises(UnsupportedUpdate, match="a gradient and a parameter share memory"):
        optimizer.step()


def test_a_skipped_step_a_monitor_and_a_checkpoint(xla: torch.device) -> None:
    optimizer, params = compiled(Muon, xla, nonfinite="skip")
    monitor = collage_neuron.monitor(optimizer, every=1)
    run(optimizer, params, 2)
    before = exact(optimizer, params)
    params[0].grad = torch.full_like(params[0], torch.inf)
    optimizer.step()
    assert all(map(torch.equal, before, exact(optimizer, params)))
    assert monitor.latest() is not None
    resumed, others = compiled(Muon, xla, nonfinite="skip")
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, params, 2, first=5)
    run(resumed, others, 2, first=5)
    assert all(map(torch.equal, exact(optimizer, params), exact(resumed, others)))


class Scaled(Written):
    """Doubles the gradients that it was given, keeps a tensor of its own, and may raise in the middle of a step."""

    raises = False

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        state.setdefault("n", torch.zeros(3, device=p.device)).add_(1)
        p.sub_(g / float(g.norm() + 1), alpha=group["lr"])
        g.mul_(2)
        if self.raises:
            raise KeyError("in the middle")


def test_an_error_in_the_middle_is_undone_and_gradients_are_written(xla: torch.device) -> None:
    optimizer, params = compiled(Scaled, xla)
    run(optimizer, params, 1)
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert all(p.grad is not None and bool((p.grad == 2).all()) for p in params)
    before = exact(optimizer, params), [optimizer.state[p]["n"].cpu() for p in params]
    optimizer.raises = True
    with pytest.raises(KeyError, match="in the middle"):
        optimizer.step()
    after = exact(optimizer, params), [optimizer.state[p]["n"].cpu() for p in params]
    assert all(torch.equal(x, y) for old, new in zip(before, after, strict=True) for x, y in zip(old, new, strict=True))
    assert all(p.grad is not None and bool((p.grad == 2).all()) for p in params)
