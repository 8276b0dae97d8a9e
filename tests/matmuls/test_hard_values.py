"""Values that scales are hard to find for: zeros, infinities, NaN, one-hot rows, outliers, wrong guesses."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from fp8_models import batch, compiled, error, gradients, graph, pair, small
from torch import Tensor, nn

import collage_neuron
from collage_neuron.matmuls.scales import finite_part, size_of


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


class TwoLosses(nn.Module):
    """A body with two branches, of two layers each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(64, 64)
        self.one, self.two = (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x)
        return self.one(h), self.two(h)


def test_a_branch_whose_loss_begins_later_is_measured_from_then_on() -> None:
    models = pair(TwoLosses().bfloat16())

    def step(seed: int, factor: float) -> float:
        for model in models:
            model.zero_grad()
            a, b = model(batch(seed))
            (a.float().square().mean() + b.float().square().mean() * factor).backward()
        return error(*(gradients(model)["two.0.weight"] for model in models))

    for seed in range(20):
        step(seed, 0.0)
    assert "warning: two.0.gradient was zero or not finite whenever it was" in collage_neuron.explain(models[0])
    step(20, 2.0**-30)
    with pytest.warns(UserWarning, match=r"100% of two.0.gradient become 0: its scale was off by 3\d binades"):
        assert step(21, 2.0**-30) < 0.2
    assert max(step(seed, 2.0**-30) for seed in range(22, 24)) < 0.2
    assert "warning" not in collage_neuron.explain(models[0])


def test_without_measurements_gradients_are_looked_at_until_none_is_zero() -> None:
    models = compiled(TwoLosses().bfloat16(), rescale=0), TwoLosses().bfloat16()
    for factor in (0.0, 0.0, 2.0**-30, 2.0**-30):
        for model in models:
            model.zero_grad()
            a, b = model(batch())
            (a.float().square().mean() + b.float().square().mean() * factor).backward()
        if factor:
            assert error(*(gradients(model)["two.0.weight"] for model in models)) < 0.2


def test_a_measurement_that_is_not_finite_is_repeated_at_once() -> None:
    model = compiled(small(), rescale=50)
    for seed in range(8):
        x = batch(seed)
        x[3, 5] = torch.nan if seed == 7 else 0
        model(x).float().sum().backward()
    model(batch(9)).float().sum().backward()
    assert [half.recalibration.history for half in graph(model).halves] == [[8, 9]] * 2


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


def test_one_bad_row_of_the_first_batch_costs_no_reduction() -> None:
    model = compiled(small())
    x = batch()
    x[3] = torch.nan
    x[4, 4] = torch.inf
    model(x)
    assert not graph(model).plan.reductions
    assert size_of(finite_part(x)).log == pytest.approx(size_of(batch()).log, abs=0.1)


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


def far_off() -> dict[str, Callable[[Tensor], Tensor]]:
    """Operations whose results are larger or smaller than rules say."""
    return {
        "filled": lambda x: x.masked_fill(x > 0, 3e4),
        "clamped": lambda x: x.clamp(min=1e4),
        "reciprocal": lambda x: 1 / x.abs().clamp(min=1e-5),
        "peaked": lambda x: (x * 50).softmax(-1) * 2.0**20,
        "centred": lambda x: (x + 1000) - (x + 1000).mean(0),
    }


class Guessed(nn.Module):
    """A layer behind an operation."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.name, self.layer, self.head = name, nn.Linear(64, 64, bias=False), nn.Linear(64, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(far_off()[self.name](x)))  # type: ignore[no-any-return]  # a Module returns Any


@pytest.mark.parametrize("name", far_off())
def test_a_first_call_without_gradients_and_a_first_step_are_right(name: str) -> None:
    plain = Guessed(name).bfloat16()
    model, _ = pair(plain)
    with torch.no_grad():
        y = model(batch())
        assert error(y, plain(batch())) < 0.15
        assert torch.equal(model(batch()), y)
    models = pair(plain)
    for seed in range(2):
        assert gradient_error(models, batch(seed), 2.0**-20, "layer.weight") < 0.15


@pytest.mark.parametrize("how", ["load_state_dict", "in place"])
def test_weights_that_are_exchanged_are_measured_again(how: str) -> None:
    model, plain = pair(small())
    larger = {n: v * 2.0**12 if n.endswith("weight") else v for n, v in model.state_dict().items()}
    with torch.inference_mode():
        for _ in range(5):
            model(batch())
    if how == "load_state_dict":
        model.load_state_dict(larger)
    else:
        with torch.no_grad():
            for n, p in model.named_parameters():
                p.copy_(larger[n])
    plain.load_state_dict(larger)
    with torch.no_grad():
        y = model(batch())
        assert error(y, plain(batch())) < 0.15
        assert torch.equal(model(batch()), y)


def test_dropout_of_a_call_that_is_corrected_is_drawn_once() -> None:
    class Dropped(Guessed):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(nn.functional.dropout(x, 0.5))

    model, plain = pair(Dropped("filled").bfloat16())
    with torch.no_grad():
        torch.manual_seed(3)
        y, after = model(batch()), torch.rand(3)
        torch.manual_seed(3)
        assert error(y, plain(batch())) < 0.15
        assert torch.equal(torch.rand(3), after)
