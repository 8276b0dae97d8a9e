"""What torch's fused steps compute, in operations on lists that wait: `torch.optim` documents each algorithm.

Steps and what a GradScaler found are numbers on the host, and known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

Tensors = list[torch.Tensor]


def _prepared(grads: Tensors, maximize: bool, scale: torch.Tensor | None) -> Tensors:
    """The gradients to use; unscaled in place, as torch's kernels do."""
    if scale is not None:
        torch._foreach_div_(grads, float(scale))
    return list(torch._foreach_neg(grads)) if maximize else grads


def _decayed(params: Tensors, grads: Tensors, rate: float) -> Tensors:
    return list(torch._foreach_add(grads, params, alpha=rate)) if rate else grads


def _adam(decoupled: bool) -> Callable[..., None]:
    def step(
        params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, maxima: Tensors, steps: Tensors, *,
        lr: Any, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
        grad_scale: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        grads, rate = _prepared(grads, maximize, grad_scale), float(lr)
        if decoupled and weight_decay:
            torch._foreach_mul_(params, 1 - rate * weight_decay)
        elif weight_decay:
            grads = _decayed(params, grads, weight_decay)
        torch._foreach_lerp_(firsts, grads, 1 - beta1)
        torch._foreach_mul_(seconds, beta2)
        torch._foreach_addcmul_(seconds, grads, grads, 1 - beta2)
        if amsgrad:
            torch._foreach_maximum_(maxima, seconds)
        counts = list(map(float, steps))
        roots = list(torch._foreach_sqrt(maxima if amsgrad else seconds))
        torch._foreach_div_(roots, [(1 - beta2**n) ** 0.5 for n in counts])
        torch._foreach_add_(roots, eps)
        torch._foreach_addcdiv_(params, firsts, roots, [-rate / (1 - beta1**n) for n in counts])

    return step


def _sgd(
    params: Tensors, grads: Tensors, buffers: Tensors, *, weight_decay: float, momentum: float, lr: Any,
    dampening: float, nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    grads = _decayed(params, _prepared(grads, maximize, grad_scale), weight_decay)
    if momentum and is_first_step:
        torch._foreach_copy_(buffers, grads)
    elif momentum:
        torch._foreach_mul_(buffers, momentum)
        torch._foreach_add_(buffers, grads, alpha=1 - dampening)
    if momentum:
        grads = list(torch._foreach_add(grads, buffers, alpha=momentum)) if nesterov else buffers
    torch._foreach_add_(params, grads, alpha=-float(lr))


def _adagrad(
    params: Tensors, grads: Tensors, sums: Tensors, steps: Tensors, *, lr: Any, lr_decay: float, weight_decay: float,
    eps: float, maximize: bool, grad_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    grads = _decayed(params, _prepared(grads, maximize, grad_scale), weight_decay)
    torch._foreach_addcmul_(sums, grads, grads, 1)
    roots = list(torch._foreach_sqrt(sums))
    torch._foreach_add_(roots, eps)
    torch._foreach_addcdiv_(params, grads, roots, [-float(lr) / (1 + (float(n) - 1) * lr_decay) for n in steps])


_STEPS: Mapping[str, Callable[..., None]] = {
    "_fused_adam_": _adam(decoupled=False),
    "_fused_adamw_": _adam(decoupled=True),
    "_fused_sgd_": _sgd,
    "_fused_adagrad_": _adagrad,
}


def step_of(func: Any) -> Callable[..., None] | None:
    """What computes an operation's step; None if it is not a fused one."""
    return _STEPS.get(str(getattr(func, "__name__", "")).partition(".")[0])


def run(step: Callable[..., None], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Takes a step, unless a GradScaler found an infinite gradient."""
    found = kwargs.pop("found_inf", None)
    if found is None or not float(found):
        step(*args, **kwargs)
