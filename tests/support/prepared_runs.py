"""What the processes of `worlds` run for `test_wrapping`: accelerate and Fabric, which wrap, and then the line."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

os.environ["USE_TORCH_XLA"] = "0"  # read when accelerate is imported: these runs are on the CPU

import torch
import torch.distributed as dist
from sampling import part
from sharded_runs import Whole, adamw, model_of, refusal, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from wrapped_runs import FORMS, STEPS, batch, by_hand

import collage_neuron
from collage_neuron import UnsupportedUpdate

Prepared = tuple[Any, Any, Callable[[torch.Tensor], Any]]
"""The model and the optimizer as the library hands them back, and its `backward`."""


def environment() -> None:
    """What a launcher would have set; the process group is there already."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "test"}


def accelerate(model: nn.Module, optimizer: Optimizer) -> Prepared:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    return *accelerator.prepare(model, optimizer), accelerator.backward


def fabric(model: nn.Module, optimizer: Optimizer) -> Prepared:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    strategy = DDPStrategy(cluster_environment=TorchElasticEnvironment(), process_group_backend="gloo")
    made = Fabric(accelerator="cpu", devices=dist.get_world_size(), strategy=strategy)
    made.launch()
    return *made.setup(model, optimizer), made.backward


def message(model: Any, prepared: Any) -> str:
    """What is said of the wrapper itself, beside a model that it changes nothing of."""
    said = refusal(lambda: collage_neuron.compile(model, prepared), UnsupportedUpdate)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    return said


LIBRARIES: dict[str, Callable[[nn.Module, Optimizer], Prepared]] = {f.__name__: f for f in (accelerate, fabric)}


def every_form(library: str) -> tuple[dict[str, Whole], str]:
    """All bits by form of the call, and of replicas that nothing wraps; the message for the wrapper itself."""
    environment()
    found, said = {"by hand": by_hand()}, ""
    for name in (*part(FORMS, 2, library), "the one inside"):
        raw = adamw(start := model_of(0))
        model, optimizer, backward = LIBRARIES[library](start, raw)
        assert any(isinstance(m, DistributedDataParallel) for m in model.modules())
        said = message(model, optimizer)
        if name in FORMS:
            collage_neuron.compile(*FORMS[name](start, model, raw), strategy="full")
        else:
            collage_neuron.compile(model, optimizer.optimizer, strategy="full")
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(model(batch(step, dist.get_rank()).bfloat16()).float().square().mean())
            optimizer.step()
        found[name] = whole(raw)
    return found, said
