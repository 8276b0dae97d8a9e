"""Validation compares kernels with a user's step inside the documented domains of a device's functions (stand-in)."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import nki_standin
import pytest
import torch
from nki_runs import INFINITY, search_less

import collage_neuron
from collage_neuron.errors import TranslationError
from collage_neuron.passes.backends.nki import custom_op, source_cache
from collage_neuron.passes.backends.nki.backend import Nki
from collage_neuron.validation import synthetic


@pytest.mark.parametrize("largest", [2.0**30, 2e19])
def test_the_first_step_on_a_lazy_device_is_not_rejected_for_what_is_outside(
    largest: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Samples of lazy devices have drawn gradients; with one of 2e19 a divisor is beyond 2**42, where it is clamped."""
    monkeypatch.setattr(synthetic, "DEVICES", ("cpu",))
    monkeypatch.setattr(Nki, "largest", largest)
    monkeypatch.setenv(source_cache.FOLDER, str(tmp_path / "kernels"))
    search_less(monkeypatch)
    p = torch.nn.Parameter(torch.full((300,), 0.5).bfloat16())
    p.grad = torch.ones_like(p)
    with nki_standin.install("nki", "trn1", INFINITY):
        optimizer = collage_neuron.compile(torch.optim.AdamW([p]), backend="nki", verbose=False)
        with pytest.raises(TranslationError, match="drawn values") if largest > 2**42 else nullcontext():
            optimizer.step()
    custom_op.function.cache_clear()
