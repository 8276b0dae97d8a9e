"""Sums the gradients of several microsteps in fp32, where autograd alone would round each sum to bf16.

torch adds a gradient in place to the one that `p.grad` holds, in the dtype of the latter. A gradient that is widened to
fp32 after the first microstep therefore makes autograd itself sum the rest in fp32. Everything that reads `p.grad`
reads the sum: clipping, `GradScaler`, and the compiled step, which takes gradients of either dtype as they come.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from collage_neuron.runtime import wrappers
from collage_neuron.runtime.preconditions import FLOATS
from collage_neuron.states.sharding import is_sharded, set_gradient


class Fp32Sums:
    """The hooks of one call of `accumulate_in_fp32`."""

    def __init__(self, params: Iterable[torch.Tensor]) -> None:
        self._params = list(params)
        self._ddp_of: dict[torch.Tensor, Any] | None = _ddp_of_each(self._params) or None
        self._handles: list[RemovableHandle] = [self._hooked(p) for p in self._params]

    def _hooked(self, p: torch.Tensor) -> RemovableHandle:
        requires_grad = p.requires_grad  # torch rejects the hook for a frozen parameter, which may be thawed later
        try:
            handle: RemovableHandle = p.requires_grad_(True).register_post_accumulate_grad_hook(self)
            return handle
        finally:
            p.requires_grad_(requires_grad)

    def __call__(self, p: torch.Tensor) -> None:
        """Runs in the backward pass, after the gradient of `p` was added to `p.grad` and before DDP reduces it."""
        grad = p.grad
        assert grad is not None
        dtype = p.dtype if self._is_reduced(p) else torch.float32
        # One with a graph (create_graph=True) stays: a loss of it is to be differentiated.
        if grad.dtype != dtype and not grad.requires_grad:
            set_gradient(p, grad.to(dtype))

    def _is_reduced(self, p: torch.Tensor) -> bool:
        """Returns True if DDP averages the gradient in this backward pass, which it does in the dtype of `p`."""
        if self._ddp_of is None:  # the model may be wrapped after the call, and before the first backward pass
            self._ddp_of = _ddp_of_each(self._params)
        ddp = self._ddp_of.get(p)
        return ddp is not None and bool(ddp.require_forward_param_sync)  # set by the forward pass: False in `no_sync`

    def remove(self) -> None:
        """Gradients of later backward passes are summed in the dtype of their parameters again."""
        for handle in self._handles:
            handle.remove()


def accumulate_in_fp32(model: torch.nn.Module) -> Fp32Sums:
    """Makes autograd sum the gradients of bf16 parameters of `model` in fp32; call it once, before `compile` or after.

    ``p.grad`` becomes fp32 in the first microstep after each ``zero_grad()``: 2 bytes per parameter more. The step
    reads it as it is. Under DDP, put all microsteps but the last in ``no_sync()``: each process rounds its sum once,
    and DDP averages these in bf16. ``remove()`` of the result ends it.

    Raises:
        ValueError: a parameter is a DTensor, whose gradients FSDP2 itself sums (`MixedPrecisionPolicy`), or is held by
            DDP with `find_unused_parameters` or `static_graph`. The first backward pass raises this too.
    """
    params = dict(model.named_parameters())
    for name, p in params.items():
        if is_sharded(p):
            raise ValueError(
                f"parameter {name!r} is a DTensor, and its gradients are summed before autograd has them: use "
                "fully_shard's MixedPrecisionPolicy(reduce_dtype=torch.float32), set_requires_gradient_sync(False) in "
                "all microsteps but the last, which sums them in fp32"
            )
    # `compile` may cast those in fp32 later, in place; until then their gradients are fp32 anyway.
    return Fp32Sums(p for p in params.values() if p.dtype in FLOATS)


def _ddp_of_each(params: list[torch.Tensor]) -> dict[torch.Tensor, Any]:
    found = wrappers.ddp_over(dict.fromkeys(params, ""))
    for ddp in found:
        # Either makes DDP look at gradients when the hooks of this backward pass have not run.
        options = [o for o in ("find_unused_parameters", "static_graph") if getattr(ddp, o)]
        if options:
            raise ValueError(
                f"accumulate_in_fp32 cannot be used with DistributedDataParallel({options[0]}=True), which reduces "
                "gradients that the last microstep did not write: leave the option out, or call it without DDP and "
                "reduce p.grad yourself after the last microstep"
            )
    return {p: ddp for ddp in found for p in ddp.module.parameters()}
