"""What torch's fused steps compute, in operations on lists that wait: `torch.optim` documents each algorithm.

Steps and what a GradScaler found are numbers on the host, and known.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from collage_neuron.torch_privates import on_lists

Tensors = list[torch.Tensor]


def _prepared(grads: Tensors, maximize: bool, scale: torch.Tensor | None) -> Tensors:
    # In place, as torch's kernels do: code after the step finds unscaled gradients.
    if scale is not None:
        on_lists("div_", grads, float(scale))
    return on_lists("neg", grads) if maximize else grads


def _decayed(params: Tensors, grads: Tensors, rate: float) -> Tensors:
    return on_lists("add", grads, params, alpha=rate) if rate else grads


def _adam(decoupled: bool) -> Callable[..., None]:
    def step(
        params: Tensors, grads: Tensors, firsts: Tensors, seconds: Tensors, maxima: Tensors, steps: Tensors, *,
        lr: Any, beta1: float, beta2: float, weight_decay: float, eps: float, amsgrad: bool, maximize: bool,
        grad_scale: torch.Tensor | None = None,
    ) -> None:  # fmt: skip
        grads, rate = _prepared(grads, maximize, grad_scale), float(lr)
        if decoupled and weight_decay:
            on_lists("mul_", params, 1 - rate * weight_decay)
        elif weight_decay:
            grads = _decayed(params, grads, weight_decay)
        on_lists("lerp_", firsts, grads, 1 - beta1)
        on_lists("mul_", seconds, beta2)
        on_lists("addcmul_", seconds, grads, grads, 1 - beta2)
        if amsgrad:
            on_lists("maximum_", maxima, seconds)
        counts = list(map(float, steps))  # on the host: bias corrections are computed in double, as plain numbers
        roots = on_lists("sqrt", maxima if amsgrad else seconds)
        on_lists("div_", roots, [(1 - beta2**n) ** 0.5 for n in counts])
        on_lists("add_", roots, eps)
        on_lists("addcdiv_", params, firsts, roots, [-rate / (1 - beta1**n) for n in counts])

    return step


def _sgd(
    params: Tensors, grads: Tensors, buffers: Tensors, *, weight_decay: float, momentum: float, lr: Any,
    dampening: float, nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    grads = _decayed(params, _prepared(grads, maximize, grad_scale), weight_decay)
    if momentum and is_first_step:  # a buffer begins as the gradient itself, which is not dampened
        on_lists("copy_", buffers, grads)
    elif momentum:
        on_lists("mul_", buffers, momentum)
        on_lists("add_", buffers, grads, alpha=1 - dampening)
    if momentum:
        grads = on_lists("add", grads, buffers, alpha=momentum) if nesterov else buffers
    on_lists("add_", params, grads, alpha=-float(lr))


def _adagrad(
    params: Tensors, grads: Tensors, sums: Tensors, steps: Tensors, *, lr: Any, lr_decay: float, weight_decay: float,
    eps: float, maximize: bool, grad_scale: torch.Tensor | None = None,
) -> None:  # fmt: skip
    grads = _decayed(params, _prepared(grads, maximize, grad_scale), weight_decay)
    on_lists("addcmul_", sums, grads, grads, 1)
    roots = on_lists("sqrt", sums)
    on_lists("add_", roots, eps)
    on_lists("addcdiv_", params, grads, roots, [-float(lr) / (1 + (float(n) - 1) * lr_decay) for n in steps])


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
