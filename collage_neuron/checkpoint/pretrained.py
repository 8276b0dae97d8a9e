"""Saves a Hugging Face model with its exact fp32 weights, and the dtype that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron.checkpoint.fp32 import get_fp32_state_dict

DTYPE_KEYS = ("dtype", "torch_dtype")
"""What config.json calls the dtype: transformers 5, and 4."""


def save_pretrained_fp32(model: Any, optimizer: Optimizer, folder: str | Path, **settings: Any) -> None:
    """Writes a compiled model's exact weights in fp32, as ``model.save_pretrained`` lays them out.

    The model's own ``save_pretrained`` writes the bf16 words. Given a ``state_dict`` in fp32 it writes that, but
    ``dtype: bfloat16`` into config.json, by which ``from_pretrained`` rounds all of it again; here it is ``float32``.

    Args:
        model: the model, or one of PEFT, whose adapter alone is written.
        optimizer: the compiled optimizer, or accelerate's wrapper around it (``trainer.optimizer``).
        folder: where to write.
        settings: further arguments of ``save_pretrained``.
    """
    weights, _ = get_fp32_state_dict(model, getattr(optimizer, "optimizer", optimizer))
    model.save_pretrained(folder, state_dict=weights, **settings)
    config = Path(folder) / "config.json"
    if config.exists():  # an adapter has none
        config.write_text(json.dumps(_as_fp32(json.loads(config.read_text())), indent=2) + "\n")


def _as_fp32(found: Any) -> Any:
    """The configuration, and those of the models in it, with `float32` for `bfloat16`."""
    if not isinstance(found, dict):
        return found
    bf16 = str(torch.bfloat16).removeprefix("torch.")
    return {k: "float32" if k in DTYPE_KEYS and v == bf16 else _as_fp32(v) for k, v in found.items()}
