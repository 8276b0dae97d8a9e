"""Steps as written of parameters on an XLA device (torch_xla's CPU): as on the CPU, up to XLA's own arithmetic."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import xla_runs
from as_written import Lamb, Make, Muon, Prodigy, values
from torch import Tensor
from torch.nn import Parameter
from traced_updates import Stepping, Update
from xla_runs import met, run

import collage_neuron
from collage_neuron.states.bookkeeping import bookkeeping

SHAPES = (6, 10), ()
"""Few and small: XLA compiles programs of their own for each."""


def compiled(make: Any, device: torch.device, strategy: str = "plus", **settings: Any) -> tuple[Any, list[Parameter]]:
    optimizer = xla_runs.compiled(make, SHAPES, device, strategy=strategy, **settings)
    return optimizer, optimizer.param_groups[0]["params"]


def by(update: Update) -> Make:
    return lambda params: Stepping(params, update)


def exact(optimizer: Any, params: list[Parameter]) -> list[Tensor]:
    return [x.cpu() for x in values(optimizer, params)]


def check_alike(make: Make, xla: torch.device, steps: int) -> None:
    """The order of additions in norms and products is XLA's: 2**-18 of a parameter is 64 times an ulp of fp32."""
    found = []
    for device in (torch.device("cpu"), xla):
        optimizer, params = compiled(make, device, "fp32")
        run(optimizer, steps)
        found.append(exact(optimizer, params))
    for on_cpu, on_xla in zip(*found, strict=True):
        torch.testing.assert_close(on_xla, on_cpu, rtol=2**-18, atol=2**-18)


@pytest.mark.parametrize("make", [Muon, Prodigy])
def test_steps_are_those_of_the_cpu(make: Make, xla: torch.device) -> None:
    check_alike(make, xla, 3)


