"""Samples of updates that compute with sizes: a size of a sample may be that of the parameter by chance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from as_written import Written
from torch import Tensor

import collage_neuron
from collage_neuron.validation import validate

pytestmark = pytest.mark.validated

SIZES: dict[str, Callable[[Tensor], float]] = {
    "numel": lambda p: math.sqrt(p.numel()),
    "rows": lambda p: p.shape[0],
    "bytes": lambda p: p.nbytes / 4,
}
SHAPES = ((512,), (16, 32), (2, 300), (25, 8), (6400,), (32, 200), (25, 256), (5, 5), (20, 20, 20))
"""As many elements or rows as samples have: two or 25 rows of 256."""


class Scaled(Written):
    """Divides gradients by a size."""

    def update(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.sub_(g, alpha=group["lr"] / SIZES[group["size"]](p))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sizes_are_those_of_the_parameter(shape: tuple[int, ...], size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validate, "is_due", lambda steps: True)
    torch.manual_seed(0)
    p = torch.nn.Parameter(torch.randn(shape).bfloat16())
    q = torch.nn.Parameter(p.detach().float())
    own, twin = collage_neuron.compile(Scaled([p], size=size), strategy="fp32"), Scaled([q], size=size)
    for _ in range(3):
        p.grad = torch.randn(shape).bfloat16()
        q.grad = p.grad.float()
        own.step()
        twin.step()
    torch.testing.assert_close(collage_neuron.exact_value(own, p), q.detach(), rtol=2**-21, atol=2**-24)
    assert validate.history_of(own).compared > 0
