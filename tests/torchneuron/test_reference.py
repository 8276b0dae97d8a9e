"""What has no kernel on the device `neuron`: the reference form on the CPU, steps as written in fp32 on the device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from on_neuron import Make, differing, of, parameters, step, trained
from rough_format import ROUGH
from running import compiled_only

import collage_neuron
from collage_neuron.errors import ComputedOnHost, UnsupportedUpdate
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.passes.backends import reference
from collage_neuron.passes.backends.nki import target

ADAMW: Make = lambda params: torch.optim.AdamW(params, lr=1e-2)  # noqa: E731
SAYS = r"computed on the CPU, and copied there and back: neuron:0 takes float64 for fp32 and int64 for int32"


@pytest.fixture(autouse=True)
def _on_trn2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(target.TARGET, "trn2")


@pytest.mark.parametrize("strategy", ["split433", "plus", "stochastic", "split423"])
def test_the_reference_has_the_bits_of_the_cpu_and_says_where_it_runs(strategy: str, neuron: torch.device) -> None:
    with pytest.warns(ComputedOnHost, match=SAYS):
        found = trained(ADAMW, neuron, backend="reference", strategy=strategy)
    assert differing(found, trained(ADAMW, "cpu", backend="reference", strategy=strategy)) == []
    assert {p.device for p in of(found)} == {neuron}


def test_the_warning_comes_once(neuron: torch.device) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trained(ADAMW, neuron, backend="reference")
        trained(ADAMW, neuron, backend="reference", strategy="plus")
    assert len([w for w in seen if w.category is ComputedOnHost]) == 1


class Own(torch.optim.Optimizer):
    """Calls `update` for each parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.update(p, group["lr"])

    def update(self, p: Any, lr: float) -> None:
        raise NotImplementedError


class Lamb(Own):
    """A step with a sum over each parameter."""

    def update(self, p: Any, lr: float) -> None:
        ratio = p.norm() / (p.grad.norm() + 1e-6)
        p.sub_(lr * ratio * p.grad)


class Rows(Own):
    """A step with sums over rows."""

    def update(self, p: Any, lr: float) -> None:
        scale = p.grad.square().mean(-1, keepdim=True) if p.dim() else p.grad.square()
        p.sub_(lr * p.grad / (scale.sqrt() + 1e-3))


@pytest.mark.parametrize("make", [Lamb, Rows])
def test_sums_are_those_of_kernels(make: Make, neuron: torch.device) -> None:
    found, wanted = trained(make, neuron), trained(make, "cpu", backend="nki")
    for x, y in zip(of(found), of(wanted), strict=True):
        left, right = (collage_neuron.exact_value(o, p).cpu() for o, p in ((found, x), (wanted, y)))
        torch.testing.assert_close(left, right, rtol=2**-18, atol=2**-22)


@pytest.mark.parametrize("make", [Lamb, Rows])
@pytest.mark.filterwarnings("ignore::collage_neuron.ComputedOnHost")
def test_sums_of_the_reference_are_those_of_the_cpu(make: Make, neuron: torch.device) -> None:
    found, wanted = (trained(make, d, backend="reference") for d in (neuron, "cpu"))
    assert differing(found, wanted) == []


def test_on_the_device_they_would_have_other_bits(neuron: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a word: a sum in float64 would be one in fp32."""
    monkeypatch.setattr(reference, "narrows", lambda device: False)
    found = trained(Lamb, neuron, backend="reference", validate="off", strategy="fp32")
    assert differing(found, trained(Lamb, "cpu", backend="reference", strategy="fp32")) != []


class Sorts(Own):
    """A step with an operation that has no rule: it runs as written."""

    def update(self, p: Any, lr: float) -> None:
        largest = p.grad.abs().reshape(-1).sort().values[-1].item()
        state = self.state[p]
        state["mean"] = 0.9 * state.get("mean", torch.zeros_like(p)) + 0.1 * p.grad / (largest + 1e-3)
        p.sub_(lr * state["mean"])


@pytest.mark.filterwarnings("ignore::collage_neuron.ComputedOnHost")
@pytest.mark.parametrize("strategy", ["split433", "plus", "fp32"])
def test_a_step_runs_as_written_in_the_fp32_of_the_device(strategy: str, neuron: torch.device) -> None:
    found = trained(Sorts, neuron, strategy=strategy)
    assert differing(found, trained(Sorts, "cpu", strategy=strategy)) == []
    assert {p.device for p in of(found)} == {neuron}
    assert "as written" in collage_neuron.explain(found)


@pytest.mark.filterwarnings("ignore::collage_neuron.ComputedOnHost")
def test_a_closure_is_evaluated_on_the_device(neuron: torch.device) -> None:
    def fitted(device: torch.device | str) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(0)
        p = torch.nn.Parameter(torch.randn(20, generator=g).bfloat16().to(device))
        goal = torch.randn(20, generator=g).bfloat16().to(device)
        optimizer = collage_neuron.compile(torch.optim.LBFGS([p], lr=0.5, max_iter=4))

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (p.float() - goal.float()).square().sum()
            loss.backward()
            return loss

        return [optimizer.step(closure).detach().cpu(), p.detach().cpu()]

    assert all(torch.equal(x, y) for x, y in zip(fitted(neuron), fitted("cpu"), strict=True))


OF_ROUGH = {"param": "bf16x2", "*": "rough"}


@pytest.fixture
def rough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FORMATS, "rough", ROUGH)


@pytest.mark.filterwarnings("ignore::collage_neuron.ComputedOnHost", "ignore::collage_neuron.ImpreciseState")
def test_formats_without_kernels_are_converted_on_the_cpu(neuron: torch.device, rough: None) -> None:
    found = trained(ADAMW, neuron, strategy=OF_ROUGH)
    assert differing(found, trained(ADAMW, "cpu", strategy=OF_ROUGH, backend="nki")) == []


def test_a_monitor_measures_on_the_device(neuron: torch.device) -> None:
    def records(device: torch.device | str, backend: str) -> list[dict[str, Any]]:
        optimizer = collage_neuron.compile(ADAMW(parameters(device)), backend=backend)
        with collage_neuron.monitor(optimizer, every=1) as monitor:
            for i in range(3):
                step(optimizer, i)
                monitor.log(loss=1.0)
        return [record.total.as_dict() for record in monitor.history]

    found, wanted = records(neuron, "auto"), records("cpu", "nki")
    assert len(found) == 3
    for of_one, on_cpu in zip(found, wanted, strict=True):
        assert of_one["stalled"] == on_cpu["stalled"]  # counts
        torch.testing.assert_close(of_one["pair"], on_cpu["pair"], rtol=2**-20, atol=0)  # the device adds up in fp32


class SignsOfZeros(Own):
    """A step with `atan2`, for which there is no kernel."""

    def update(self, p: Any, lr: float) -> None:
        p.sub_(lr * torch.atan2(p.grad, p.grad.abs()))


@pytest.mark.filterwarnings("ignore::collage_neuron.ComputedOnHost")
def test_an_operation_without_a_kernel_runs_as_written_or_names_the_reference(neuron: torch.device) -> None:
    found = trained(SignsOfZeros, neuron)
    assert differing(found, trained(SignsOfZeros, "cpu", backend="nki")) == []
    with pytest.raises(UnsupportedUpdate, match=r"use backend='reference'"), compiled_only():
        trained(SignsOfZeros, neuron)
    wanted = trained(SignsOfZeros, "cpu", backend="reference")
    assert differing(trained(SignsOfZeros, neuron, backend="reference"), wanted) == []
