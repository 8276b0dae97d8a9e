"""A model in fp8 in several processes: in DDP, before the line or after it; FSDP is rejected with the reason.

A graph has the parts of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from worlds import in_turn, run_world

import collage_neuron
from collage_neuron import UnsupportedModel
from collage_neuron.matmuls.install import forward_of

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


def rejections() -> dict[tuple[str, str], str]:
    return {(when, wrapping): said(wrapping, when) for when in WHEN for wrapping in WRAPPINGS}


WHEN = ("sharded first", "compiled first", "sharded after a step")


def reduced(before: bool) -> tuple[list[torch.Tensor], int]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    model = DistributedDataParallel(model) if before else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = collage_neuron.compile(model, optimizer, matmul="fp8", rescale=0)
    model = model if before else DistributedDataParallel(model)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    model(x).float().square().mean().backward()
    forward = forward_of(model)
    assert forward is not None
    (graph,) = forward.backend.graphs
    return [p.grad for p in model.parameters() if p.grad is not None], len(graph.plan.products)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of two processes finds."""
    calls = {"fsdp": (rejections,)} | {before: (reduced, before) for before in (False, True)}
    found: list[dict[Any, Any]] = run_world(2, tmp_path_factory.mktemp("world"), in_turn, calls)
    return found


@pytest.mark.slow
def test_fsdp_is_rejected_before_compiling_and_after_it(world: list[dict[Any, Any]]) -> None:
    for own in world:
        for (when, wrapping), text in own["fsdp"].items():
            assert "use DDP, or leave matmul='fp8' out" in text, (when, wrapping, text)
            assert text.startswith("ValueError" if when == "sharded first" else "UnsupportedModel"), (when, wrapping)


@pytest.mark.slow
def test_gradients_are_reduced_wherever_ddp_is(world: list[dict[Any, Any]]) -> None:
    first, *others = [own[before] for own in world for before in (False, True)]
    assert first[1] == 2
    for gradients, products in others:
        assert products == 2
        assert all(torch.equal(a, b) for a, b in zip(first[0], gradients, strict=True))
