"""FSDP around a model in fp8 is rejected with the reason, in either order: a graph has the parts of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from worlds import run_world

import collage_neuron
from collage_neuron import UnsupportedModel

WRAPPINGS = ("root", "layers", "flat", "flat, original parameters")


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)).bfloat16()


def sharded(model: nn.Module, wrapping: str) -> nn.Module:
    """FSDP2 of the whole model or of its layers too, FSDP1 with parameters of its own or with the model's."""
    if wrapping.startswith("flat"):
        device = torch.device("cpu")
        return FullyShardedDataParallel(model, device_id=device, use_orig_params="original" in wrapping)
    for layer in model.children() if wrapping == "layers" else ():
        if list(layer.parameters()):
            fully_shard(layer)
    fully_shard(model)
    return model


def said(wrapping: str, when: str) -> str:
    """What is raised where a model is compiled with fp8 before it is sharded, after it, or sharded when it has run."""
    model = model_of()
    try:
        if when == "sharded first":
            collage_neuron.compile(sharded(model, wrapping), matmul="fp8")
        else:
            collage_neuron.compile(model, matmul="fp8", rescale=0)
            if when == "sharded after a step":
                model(torch.ones(4, 8).bfloat16())
            sharded(model, wrapping)(torch.ones(4, 8).bfloat16())
    except (ValueError, UnsupportedModel) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def body() -> dict[tuple[str, str], str]:
    return {(when, wrapping): said(wrapping, when) for when in WHEN for wrapping in WRAPPINGS}


WHEN = ("sharded first", "compiled first", "sharded after a step")


@pytest.mark.slow
def test_fsdp_is_rejected_before_compiling_and_after_it(tmp_path: Path) -> None:
    for own in run_world(2, tmp_path, body):
        for (when, wrapping), text in own.items():
            assert "use DDP, or leave matmul='fp8' out" in text, (when, wrapping, text)
            assert text.startswith("ValueError" if when == "sharded first" else "UnsupportedModel"), (when, wrapping)
