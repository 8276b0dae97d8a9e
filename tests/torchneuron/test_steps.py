"""Steps on the device `neuron`: kernels in the documented form, with the bits of the same steps on the CPU."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import neuron_device
import pytest
import torch
import torch_neuronx_standin
from on_neuron import Make, differing, of, parameters, step, trained, words
from torch import Tensor

import collage_neuron
from collage_neuron.errors import StepInterrupted, TranslationError
from collage_neuron.passes.backends.nki import custom_op, target
from collage_neuron.trace.recorded_classes import TRACE

IN_PLACE = "collage_neuron::update_in_place"

OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=1e-2),
}
ADAMW = OPTIMIZERS["adamw"]


@pytest.fixture(autouse=True)
def _on_trn2(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that are simulated on the CPU, to compare with, are those for a trn2 too."""
    monkeypatch.setenv(target.TARGET, "trn2")


def of_the_simulator(make: Make, **options: Any) -> torch.optim.Optimizer:
    return trained(make, "cpu", backend="nki", **options)


@pytest.mark.parametrize("strategy", ["plus", "split433"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_training_has_the_bits_of_kernels_on_the_cpu(name: str, strategy: str, neuron: torch.device) -> None:
    found = trained(OPTIMIZERS[name], neuron, strategy=strategy)
    assert differing(found, of_the_simulator(OPTIMIZERS[name], strategy=strategy)) == []
    assert {p.device for p in of(found)} == {neuron}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_traced_and_captured_bits_are_equal(name: str, neuron: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> torch.optim.Optimizer:
        optimizer = collage_neuron.compile(OPTIMIZERS[name](parameters(neuron, ((40, 9), (300,)))))
        for i in range(3):
            step(optimizer, i)
        return optimizer

    captured = run()
    monkeypatch.setenv(TRACE, "on")
    traced: Any = run()
    assert differing(traced, captured) == []
    traces = traced._collage_bookkeeping.traces
    assert (traces.misses, bool(traces.kinds)) == (0, True)


@pytest.mark.parametrize("cores", ["1", "2"])
@pytest.mark.parametrize("strategy", ["bf16", "light", "full", "fp32", "split423", "stochastic"])
def test_every_kind_of_word_is_updated_in_place(
    strategy: str, cores: str, neuron: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(target.VARIABLE, cores)
    found = trained(ADAMW, neuron, strategy=strategy)
    assert differing(found, of_the_simulator(ADAMW, strategy=strategy)) == []


def test_a_kernel_is_called_once_a_step_and_declares_what_it_changes(neuron: torch.device) -> None:
    optimizer = trained(ADAMW, neuron, steps=2, validate="off")
    torch_neuronx_standin.called.clear()
    step(optimizer, 7)
    assert torch_neuronx_standin.called == [IN_PLACE]
    schema = str(custom_op.in_place_operator()._opoverload._schema)  # type: ignore[attr-defined]
    assert schema.partition("(")[2] == "Tensor(a0!)[] written, Tensor[] read, str kernel) -> ()"


def test_a_step_copies_no_result_and_moves_no_tensor(neuron: torch.device) -> None:
    optimizer = trained(ADAMW, neuron, steps=2, validate="off")
    before = addresses(optimizer)
    neuron_device.copied.clear()
    step(optimizer, 7)
    assert addresses(optimizer) == before
    assert [c for c in neuron_device.copied if c == ("neuron", "neuron")] == []


def test_the_switch_leads_to_results_that_are_copied(neuron: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = trained(ADAMW, neuron)
    monkeypatch.setenv(custom_op.IN_PLACE, "0")
    torch_neuronx_standin.called.clear()
    neuron_device.copied.clear()
    assert differing(trained(ADAMW, neuron), wanted) == []
    assert torch_neuronx_standin.called == []
    assert ("neuron", "neuron") in neuron_device.copied


def test_an_undeclared_change_is_seen_by_the_stand_in(neuron: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the gradient were not what a kernel only reads, or a word not declared: the check that would say so can."""
    monkeypatch.setattr(torch_neuronx_standin, "_made", {})

    def careless(written: list[Tensor], read: list[Tensor]) -> None:
        read[0].add_(1)

    operator = torch_neuronx_standin.nki_op("tests::careless", careless, {"written"})
    x, y = (torch.zeros(3, device=neuron) for _ in range(2))
    with pytest.raises(AssertionError, match=r"tests::careless changed an argument that is not among mutates_args"):
        operator([x], [y])


def test_parameters_that_are_not_contiguous_are_copied_back(neuron: torch.device) -> None:
    """A kernel takes elements side by side."""

    def made(device: torch.device | str) -> torch.optim.Optimizer:
        g = torch.Generator().manual_seed(1)
        p = torch.nn.Parameter(torch.randn(12, 7, generator=g).bfloat16().to(device).t())
        own = torch.optim.SGD([p], lr=0.1, momentum=0.9)
        optimizer = collage_neuron.compile(own, backend="auto" if device != "cpu" else "nki")
        for i in range(3):
            step(optimizer, i)
        return optimizer

    found, wanted = made(neuron), made("cpu")
    assert not of(found)[0].is_contiguous()
    assert differing(found, wanted) == []


def test_a_step_that_is_skipped_changes_nothing(neuron: torch.device) -> None:
    optimizer = trained(ADAMW, neuron, nonfinite="skip")
    assert differing(optimizer, of_the_simulator(ADAMW, nonfinite="skip")) == []
    before = words(optimizer)
    for p in of(optimizer):
        p.grad = torch.full_like(p, torch.nan)
    optimizer.step()
    assert all(torch.equal(x, y) for x, y in zip(words(optimizer), before, strict=True))


def test_an_error_in_a_kernel_ends_training_until_loaded(neuron: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    optimizer = trained(ADAMW, neuron, validate="off")

    def fails(key: str) -> Callable[..., Any]:
        raise RuntimeError("the compiler's own words")

    monkeypatch.setattr(custom_op, "function", fails)
    with pytest.raises(StepInterrupted, match=r"the compiler's own words.*load the last checkpoint"):
        step(optimizer, 5)


def test_a_checkpoint_resumes_bit_for_bit_on_the_device(neuron: torch.device) -> None:
    wanted = trained(ADAMW, neuron, steps=3)
    file = io.BytesIO()
    torch.save({"params": [p.detach() for p in of(wanted)], "optimizer": wanted.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file)
    assert {p.device for p in saved["params"]} == {neuron}
    resumed = collage_neuron.compile(ADAMW([torch.nn.Parameter(p) for p in saved["params"]]))
    resumed.load_state_dict(saved["optimizer"])
    for optimizer in (wanted, resumed):
        step(optimizer, 9)
    assert differing(resumed, wanted) == []


def test_a_kernel_that_differs_is_found_before_updates(neuron: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Validation of the first steps, on drawn values: here of a kernel whose call does nothing at all."""
    monkeypatch.setattr(custom_op, "function", lambda key: lambda *tensors: None)
    monkeypatch.setattr("collage_neuron.runtime.step_plan.require_sound", lambda backend, device, strategy: None)
    optimizer = collage_neuron.compile(ADAMW(parameters(neuron)))
    before = [p.detach().cpu() for p in of(optimizer)]
    with pytest.raises(TranslationError):
        step(optimizer, 0)
    assert all(torch.equal(p.detach().cpu(), x) for p, x in zip(of(optimizer), before, strict=True))


def test_a_model_is_compiled_and_trained_on_the_device(neuron: torch.device) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4))
    model = model.to(neuron)
    x, y = (torch.randn(32, n).bfloat16().to(neuron) for n in (8, 4))
    model, optimizer = collage_neuron.compile(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - y).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert "backend nki" in collage_neuron.explain(optimizer)


def addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    params = of(optimizer)
    found = [p.data_ptr() for p in params]
    return found + [x.data_ptr() for p in params for x in optimizer.state[p].values() if isinstance(x, Tensor)]
