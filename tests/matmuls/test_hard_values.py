"""Values that scales are hard to find for: zeros, infinities, NaN, one-hot rows, outliers, wrong guesses."""

from __future__ import annotations

import copy

import pytest
import torch
from fp8_models import batch, compiled, error, gradients, pair, small
from torch import Tensor, nn

import collage_neuron


def gradient_error(models: tuple[nn.Module, nn.Module], x: Tensor, factor: float, name: str = "0.weight") -> float:
    for model in models:
        model.zero_grad()
        (model(x).float().square().mean() * factor).backward()
    found, wanted = (gradients(model)[name] for model in models)
    return error(found, wanted)


# ---- gradients that are zero or not finite at first


@pytest.mark.parametrize("first", [0.0, torch.inf, torch.nan])
def test_gradients_after_unusable_ones_are_right(first: float) -> None:
    """Those of 20 calls, in which scales of gradients cannot be found; the next one has one that is far from 1."""
    models = pair(small())
    for seed in range(20):
        gradient_error(models, batch(seed), first)
    assert "warning: the gradients of the outputs were zero or not finite" in collage_neuron.explain(models[0])
    for seed in range(20, 24):
        assert gradient_error(models, batch(seed), 2.0**-30) < 0.2
    assert "warning" not in collage_neuron.explain(models[0])


# ---- what is not finite stays so


@pytest.mark.parametrize("keep", [None, ()])
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_rows_that_are_not_finite_give_none_that_are(bad: float, keep: tuple[str, ...] | None) -> None:
    model = compiled(small(), keep=keep)
    x = batch()
    model(x)
    x[3, 5] = bad
    y = model(x)
    assert not bool(y[3].isfinite().any())
    assert bool(y[:3].isfinite().all())
    y.float().sum().backward()
    assert not bool(gradients(model)["0.weight"].isfinite().all())


def test_gradients_that_overflow_are_skipped() -> None:
    model = small().float()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model, optimizer = collage_neuron.compile(
        model, optimizer, matmul="fp8", keep=(), nonfinite="skip", verbose=False, validate="off"
    )
    for factor in (1.0, torch.inf):
        before = copy.deepcopy(model.state_dict())
        optimizer.zero_grad()
        (model(batch()).float().square().mean() * factor).backward()
        optimizer.step()
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items()) == (factor == torch.inf)


# ---- large and small elements


def one_hot(seed: int, width: int) -> Tensor:
    rows = torch.randint(width, (8,), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.one_hot(rows, width).bfloat16()


@pytest.mark.parametrize("rescale", [0, 50])
def test_one_hot_rows_fit(rescale: int) -> None:
    width = 1 << 18
    model = nn.Sequential(nn.Linear(width, 8), nn.Linear(8, 8)).bfloat16()
    wanted = model(one_hot(1, width))
    compiled(model, rescale=rescale)
    for seed in range(2):
        y = model(one_hot(seed, width))
    assert error(y, wanted) < 0.2


def test_outliers_that_do_not_fit_are_warned_of_once() -> None:
    model = compiled(nn.Sequential(nn.Linear(64, 16, bias=False), nn.Linear(16, 4)).bfloat16(), rescale=50)
    x = batch(rows=4096)
    x[0, 7] = 2.0**16
    model(x)
    with pytest.warns(UserWarning, match=r"\d\d% of 0.input saturate though its scale fits.*name '0' in keep") as found:
        model(x)
    assert len(found) == 1
    for _ in range(3):
        model(x)
    assert "of 0.input saturate though its scale fits" in collage_neuron.explain(model)


@pytest.mark.parametrize("factor", [2.0**-60, 2.0**60])
def test_gradients_of_any_likely_size(factor: float) -> None:
    models = pair(small())
    assert max(gradient_error(models, batch(seed), factor) for seed in range(3)) < 0.2


@pytest.mark.parametrize("factor", [2.0**-110, 2.0**115])
def test_gradients_beyond_the_reach_of_scales_are_warned_of(factor: float) -> None:
    models = pair(small())
    with pytest.warns(UserWarning, match=r"gradient .*scales reach 48 \(e4m3\), 76 \(e5m2\) binades.*scale the loss"):
        [gradient_error(models, batch(seed), factor) for seed in range(2)]


def test_a_batch_without_rows() -> None:
    model = compiled(small(), rescale=50)
    assert model(batch(rows=0)).shape == (0, 8)
    model(batch()).float().sum().backward()
    model(batch(rows=0)).float().sum().backward()
    assert bool(model(batch()).isfinite().all())


# ---- models that are never trained