def kept_on_the_host(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    """Its momentum lies on the CPU, beside parameters of the device."""
    m = s.setdefault("m", torch.zeros(p.shape)).mul_(0.5).add_(g.cpu())
    p.sub_(m.to(p.device) / g.norm())


def test_a_state_on_the_host_stays_there_as_it_is(xla: torch.device) -> None:
    found = []
    for device in (torch.device("cpu"), xla):
        optimizer, params = compiled(by(kept_on_the_host), device, "fp32")
        run(optimizer, 3)
        states = [optimizer.state[p]["m"] for p in params]
        assert {(m.device.type, m.dtype) for m in states} == {("cpu", torch.float32)}
        found.append([*states, *exact(optimizer, params)])
    for on_cpu, on_xla in zip(*found, strict=True):
        torch.testing.assert_close(on_xla, on_cpu, rtol=2**-18, atol=2**-18)


@pytest.mark.validated
def test_nothing_is_compiled_after_the_fourth_step(xla: torch.device) -> None:
    """Steps 1, 2 and 4 are validated, each with samples of other parameters."""
    optimizer, _ = compiled(Lamb, xla, validate="on")
    run(optimizer, 4)
    before = met.metric_data("CompileTime")[0]
    run(optimizer, 4, first=4)
    assert met.metric_data("CompileTime")[0] == before


def aliases(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    """Keeps the parameter's data, and one state under two names, and writes to both."""
    if not s:
        s["z"] = p.data
        s["a"] = s["b"] = torch.zeros_like(p)
    s["a"].add_(g / float(g.norm() + 1))
    s["z"].sub_(s["b"])
    p.mul_(0.99)


def test_memory_that_is_shared_is_shared(xla: torch.device) -> None:
    check_alike(by(aliases), xla, 3)


def cubic(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    """Momentum over a norm that has no rule; of few operations, each of which XLA compiles."""
    m = s.setdefault("m", torch.zeros_like(p)).lerp_(g, 0.5)
    p.sub_(m / (m.norm(3) + 1), alpha=lr)


def test_a_skipped_step_a_monitor_and_a_checkpoint(xla: torch.device) -> None:
    optimizer, params = compiled(by(cubic), xla, nonfinite="skip")
    monitor = collage_neuron.monitor(optimizer, every=1)
    run(optimizer, 2)
    before = exact(optimizer, params)
    params[0].grad = torch.full_like(params[0], torch.inf)
    optimizer.step()
    assert all(map(torch.equal, before, exact(optimizer, params)))
    assert monitor.latest() is not None
    assert bookkeeping(optimizer).as_written
    resumed, others = compiled(by(cubic), xla, nonfinite="skip")
    with torch.no_grad():
        for p, q in zip(params, others, strict=True):
            q.copy_(p)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, 2, first=5)
    run(resumed, 2, first=5)
    assert all(map(torch.equal, exact(optimizer, params), exact(resumed, others)))


def halved(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    """Writes to the gradient that it was given."""
    p.sub_(s.setdefault("m", torch.zeros_like(p)).add_(g.mul_(0.5)), alpha=lr)


PARTS = {
    "next to one another": lambda flat: [flat[:12].view(4, 3), flat[12:].view(4, 3)],
    "transposed": lambda flat: [flat[12:].view(3, 4).t(), flat[:12].view(3, 4).t()],
    "alternating": lambda flat: [flat.view(4, 6)[:, ::2], flat.view(4, 6)[:, 1::2]],
    "overlapping": lambda flat: [flat[:12].view(4, 3), flat[6:18].view(4, 3)],
    "detached": lambda flat: [flat[:12].view(4, 3).detach(), flat[12:].view(3, 4).t().detach()],
}
"""Gradients of two parameters in one tensor, as DDP lays them out, or others."""


def _run_in_one_buffer(update: Update, parts: Any, device: torch.device) -> tuple[Any, list[Tensor]]:
    optimizer = xla_runs.compiled(by(update), ((4, 3),) * 2, device, strategy="fp32")
    params, flat = optimizer.param_groups[0]["params"], torch.empty(0)
    for number in range(4):
        flat = torch.randn(24, generator=torch.Generator().manual_seed(number)).bfloat16().to(device)
        for p, part in zip(params, parts(flat), strict=True):
            p.grad = part
        optimizer.step()
    return optimizer, [*exact(optimizer, params), flat.float().cpu()]


@pytest.mark.parametrize("update", [halved, cubic])
@pytest.mark.parametrize("layout", PARTS)
def test_gradients_in_one_buffer(layout: str, update: Update, xla: torch.device) -> None:
    _, on_cpu = _run_in_one_buffer(update, PARTS[layout], torch.device("cpu"))
    optimizer, on_xla = _run_in_one_buffer(update, PARTS[layout], xla)
    torch.testing.assert_close(on_xla, on_cpu, rtol=2**-18, atol=2**-18)
    assert bool(bookkeeping(optimizer).as_written) == (update is cubic)


def test_gradients_in_one_buffer_that_do_not_tell_where_are_rejected(xla: torch.device) -> None:
    with pytest.raises(collage_neuron.UnsupportedUpdate, match=r"clone\(\) them"):
        _run_in_one_buffer(cubic, lambda flat: [x.view(4, 3).detach() for x in flat.split(12)], xla)


def with_a_view(o: Any, p: Any, g: Tensor, s: Any, lr: float, t: int) -> None:
    """Reads and writes a part of the parameter that the optimizer holds since before the first step."""
    p[0, :3].sub_(o.kept["part"][:3], alpha=0.1)
    o.kept["part"].mul_(0.9)
    p.sub_(g / (g.norm(3) + 1), alpha=lr)


@pytest.mark.parametrize(
    "part",
    [
        lambda p: p[1],
        lambda p: p[1].detach(),
        lambda p: p.t().detach()[1],
        lambda p: p.t()[1],
        lambda p: p.view(-1)[5:8],
        lambda p: p.unbind(0)[3],
    ],
)
def test_a_part_of_a_parameter_that_the_optimizer_holds(part: Any, xla: torch.device) -> None:
    found = []
    for device in (torch.device("cpu"), xla):
        optimizer = xla_runs.compiled(by(with_a_view), ((4, 4),), device, strategy="split433")
        params = optimizer.param_groups[0]["params"]
        optimizer.kept["part"] = part(params[0].detach())
        run(optimizer, 3)
        found.append(exact(optimizer, params))
    torch.testing.assert_close(*found, rtol=2**-14, atol=2**-14)


def test_what_has_the_memory_of_a_parameter_sees_its_steps(xla: torch.device) -> None:
    """Two parameters in a buffer, as torch's own step leaves them."""
    flat = torch.randn(32, generator=torch.Generator().manual_seed(0)).bfloat16().to(xla)
    params = [Parameter(flat[:16].view(4, 4)), Parameter(flat[16:].view(4, 4))]
    optimizer = collage_neuron.compile(torch.optim.SGD(params, lr=0.5), verbose=False, strategy="split433")
    for _ in range(2):
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
    collage_neuron.set_exact_value(optimizer, params[0], torch.ones(4, 4))
    assert torch.equal(flat.cpu(), torch.cat([p.detach().cpu().reshape(-1) for p in params]))
    assert params[0].detach().cpu().eq(1).all()
