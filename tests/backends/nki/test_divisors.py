"""Divisors made of roots, squares and products: each is that of the update, and shown to be positive (stand-in)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import nki_standin
import pytest
import torch
from exact import update_of
from nki_runs import INFINITY, run, search_less

import collage_neuron
from collage_neuron.numerics.eft import Value, sqrt
from collage_neuron.passes.backends.nki import custom_op, source_cache
from collage_neuron.passes.backends.nki.lower import lower_to_nki


@pytest.fixture(autouse=True)
def _short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    search_less(monkeypatch)


ROOTS: dict[str, Callable[[Any], Value]] = {
    "root": lambda v: sqrt(v),
    "root of a root": lambda v: sqrt(sqrt(v)),
    "eighth root": lambda v: sqrt(sqrt(sqrt(v))),
    "root of a product with a root": lambda v: sqrt(sqrt(v) * 3.0),
    "root of a sum with a root": lambda v: sqrt(sqrt(v) + 0.5),
    "product with a root of a root": lambda v: sqrt(sqrt(v)) * 0.25 + 1.0,
    "root of a root that is read twice": lambda v: sqrt(sqrt(v)) + sqrt(v) * 0.0,
}


@pytest.mark.parametrize("name", ROOTS)
def test_a_divisor_has_all_of_its_roots(name: str) -> None:
    """Each quotient within 2**-20: roots that are missing make it larger or smaller by much more."""
    m, v = torch.randn(500), torch.rand(500).mul(20).sub(15).exp2()
    update = update_of(["m", "v"], lambda m, v: [m / (ROOTS[name](v) + 1e-8)])
    found = run(lower_to_nki(update, components={"m": "fp32", "v": "fp32"}), {"m": m, "v": v}, torch.zeros(0)).results
    wanted = in_float64(name, m, v)
    assert ((found["out0"].double() - wanted) / wanted).abs().max() < 2**-20


def in_float64(name: str, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The quotient, of a divisor whose roots are rounded to fp32."""
    divisor: Any = ROOTS[name](v.double())
    result: torch.Tensor = m.double() / (divisor + 1e-8)
    return result


class Scaled(torch.optim.Optimizer):
    """Divides by the square of a gradient that is multiplied by a number of the group; or by the number once."""

    def __init__(self, params: Sequence[torch.nn.Parameter], k: float, power: int = 2) -> None:
        super().__init__(params, {"lr": 0.1, "k": k})
        self.power = power

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                scaled = p.grad * group["k"]
                divisor = scaled * (scaled if self.power == 2 else p.grad) + 1
                p.addcdiv_(p.grad, divisor, value=-group["lr"])


def stepped(make: Callable[..., torch.optim.Optimizer], gradient: torch.Tensor, **options: Any) -> torch.Tensor:
    """The exact value of a parameter, at first zeros, after a compiled step."""
    p = torch.nn.Parameter(torch.zeros_like(gradient))
    optimizer = collage_neuron.compile(make([p]), verbose=False, **options)
    p.grad = gradient.to(p.dtype)
    optimizer.step()
    return collage_neuron.exact_value(optimizer, p)


@pytest.fixture
def nki(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The newer dialect on the stand-in, with a cache of its own."""
    monkeypatch.setenv(source_cache.FOLDER, str(tmp_path / "kernels"))
    with nki_standin.install("nki", "trn1", INFINITY):
        yield
    custom_op.function.cache_clear()


@pytest.mark.parametrize("k", [-1.0, 0.0, 3.0])
def test_the_square_of_a_product_with_a_number_of_any_sign_is_positive(k: float, nki: None) -> None:
    gradient = torch.linspace(-2, 2, 37)
    found, wanted = (stepped(partial(Scaled, k=k), gradient, backend=b) for b in ("nki", "reference"))
    assert (found - wanted).abs().max() <= 2**-20
    assert wanted.abs().max() > 0.015


def test_a_number_without_its_pair_is_still_asked_for(nki: None) -> None:
    with pytest.raises(ValueError, match=r"scalar c\d is -1\.0, but the kernel"):
        stepped(partial(Scaled, k=-1.0, power=1), torch.full((5,), 0.5), backend="nki", validate="off")
