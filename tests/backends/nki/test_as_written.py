"""Steps as written under backend="nki": values are decoded, and stored, without a kernel (stand-in)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from as_written import Written
from rough_format import ROUGH

import collage_neuron
from collage_neuron.numerics.formats import FORMATS
from collage_neuron.passes.backends.registry import get


class ByNorm(Written):
    """A momentum, divided by the norm of the gradient."""

    def update(self, p: torch.Tensor, g: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        m = state.setdefault("m", torch.zeros_like(p))
        m.mul_(0.9).add_(g / (g.norm() + 1e-8))
        p.add_(m, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "a norm": ByNorm,
    "Adafactor": torch.optim.Adafactor,
    "Muon": torch.optim.Muon,
    "SGD": partial(torch.optim.SGD, lr=0.01, momentum=0.9),
}


def trained(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> torch.Tensor:
    """The exact value of a parameter after three steps, compiled with the options, or else in fp32."""
    g = torch.Generator().manual_seed(0)
    p = torch.nn.Parameter(torch.randn(6, 130, generator=g).bfloat16().float())
    optimizer = make([p])
    if options:
        optimizer = collage_neuron.compile(optimizer, verbose=False, **options)
    for _ in range(3):
        p.grad = torch.randn(p.shape, generator=g).bfloat16().to(p.dtype)
        optimizer.step()
    return collage_neuron.exact_value(optimizer, p) if options else p.detach()


def test_what_no_kernel_computes_is_bit_for_bit_the_step_in_fp32(dialect: str) -> None:
    found = trained(torch.optim.Muon, backend="nki", strategy="fp32")
    assert torch.equal(found, trained(torch.optim.Muon))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_formats_without_kernels_have_the_same_bits(name: str, dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGD and the norm are captured by the reference: their momenta are rounded elsewhere, by a sixth bit of it."""
    monkeypatch.setitem(FORMATS, "rough", ROUGH)
    options = {"strategy": {"param": "bf16x2", "*": "rough"}, "validate": "off"}
    found, wanted = (trained(OPTIMIZERS[name], backend=b, **options) for b in ("nki", "reference"))
    assert (found - wanted).abs().max() <= (2**-6 * 0.03 if name != "Muon" else 0)


def test_values_on_xla_are_converted_by_the_backend_for_xla() -> None:
    """No graph has a kernel for them: trn1 takes one."""
    assert get("nki").converter(torch.device("xla", 0)).name == "xla"
    assert get("nki").converter(torch.device("cpu")).name == "reference"
    assert get("native").converter(torch.device("cpu")).name == "native"
