"""Stand-ins for Neuron's training libraries, which install only beside a Neuron device: how each builds the optimizer.

Written from what the libraries do (neuronx_distributed 0.19 `trainer.trainer` and `trainer.optimizer`,
neuronx_distributed_training 1.7 `lightning_modules.model.base`, NeMo 1 `core.optim.optimizers`, optimum-neuron 0.4
`accelerate.accelerator` and `trainers.transformers`); what they build on, ZeRO-1, is torch_xla's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch_xla.distributed.zero_redundancy_optimizer import ZeroRedundancyOptimizer

ZeRO: Any = ZeroRedundancyOptimizer
"""torch_xla annotates it more narrowly than it is used, by itself too."""

Class = Callable[..., Optimizer]
"""What the libraries take for an optimizer class: a class, or a `functools.partial` of one."""


# --- neuronx_distributed ----------------------------------------------------------------------------------------------


class NxDOptimizer(Optimizer):
    """The wrapper: is an Optimizer by name alone (its constructor never runs), hands everything on."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)
    param_groups = property(lambda self: self.optimizer.param_groups)
    defaults = property(lambda self: self.optimizer.defaults)

    def __getstate__(self) -> dict[str, Any]:
        return self.optimizer.__getstate__()

    def step(self, closure: Any = None) -> Any:
        """In the library also: the reduction of gradients where ZeRO-1 is off, and clipping."""
        return self.optimizer.step(closure=closure)

    def zero_grad(self, set_to_none: bool = False) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Marks what belongs to experts, by an attribute of every state: numbers in a state would not do."""
        saved = self.optimizer.state_dict()
        for state in saved["state"].values():
            for value in state.values():
                value.expert_model_parallel = False
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict)


def initialize_parallel_optimizer(
    nxd_config: dict[str, Any], optimizer_class: Class, parameters: Iterable[Any], **defaults: Any
) -> NxDOptimizer:
    """neuronx_distributed's: with ZeRO-1 the class goes to it, and `defaults` to both."""
    if not nxd_config["zero_one_enabled"]:
        return NxDOptimizer(optimizer_class(parameters, **defaults))
    own: dict[str, Any] = {"grad_clipping": False, "pin_layout": False}
    if nxd_config.get("use_fp32_grad_acc", True):
        own |= {"use_grad_acc_hook": True, "higher_cc_precision": True}
    return NxDOptimizer(ZeRO(parameters, optimizer_class, **own, **defaults))


# --- neuronx_distributed_training (NeMo) ------------------------------------------------------------------------------

OPTIMIZERS: dict[str, type[Optimizer]] = {}
"""NeMo's registry."""


def register_optimizer(name: str, optimizer: type[Optimizer]) -> None:
    """NeMo's, without its third argument, a dataclass of settings that is known by the class's `__name__`."""
    assert optimizer.__name__
    OPTIMIZERS[name] = optimizer


def get_optimizer(name: str) -> Class:
    return partial(OPTIMIZERS[name])


def configure_optimizers(
    nxd_config: dict[str, Any], name: str, groups: list[dict[str, Any]], **settings: Any
) -> NxDOptimizer:
    """NxDT's: NeMo builds the optimizer once, its `defaults` are all that the one that trains is built with."""
    first = get_optimizer(name)(groups, **settings)
    return initialize_parallel_optimizer(nxd_config, get_optimizer(name), groups, **first.defaults)


# --- optimum-neuron ---------------------------------------------------------------------------------------------------


def mixed_precision_config(stochastic_rounding: bool = True) -> None:
    """What making optimum's MixedPrecisionConfig does to the process; the trainer's default is True."""
    os.environ["NEURON_RT_STOCHASTIC_ROUNDING_EN"] = str(int(stochastic_rounding))


def create_optimizer(model: nn.Module, optimizer_class: type[Optimizer], settings: dict[str, Any]) -> Optimizer:
    """The trainer's, with `optimizer_cls_and_kwargs`: two groups, decayed and not."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return optimizer_class(groups, **settings)


def prepare_optimizer_for_zero_1(optimizer: Optimizer, master_weights: bool = False) -> Any:
    """The accelerator's: from `param_groups` and class, no keyword arguments."""
    return ZeRO(
        optimizer.param_groups,
        optimizer.__class__,
        pin_layout=False,
        grad_clipping=False,  # the accelerated optimizer around it sets this before each step
        bucket_cap_mb_all_gather=130,
        bucket_cap_mb_reduce_scatter=130,
        optimizer_dtype=torch.float32 if master_weights else torch.bfloat16,
    )
