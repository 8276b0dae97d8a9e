"""Rejects an update that a backend cannot run, and says which backend can."""

from __future__ import annotations

from functools import cache

import torch

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.backends.protocol import AUTO, Backend, EveryDevice
from collage_neuron.passes.backends.registry import preferred, suits
from collage_neuron.passes.ir.update import Update


@cache
def _reason(backend: Backend, update: Update) -> str | None:
    return backend.supports(update)


def check_supported(backend: Backend, update: Update, device: torch.device) -> None:
    """Raises UnsupportedUpdate with the reason if `backend` cannot run `update`, for parameters on `device`."""
    reason = _reason(backend, update)
    if reason is None:
        return
    if reason.endswith(AUTO):  # which a backend says without knowing which ones there are, nor what was chosen
        other = _able(backend, update, device)
        advice = ": choose another strategy, or leave the optimizer uncompiled"
        reason = reason.removesuffix(AUTO) + (advice if other is None else f"; use backend={other!r}")
    raise UnsupportedUpdate(backend.advised(reason, device))


def _able(backend: Backend, update: Update, device: torch.device) -> str | None:
    """Another backend on `device` that can run `update`; the reference only where it needs no probe."""
    for other in preferred(device):
        is_there = not isinstance(other.devices, EveryDevice) or other.is_exact_on(device)
        if other is not backend and is_there and suits(other, device) and _reason(other, update) is None:
            return other.name
    return None
