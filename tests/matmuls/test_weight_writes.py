"""Sizes that change at once: weights that other code writes, values that jump, several threads; right, or warned of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from threading import Thread
from typing import Any

import pytest
import torch
from fp8_models import batch, compiled, error, gradients, graph, pair, small
from torch import Tensor, nn
from torch.func import functional_call

import collage_neuron

FP8 = 0.2
"""A relative error in norm that gradients of three layers in fp8 have at most; of a scale that is far off it is 1."""


def trained(models: Iterable[nn.Module], loss: Callable[[nn.Module], Tensor]) -> float:
    """Runs forward and backward of both. The error of the first layer's gradient."""
    for model in models:
        model.zero_grad()
        loss(model).backward()
    found, wanted = (gradients(model)["0.weight"] for model in models)
    return error(found, wanted)


def mean_square(x: Tensor, factor: float = 1.0) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        y: Tensor = model(x)
        return y.float().square().mean() * factor

    return loss


def enlarge(models: Iterable[nn.Module], factor: float) -> None:
    with torch.no_grad():
        for model in models:
            model.get_parameter("2.weight").mul_(factor)


# ---- weights


def test_weights_that_are_loaded_in_training_fit_in_the_next_call() -> None:
    models = pair()
    for seed in range(20):
        trained(models, mean_square(batch(seed)))
    for model in models:
        model.load_state_dict({n: v * 2.0**8 if n == "2.weight" else v for n, v in model.state_dict().items()})
    assert max(trained(models, mean_square(batch(seed))) for seed in (20, 21)) < FP8


def test_weights_that_are_written_after_training_fit_in_the_next_evaluation() -> None:
    models = pair()
    for seed in range(3):
        trained(models, mean_square(batch(seed)))
    with torch.no_grad():
        for seed in range(9):
            [model(batch(seed)) for model in models]
        enlarge(models, 2.0**12)
        assert error(*(model(batch()) for model in models)) < FP8


def mean_square_given(factor: float) -> Callable[[nn.Module], Tensor]:
    def loss(model: nn.Module) -> Tensor:
        given = {n: p * factor if n == "2.weight" else p for n, p in model.named_parameters()}
        y: Tensor = functional_call(model, given, batch())
        return y.float().square().mean()

    return loss


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch.compile, of what is no leaf
@pytest.mark.parametrize("trains", [False, True])
def test_weights_that_are_given_for_a_call_fit(trains: bool) -> None:
    models = pair()

    for factor in (1.0, 1.0, 1.0, 1.0, 1.0, 2.0**12, 1.0, 2.0**12):
        loss = mean_square_given(factor)
        if trains:
            assert trained(models, loss) < FP8
        else:
            with torch.no_grad():
                assert error(*(loss(model) for model in models)) < FP8


def test_writes_of_steps_bring_no_measurement() -> None:
    model = small().float()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = collage_neuron.compile(model, optimizer, matmul="fp8", verbose=False)
    measured = []
    for i in range(51):
        mean_square(batch(i))(model).backward()
        measured.append(graph(model).halves[0].recalibration.history[-1])
        optimizer.step()
        optimizer.zero_grad()
    assert list(dict.fromkeys(measured)) == [1, 2, 3, 4, 8, 16, 32, 51]


# ---- values


def test_a_loss_that_changes_its_scale_is_warned_of() -> None:
    models = pair()
    for seed in range(5):
        trained(models, mean_square(batch(seed)))
    with pytest.warns(UserWarning, match=r"100% of 2.gradient become 0: its scale was off by 40 binades; measure more"):
        errors = [trained(models, mean_square(batch(seed), 2.0**-40)) for seed in range(5, 10)]
    assert errors[0] == 1
    assert errors[-1] < FP8


def test_an_evaluation_whose_inputs_change_is_warned_of() -> None:
    models = pair()
    with torch.no_grad():
        for seed in range(5):
            [model(batch(seed)) for model in models]
        with pytest.warns(UserWarning, match=r"of 0.input saturate: its scale was off by 16 binades; measure more"):
            errors = [error(*(model(batch(seed) * 2.0**16) for model in models)) for seed in range(5, 12)]
    assert errors[0] > 0.9
    assert max(errors[2:]) < FP8


class Deep(nn.Module):
    """Twelve layers behind values that are so small that each layer hides the next one, if its scale is off."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(12)), nn.Linear(64, 8, bias=False))
        for layer in self.layers:
            nn.init.normal_(layer.get_parameter("weight"), std=0.125)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(x.clamp(min=0, max=1e-12))
        return y


@pytest.mark.parametrize("trains", [False, True])
def test_a_first_call_looks_until_the_last_layer_fits(trains: bool) -> None:
    plain = Deep().bfloat16()
    model = compiled(copy.deepcopy(plain), rescale=50)
    with torch.set_grad_enabled(trains):
        found, wanted = model(batch()), plain(batch())
    assert error(found, wanted) < 0.25  # 1 if a layer gives zeros; twelve layers round in turn


@pytest.mark.filterwarnings("ignore:matmul='fp8'.*its scale was off")
def test_batches_of_two_magnitudes_take_their_largest_one() -> None:
    models = pair()
    errors = [trained(models, mean_square(batch(i) * (2.0**14 if i % 2 else 1))) for i in range(12)]
    assert errors[1] > 0.9
    assert max(errors[4:]) < FP8
    text = collage_neuron.explain(models[0])
    assert (
        "0.input takes its largest magnitude in every step: its size changed by more than 2 binades in each of 3"
        in text
    )
    assert "0.input:" not in text
    assert "0.weight takes" not in text
    assert trained(models, mean_square(batch() * 2.0**-14)) < FP8


@pytest.mark.filterwarnings("ignore:matmul='fp8'.*its scale was off")
def test_two_backwards_of_one_forward_take_their_largest_magnitude() -> None:
    models = pair()

    def step(model: nn.Module) -> Tensor:
        loss = mean_square(batch())(model)
        (loss * 2.0**-40).backward(retain_graph=True)
        model.zero_grad()
        return loss

    errors = [trained(models, step) for _ in range(10)]
    assert errors[1] > 0.9
    assert max(errors[7:]) < FP8


# ---- threads


def test_threads_take_turns() -> None:
    """Captures at once are an error of torch's, and the fused attention stayed switched off in the process."""
    models = pair()
    errors: list[float] = []

    def run(k: int) -> None:
        for seed in range(5):
            with torch.no_grad():
                errors.append(error(*(model(batch(10 * k + seed)) for model in models)))

    threads = [Thread(target=run, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 20
    assert max(errors) < FP8
    assert torch.backends.mha.get_fastpath_enabled()
