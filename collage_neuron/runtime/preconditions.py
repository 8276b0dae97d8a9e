"""Preconditions of compiling and stepping; a violation raises an error that says what, where and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.states.shared_memory import is_given_back, overlaps_itself
from collage_neuron.states.step_inventory import Seen


def check_optimizer(optimizer: Optimizer) -> None:
    """Raises for an optimizer that cannot be compiled, before anything about it is changed."""
    check_mode()
    check_once(optimizer)
    for i, group in enumerate(optimizer.param_groups):
        check_differentiable(group, i)
        devices = sorted({str(p.device) for p in group["params"]})
        if len(devices) > 1:
            raise ValueError(
                f"param_groups[{i}] has parameters on {' and '.join(devices)}; a group is updated by one program: put "
                "the parameters of each device in a group of their own"
            )
        for j, p in enumerate(group["params"]):
            if not is_left_alone(p):
                check_param(p, f"param_groups[{i}]['params'][{j}]")
        check_learning_rate(group, i)


def check_once(optimizer: Optimizer) -> None:
    """Raises ValueError for a parameter that is in the groups twice."""
    count = Counter(p for group in optimizer.param_groups for p in group["params"])
    if twice := [p for p, n in count.items() if n > 1]:
        raise ValueError(
            f"a parameter of shape {list(twice[0].shape)} is in the groups twice, and a step would update it twice; "
            "hand over each parameter once: list(dict.fromkeys(params))"
        )


def check_mode() -> None:
    """Raises RuntimeError in a mode in which new tensors cannot be trained."""
    if torch.is_inference_mode_enabled():
        raise RuntimeError(
            "collage_neuron.compile is called under torch.inference_mode, and parameters and states that are made "
            "there cannot be trained: call it outside of it"
        )


def check_differentiable(group: Mapping[str, Any], index: int) -> None:
    """Raises ValueError for a group that asks for gradients of the step."""
    if group.get("differentiable"):
        raise ValueError(
            f"param_groups[{index}] has differentiable=True; autograd through an update that stores rounded pairs is "
            "not defined: use differentiable=False"
        )


FLOATS = (torch.bfloat16, torch.float32)


def is_left_alone(p: torch.Tensor) -> bool:
    """Returns True for a frozen parameter of another dtype than bf16 and fp32: a base in fp16, int8 or fp8.

    It keeps its dtype, in the model and in a group of an optimizer. A step rejects it if it is ever trained.
    """
    return not p.requires_grad and p.dtype not in FLOATS


def check_stepped(params: Sequence[torch.Tensor], places: Iterable[object], seen: Seen | None = None) -> None:
    """Checks parameters that have a gradient, and their gradients; `places` say in words where they are.

    What is asked of parameters is part of what a step has `seen`, and is asked once.

    Raises:
        TypeError, UnsupportedUpdate: what `check_param` and `check_gradient` raise.
        ValueError: the same.
    """
    if not params:
        return
    known = {} if seen is None else seen.structure.table("sound")
    key, grads = tuple(map(id, params)), list(map(attrgetter("grad"), params))  # the structure holds the parameters
    if key in known and known[key](*grads):  # one call for all gradients: they are like those that were checked
        return
    for p, where in zip(params, places, strict=True):
        check_param(p, where)
        check_gradient(p, where)
    if seen is not None:
        seen.structure.keep(known, key, torch_privates.guard(grads))


def check_param(p: torch.Tensor, where: object) -> None:
    """Raises TypeError if `p` is not a bf16 or fp32 tensor, ValueError if it has no memory of its own."""
    if p.dtype not in FLOATS:
        kind = "complex" if p.is_complex() else "float"
        raise TypeError(
            f"{where} is {p.dtype} ({kind}), shape {list(p.shape)}; only bfloat16 and float32 parameters can be "
            "compiled: convert it, freeze it (requires_grad_(False)), or leave it to an optimizer of its own"
        )
    if p.is_meta:
        raise ValueError(
            f"{where}, shape {list(p.shape)}, is on the meta device and has no values: materialize the model first "
            "(model.to_empty(device=...), then its weights), and compile after that"
        )
    if p.layout is not torch.strided:
        raise TypeError(
            f"{where}, shape {list(p.shape)}, is sparse ({p.layout}); only dense parameters can be compiled: use "
            "p.to_dense()"
        )
    if p.is_inference():
        raise ValueError(
            f"{where}, shape {list(p.shape)}, was made under torch.inference_mode, where autograd and in-place updates "
            "cannot follow it: make the model outside of it, or copy it there (copy.deepcopy)"
        )
    if is_given_back(p):
        raise ValueError(
            f"{where}, shape {list(p.shape)}, has no memory: it was given back (untyped_storage().resize_(0)), as FSDP "
            "does between steps; compile where the parameter has its values"
        )
    if not p.is_contiguous() and overlaps_itself(p):
        raise ValueError(
            f"{where}, shape {list(p.shape)}, has strides {list(p.stride())}: several of its elements lie in the same "
            "place (expand), and no optimizer can update them apart; give it memory of its own (p.data = "
            "p.data.contiguous()), or make the smaller tensor the parameter"
        )


def check_fully_shard(model: torch.nn.Module) -> None:
    """Raises ValueError if FSDP2 has already allocated buffers for the fp32 parameters of `model`."""
    for name, module in model.named_modules():
        if torch_privates.has_laid_out(module) and any(p.dtype == torch.float32 for p in module.parameters()):
            raise ValueError(
                f"fully_shard has laid out buffers for the float32 parameters of {name or 'the model'} in a first "
                "forward, and cannot exchange them for bfloat16: compile before the first forward, or convert the "
                "model before fully_shard"
            )


def check_gradient(p: torch.Tensor, where: object) -> None:
    """Raises if the gradient of `p` cannot enter an elementwise update of dense real numbers."""
    grad = p.grad
    assert grad is not None
    if grad.layout is not torch.strided:
        raise UnsupportedUpdate(  # a RuntimeError, as torch's own optimizers raise
            f"the gradient of {where} is sparse ({grad.layout}); use sparse=False in the embedding"
        )
    if grad.dtype not in FLOATS:
        raise TypeError(f"the gradient of {where} is {grad.dtype}; only bfloat16 and float32 gradients are supported")
    if grad.shape != p.shape:  # torch compares them when a gradient is set, but not when `p.data` is
        raise ValueError(
            f"the gradient of {where} has another shape, {list(grad.shape)}: p.data was exchanged after the backward "
            "pass; nothing was updated: set p.grad to None, and run forward and backward again"
        )
    if grad.device != p.device:
        raise ValueError(f"the gradient of {where} is on {grad.device} and the parameter on {p.device}")


def check_settings(group: Mapping[str, Any], index: int) -> None:
    """Raises for settings of a group with which no step can be taken; code may have set them between steps."""
    if type(group).__getitem__ is not dict.__getitem__ or type(group).get is not dict.get:
        raise TypeError(
            f"param_groups[{index}] is a {type(group).__name__} that computes what it returns, and a step is recorded "
            "with the values that it holds; use a dict, and set its values between steps"
        )
    check_differentiable(group, index)
    check_learning_rate(group, index)


LARGEST = float(torch.finfo(torch.float32).max)


def check_learning_rate(group: Mapping[str, Any], index: int) -> None:
    """Raises ValueError for a learning rate that is NaN or infinite in fp32: a step with it would lose the parameters.

    Raises TypeError for a learning rate that is a string, as configuration files may give it.
    """
    lr = group.get("lr")
    if isinstance(lr, str):
        raise TypeError(f"param_groups[{index}]['lr'] is the text {lr!r}; nothing was updated: set a number")
    if isinstance(lr, (int, float, torch.Tensor)) and not abs(float(lr)) <= LARGEST:  # nor is NaN
        raise ValueError(f"param_groups[{index}]['lr'] is {float(lr)}; nothing was updated: set a finite learning rate")
